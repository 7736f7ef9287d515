"""Names of an in-process LMCache's chunks in Redis (``LMCacheConnectorV1``, ``redis://``).

Read from LMCache 0.5.6: every worker's part of a chunk is two Redis keys, ``...kv_bytes`` and
``...metadata``, written one after the other without expiry; LMCache looks for the second alone.
A chunk is there when both of every worker are. Neither ``cache_salt`` nor adapters are in the
names: requests that have one do not come here.
"""

import os
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from connectors.lmcache.session_chunks import CHUNK_GROUP
from spm.errors import ConfigError
from spm.keys import Rank, StoreKey
from tracker.ids import BlockHash, BlockKey, make_block_key, split_block_key

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PARTS = ("kv_bytes", "metadata")
"""In the order in which LMCache writes them."""

_TWO_KEY_SCHEMES = ("redis://", "rediss://", "unix://", "redis-sentinel://")


class InProcessNames:
    """What LMCache calls its chunks: two names a worker, as if there were twice the ranks."""

    def __init__(self, database: Any, world_size: int) -> None:  # noqa: ANN401
        """``database``: LMCache's, which has the model's place in the names."""
        self._before, self._after = [], []
        for worker in range(world_size):
            before, after = _around_hash(database, worker)
            self._before += [before] * len(PARTS)
            self._after += [after + part for part in PARTS]

    def store_key(self, key: BlockKey, rank: Rank) -> StoreKey:
        """``rank``: twice the worker's, plus the part's."""
        chunk_hash, _ = split_block_key(key)
        return StoreKey(self._before[rank] + chunk_hash.decode() + self._after[rank])


class InProcessChunkKeys:
    """:class:`connectors.lmcache.session_chunks.ChunkKeys`, with LMCache's own token database.
    Scheduler thread."""

    def __init__(self, database: Any, world_size: int) -> None:  # noqa: ANN401
        self.chunk_tokens: int = database.chunk_size
        self.names = InProcessNames(database, world_size)
        self.values_a_chunk = len(PARTS) * world_size
        self._database = database

    def keys(
        self, tokens: "array[int]", known: Sequence[BlockKey], cache_salt: str
    ) -> list[BlockKey]:
        """O(all tokens): LMCache's database hashes from the first on. ``cache_salt`` is not in
        the names."""
        whole = tokens[: len(tokens) // self.chunk_tokens * self.chunk_tokens].tolist()
        hashes = [chunk for _, _, chunk in self._database.process_tokens(whole, make_key=False)]
        return [_key(one) for one in hashes[len(known) :]]


def _key(chunk_hash: int) -> BlockKey:
    return make_block_key(BlockHash(f"{chunk_hash:x}".encode()), CHUNK_GROUP)


def _around_hash(database: Any, worker: int) -> tuple[str, str]:  # noqa: ANN401
    """What stands before and behind the hash in a worker's names."""
    from lmcache.utils import CacheEngineKey

    metadata = database.metadata
    key = CacheEngineKey(metadata.model_name, metadata.world_size, worker, 0, metadata.kv_dtype)
    before, after = key.to_string().rsplit("@0@", 1)
    return f"{before}@", f"@{after}"


def in_process_chunk_keys(vllm_config: "VllmConfig", num_groups: int) -> InProcessChunkKeys:
    """As this engine's LMCache has it. ``num_groups``: vLLM's KV cache groups. Raises
    :class:`ConfigError`, saying why the names are not known."""
    from lmcache.integration.vllm.utils import create_lmcache_metadata

    metadata, config = create_lmcache_metadata(vllm_config)
    return chunk_keys_of(config, metadata, num_groups)


def chunk_keys_of(config: Any, metadata: Any, num_groups: int) -> InProcessChunkKeys:  # noqa: ANN401
    """The same, from LMCache's own configuration and metadata."""
    refusal = _refusal(metadata, config, num_groups)
    if refusal:
        raise ConfigError(f"names of LMCache's chunks in Redis are not known: {refusal}")
    return InProcessChunkKeys(_token_database(config, metadata), metadata.world_size)


def _refusal(metadata: Any, config: Any, num_groups: int) -> str:  # noqa: ANN401
    url = config.remote_url or ""
    if not url.startswith(_TWO_KEY_SCHEMES):
        return f"LMCache's remote_url is {url.partition(':')[0] or 'not set'!r}"
    if metadata.use_mla:
        return "MLA: ranks share chunks"
    if num_groups != 1:
        return f"{num_groups} KV cache groups"
    if config.use_layerwise:
        return "use_layerwise: a chunk is a value a layer"
    if config.enable_blending:
        return "enable_blending: chunks are no prefixes"
    fixed = os.environ.get("PYTHONHASHSEED", "random") not in ("", "random")
    if config.pre_caching_hash_algorithm == "builtin" and not fixed:
        return "PYTHONHASHSEED is not set, so every process hashes differently"
    return ""


def _token_database(config: Any, metadata: Any) -> Any:  # noqa: ANN401
    """LMCache's. It sets up vLLM's block hashes anew on the way; here they stay as they are."""
    from lmcache.v1.token_database import ChunkedTokenDatabase
    from vllm.v1.core import kv_cache_utils

    names = ("NONE_HASH", "_NONE_HASH_SEED")
    before = {
        name: getattr(kv_cache_utils, name) for name in names if hasattr(kv_cache_utils, name)
    }
    try:
        return ChunkedTokenDatabase(config, metadata)
    finally:
        for name, value in before.items():
            setattr(kv_cache_utils, name, value)
