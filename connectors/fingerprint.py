"""Everything that has to be equal for two engines to exchange KV, in one hash.

Model, weights, dtypes, block and head geometry, parallel layout, hash algorithm and
seed. Different engines that differ in any of it use different keys and never meet.
"""

import json
import secrets
from typing import TYPE_CHECKING

from vllm.v1.core import kv_cache_utils

from connectors.groups import CacheGeometry
from connectors.metadata import LayoutHandshake
from connectors.weights import weights_identity
from spm.errors import ConfigError
from spm.keys import Fingerprint, fingerprint_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def engine_fingerprint(
    vllm_config: "VllmConfig",
    geometry: CacheGeometry,
    layouts: list[LayoutHandshake],
    auth_key_id: str = "",
) -> Fingerprint:
    """Fingerprint of this engine. ``layouts`` are all ranks' handshakes; ``auth_key_id`` stands
    for the secret with which it authenticates what it stores, empty if it does not."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    hf_config = model.hf_config.to_dict()
    for volatile in ("_name_or_path", "transformers_version"):
        hf_config.pop(volatile, None)
    # Nothing is added without a secret: what was stored before there were any stays usable.
    authenticated = {"auth_key_id": auth_key_id} if auth_key_id else {}
    return fingerprint_of(
        {
            # An object-store model lives in model_weights; model is then a scratch directory.
            "model": weights_identity(
                model.model_weights or model.model,
                getattr(model.hf_config, "_commit_hash", None) or model.revision,
            ),
            "hf_config": json.dumps(hf_config, sort_keys=True, default=str),
            "loaded": _loaded_weights(vllm_config),
            "max_model_len": str(model.max_model_len),  # LongRoPE picks its factors by it
            "dtype": str(model.dtype),
            "quantization": str(model.quantization),
            "cache_dtype": str(vllm_config.cache_config.cache_dtype),
            "groups": repr([(g.block_tokens, g.window_tokens) for g in geometry.groups]),
            "parallel": f"tp{parallel.tensor_parallel_size} pp{parallel.pipeline_parallel_size}",
            "hash": f"{_hash_algorithm(vllm_config)} {_none_hash().hex()}",
            "layouts": repr(sorted((h.rank, h.layout_digest, h.value_bytes) for h in layouts)),
            **authenticated,
        }
    )


def _loaded_weights(vllm_config: "VllmConfig") -> str:
    """Empty if what is in memory is what is on disk; else something no other engine has."""
    made_up = str(vllm_config.load_config.load_format) == "dummy"
    if made_up or vllm_config.weight_transfer_config is not None:
        return secrets.token_hex(16)
    return ""


def require_shareable_hashes(vllm_config: "VllmConfig") -> None:
    """Refuse a shared store when block hashes cannot be trusted across processes."""
    algorithm = _hash_algorithm(vllm_config)
    if not algorithm.startswith("sha256"):
        raise ConfigError(
            f"--prefix-caching-hash-algo={algorithm!r} with a remote store: block hashes must be "
            "collision resistant and equal in every process; use sha256 or sha256_cbor"
        )


def _hash_algorithm(vllm_config: "VllmConfig") -> str:
    return str(vllm_config.cache_config.prefix_caching_hash_algo)


def _none_hash() -> bytes:
    """vLLM's root hash; engines with another seed must not meet."""
    return bytes(getattr(kv_cache_utils, "NONE_HASH", b""))
