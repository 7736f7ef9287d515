"""Two engines share KV only if everything that shapes it is equal."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core import kv_cache_utils

from connectors.fingerprint import engine_fingerprint, require_shareable_hashes
from connectors.groups import CacheGeometry, GroupGeometry
from connectors.metadata import LayoutHandshake
from spm.errors import ConfigError
from spm.keys import Fingerprint, Rank
from tracker.ids import GroupId

GEOMETRY = CacheGeometry((GroupGeometry(GroupId(0), 16, None, 0, ("layer.0",)),), 16, 16)
LAYOUTS = [LayoutHandshake(Rank(rank), f"layout{rank}", (4096,)) for rank in (0, 1)]


class HfConfig:
    """What we use of a transformers config."""

    def __init__(self, **values: object) -> None:
        self._commit_hash: str | None = None
        self.values = {"hidden_size": 64, **values}

    def to_dict(self) -> dict[str, object]:
        return dict(self.values)


def engine(model: str = "org/model") -> Any:  # noqa: ANN401
    """A configuration of vLLM's, as far as the fingerprint reads it."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model,
            model_weights="",
            revision=None,
            hf_config=HfConfig(),
            dtype="bfloat16",
            quantization=None,
            max_model_len=4096,
        ),
        load_config=SimpleNamespace(load_format="auto"),
        weight_transfer_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1),
    )


def fingerprint(config: Any) -> Fingerprint:  # noqa: ANN401
    return engine_fingerprint(config, GEOMETRY, LAYOUTS)


@pytest.fixture(autouse=True)
def root_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"root", raising=False)


def test_equal_engines_share() -> None:
    assert fingerprint(engine()) == fingerprint(engine())
    assert len(fingerprint(engine())) == 16


@pytest.mark.parametrize(
    "change",
    [
        lambda c: setattr(c.model_config, "model", "org/other"),
        lambda c: setattr(c.model_config, "model_weights", "s3://bucket/model"),
        lambda c: setattr(c.model_config, "revision", "v2"),
        lambda c: setattr(c.model_config.hf_config, "_commit_hash", "abc"),
        lambda c: setattr(c.model_config, "hf_config", HfConfig(rope_theta=1e6)),
        lambda c: setattr(c.model_config, "dtype", "float16"),
        lambda c: setattr(c.model_config, "quantization", "fp8"),
        lambda c: setattr(c.model_config, "max_model_len", 8192),
        lambda c: setattr(c.cache_config, "cache_dtype", "fp8"),
        lambda c: setattr(c.cache_config, "prefix_caching_hash_algo", "sha256_cbor"),
        lambda c: setattr(c.parallel_config, "tensor_parallel_size", 4),
        lambda c: setattr(c.parallel_config, "pipeline_parallel_size", 2),
    ],
    ids=lambda change: str(change.__code__.co_consts[1:]),
)
@pytest.mark.fault("F27", breaks="the type of KV is not part of the name")
def test_any_difference_in_the_configuration_keeps_engines_apart(
    change: Callable[[Any], None],
) -> None:
    config = engine()
    change(config)
    assert fingerprint(config) != fingerprint(engine())


@pytest.mark.parametrize(
    "change",
    [
        lambda c: setattr(c.load_config, "load_format", "dummy"),
        lambda c: setattr(c, "weight_transfer_config", object()),
    ],
)
def test_weights_that_are_not_those_on_disk_are_shared_with_nobody(
    change: Callable[[Any], None],
) -> None:
    config = engine()
    change(config)
    assert fingerprint(config) != fingerprint(config)


def test_another_root_hash_keeps_engines_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(engine())
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"seed")
    assert fingerprint(engine()) != before


@pytest.mark.parametrize("field", [{"block_tokens": 32}, {"window_tokens": 64}])
def test_another_block_size_or_window_keeps_engines_apart(field: dict[str, int]) -> None:
    group: Any = replace(GEOMETRY.groups[0], **field)  # type: ignore[arg-type]
    other = replace(GEOMETRY, groups=(group,))
    assert engine_fingerprint(engine(), other, LAYOUTS) != fingerprint(engine())


@pytest.mark.parametrize("field", [{"layout_digest": "other"}, {"value_bytes": (8192,)}])
def test_another_layout_of_any_rank_keeps_engines_apart(field: dict[str, Any]) -> None:
    layouts = [LAYOUTS[0], replace(LAYOUTS[1], **field)]
    assert engine_fingerprint(engine(), GEOMETRY, layouts) != fingerprint(engine())


def test_the_order_of_ranks_does_not_matter() -> None:
    assert engine_fingerprint(engine(), GEOMETRY, LAYOUTS[::-1]) == fingerprint(engine())


def test_where_a_model_lies_and_who_wrote_its_config_do_not_matter(tmp_path: Path) -> None:
    prints = set()
    for name, version in (("a", "4.0"), ("b", "5.0")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        config = engine(str(folder))
        config.model_config.hf_config = HfConfig(_name_or_path=name, transformers_version=version)
        prints.add(fingerprint(config))
    assert len(prints) == 1


def test_the_same_path_with_replaced_weights_keeps_engines_apart(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = fingerprint(engine(str(tmp_path)))
    (tmp_path / "model.safetensors").write_bytes(b"WEIGHTS")
    assert fingerprint(engine(str(tmp_path))) != before


def test_object_store_models_are_told_apart_by_their_url(tmp_path: Path) -> None:
    """vLLM pulls only the configuration into a scratch directory and names that as model."""
    prints = set()
    for name in ("one", "two"):
        config = engine(str(tmp_path))
        config.model_config.model_weights = f"s3://bucket/{name}"
        prints.add(fingerprint(config))
    assert len(prints) == 2


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_collision_resistant_hashes_may_be_shared(algorithm: str) -> None:
    config = engine()
    config.cache_config.prefix_caching_hash_algo = algorithm
    require_shareable_hashes(config)


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor", "builtin", "", "SHA256"])
@pytest.mark.fault("F12", breaks="any hash will do for a shared store")
def test_other_hashes_are_refused_with_a_remote_store(algorithm: str) -> None:
    config = engine()
    config.cache_config.prefix_caching_hash_algo = algorithm
    with pytest.raises(ConfigError) as caught:
        require_shareable_hashes(config)
    assert f"--prefix-caching-hash-algo={algorithm!r}" in str(caught.value)
    assert "use sha256 or sha256_cbor" in str(caught.value)


def test_engines_with_another_secret_or_none_never_meet() -> None:
    ids = ["", "a" * 32, "b" * 32]
    prints = {engine_fingerprint(engine(), GEOMETRY, LAYOUTS, auth_key_id=one) for one in ids}
    assert len(prints) == 3
    assert fingerprint(engine()) in prints, "without a secret nothing has changed"
