"""What is built of the settings and of vLLM's configuration."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.lmcache.assembly import create_lmcache_pooling
from connectors.lmcache.chunk_keys import ChunkNames, LMCacheModel, ServerChunkKeys, lmcache_model
from spm.errors import ConfigError
from tests import lmcache_server
from tests.connectors.lmcache.rig import Rig

pytestmark = pytest.mark.skipif(not lmcache_server.INSTALLED, reason="lmcache is not installed")


def config_of(**changed: Any) -> Any:  # noqa: ANN401
    """As much of vLLM's configuration as LMCache looks at."""
    parallel = {
        "world_size": 4,
        "rank": 0,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "decode_context_parallel_size": 1,
        "cp_kv_cache_interleave_size": 1,
    }
    model = SimpleNamespace(
        model="some/model",
        use_mla=changed.pop("use_mla", False),
        hf_config=SimpleNamespace(),
        hf_text_config=SimpleNamespace(),
    )
    return SimpleNamespace(
        model_config=model, parallel_config=SimpleNamespace(**{**parallel, **changed})
    )


def test_a_model_is_named_as_lmcaches_connector_names_it() -> None:
    assert lmcache_model(config_of(), 1) == LMCacheModel("some/model", 4, "")


@pytest.mark.parametrize(
    ("changed", "groups", "why"),
    [
        ({"use_mla": True}, 1, "MLA"),
        ({}, 2, "2 KV cache groups"),
        ({"decode_context_parallel_size": 2}, 1, "decode context"),
    ],
)
def test_names_that_would_be_guessed_are_not_known(
    changed: dict[str, Any], groups: int, why: str
) -> None:
    assert why in lmcache_model(config_of(**changed), groups).unnamed


@pytest.mark.parametrize("algorithm", ["builtin", "sha256_cbor"])
def test_hashes_that_differ_by_process_are_refused(algorithm: str) -> None:
    with pytest.raises(ConfigError, match=algorithm):
        ServerChunkKeys(ChunkNames("some/model", 1), 256, algorithm)


@pytest.mark.parametrize(("model", "world_size"), [("a@b", 1), ("m", 0), ("m", 256)])
def test_models_that_lmcache_cannot_name_are_refused(model: str, world_size: int) -> None:
    with pytest.raises(ConfigError):
        ChunkNames(model, world_size)


def test_a_redis_url_is_of_use_for_one_connector_only(tmp_path: Path) -> None:
    wrap = {"kv_connector": "ExampleConnector", "remote_url": "redis://127.0.0.1"}

    with pytest.raises(ConfigError, match="LMCacheConnectorV1 only"):
        create_lmcache_pooling(Rig({"wrap": wrap}).parts)
