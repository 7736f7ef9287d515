"""Everything that has to be equal for two engines to exchange KV, in one hash.

Model, weights, dtypes, block and head geometry, parallel layout, hash algorithm and
seed. Different engines that differ in any of it use different keys and never meet.
"""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.v1.core import kv_cache_utils

from connectors.groups import CacheGeometry
from connectors.metadata import LayoutHandshake
from spm.errors import ConfigError
from spm.keys import Fingerprint, fingerprint_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SAMPLE_BYTES = 64 * 1024
_SAMPLES_PER_FILE = 8
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


def engine_fingerprint(
    vllm_config: "VllmConfig", geometry: CacheGeometry, layouts: list[LayoutHandshake]
) -> Fingerprint:
    """Fingerprint of this engine. ``layouts`` are all ranks' handshakes."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    hf_config = model.hf_config.to_dict()
    for volatile in ("_name_or_path", "transformers_version"):
        hf_config.pop(volatile, None)
    return fingerprint_of(
        {
            "model": _model_identity(model.model, model.revision),
            "hf_config": json.dumps(hf_config, sort_keys=True, default=str),
            "dtype": str(model.dtype),
            "quantization": str(model.quantization),
            "cache_dtype": str(vllm_config.cache_config.cache_dtype),
            "groups": repr([(g.block_tokens, g.window_tokens) for g in geometry.groups]),
            "parallel": f"tp{parallel.tensor_parallel_size} pp{parallel.pipeline_parallel_size}",
            "hash": f"{_hash_algorithm(vllm_config)} {_none_hash().hex()}",
            "layouts": repr(sorted((h.rank, h.layout_digest, h.value_bytes) for h in layouts)),
        }
    )


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


def _model_identity(model: str, revision: str | None) -> str:
    """Name and revision of a hub model; a digest of samples of the weights of a local one.

    A path says nothing about the weights in it: the same path with other weights must not
    find the old KV. Sampling reads at most 512 KiB a file.
    """
    root = Path(model)
    if not root.is_dir():
        return f"hub:{model}@{revision}"
    digest = hashlib.sha256()
    for path in sorted(p for p in root.iterdir() if p.suffix in _WEIGHT_SUFFIXES):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES_PER_FILE):
                file.seek(max(0, (size - _SAMPLE_BYTES) * sample // (_SAMPLES_PER_FILE - 1)))
                digest.update(file.read(_SAMPLE_BYTES))
    return f"weights:{digest.hexdigest()}"
