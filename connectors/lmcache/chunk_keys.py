"""A multiprocess server's names for a session's chunks, derived as LMCache derives them.

Read from LMCache 0.5.6: an object is one chunk's KV of one worker, named by the model, the
worker's place (``kv_rank``), an object group, a rolling hash of all tokens up to the chunk's
end, and the ``cache_salt``. Its RESP adapter joins these with ``@`` to the Redis key. Checked
in tests against what LMCache really wrote.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from connectors.lmcache.control import ObjectName
from connectors.lmcache.session_chunks import CHUNK_GROUP
from spm.errors import ConfigError
from spm.keys import Rank, StoreKey
from tracker.ids import BlockHash, BlockKey, make_block_key, split_block_key

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HASH_ALGORITHM = "blake3"
"""LMCache's default. Others start from a number that every process draws by itself."""
_HASH_BYTES = 32
_MAX_WORLD_SIZE = 255  # kv_rank has a byte for it


@dataclass(frozen=True)
class ChunkNames:
    """What LMCache calls the chunks of one engine. A chunk's key is its hash and then the salt:
    two tenants' equal chunks have different keys, and each says all about its names."""

    model_name: str
    world_size: int

    def __post_init__(self) -> None:
        """Raises :class:`ConfigError`."""
        if "@" in self.model_name or not 1 <= self.world_size <= _MAX_WORLD_SIZE:
            raise ConfigError(f"LMCache has no names for model {self.model_name!r} on these ranks")

    @cached_property
    def _prefixes(self) -> list[str]:
        return [f"{self.model_name}@{rank:08x}@0@" for rank in self._kv_ranks]

    @cached_property
    def _kv_ranks(self) -> list[int]:
        from lmcache.v1.distributed.api import ObjectKey

        world = self.world_size
        return [ObjectKey.ComputeKVRank(world, rank, world, rank) for rank in range(world)]

    def store_key(self, key: BlockKey, rank: Rank) -> StoreKey:
        """What the RESP adapter calls ``key``'s chunk of one worker in Redis."""
        chunk_hash, cache_salt = _split(key)
        name = self._prefixes[rank] + chunk_hash.hex()
        return StoreKey(f"{name}@{cache_salt}" if cache_salt else name)

    def objects(self, key: BlockKey) -> Iterator[ObjectName]:
        """Every worker's object of ``key``'s chunk."""
        chunk_hash, cache_salt = _split(key)
        for kv_rank in self._kv_ranks:
            yield ObjectName(chunk_hash, self.model_name, kv_rank, cache_salt)


def chunk_key(chunk_hash: bytes, cache_salt: str) -> BlockKey:
    """The key of a chunk."""
    return make_block_key(BlockHash(chunk_hash + cache_salt.encode()), CHUNK_GROUP)


def _split(key: BlockKey) -> tuple[bytes, str]:
    both, _ = split_block_key(key)
    return both[:_HASH_BYTES], both[_HASH_BYTES:].decode()


class ServerChunkKeys:
    """:class:`connectors.lmcache.session_chunks.ChunkKeys` of a multiprocess server, with its
    own hash. Any thread."""

    def __init__(self, names: ChunkNames, chunk_tokens: int, hash_algorithm: str) -> None:
        """Raises :class:`ConfigError` for an algorithm whose hashes another process gets
        differently. LMCache's hasher would also set up vLLM's block hashes anew for it."""
        if hash_algorithm != HASH_ALGORITHM:
            raise ConfigError(
                f"LMCache hashes chunks with {hash_algorithm!r}, which differs by process; start "
                f"its server with --hash-algorithm {HASH_ALGORITHM}"
            )
        from lmcache.v1.multiprocess.token_hasher import TokenHasher

        self.names = names
        self.chunk_tokens = chunk_tokens
        self.values_a_chunk = names.world_size
        try:
            self._hasher = TokenHasher(chunk_tokens, hash_algorithm)
        except (ImportError, ValueError, RuntimeError, TypeError) as error:
            raise ConfigError(
                f"LMCache's hasher does not take the server's word: {error}"
            ) from error

    def keys(
        self, tokens: "array[int]", known: Sequence[BlockKey], cache_salt: str
    ) -> list[BlockKey]:
        """O(new tokens)."""
        new = tokens[len(known) * self.chunk_tokens :].tolist()
        after = _split(known[-1])[0] if known else None
        hashes = self._hasher.compute_chunk_hashes(new, prefix_hash=after)
        return [chunk_key(one, cache_salt) for one in hashes]


@dataclass(frozen=True, slots=True)
class LMCacheModel:
    """How LMCache's connector registers this engine's model with the server."""

    name: str
    world_size: int
    unnamed: str
    """Why names of its objects are not known; empty: they are."""


def lmcache_model(vllm_config: "VllmConfig", num_groups: int) -> LMCacheModel:
    """As :class:`LMCacheMPConnector` does it, with one server. ``num_groups``: vLLM's KV cache
    groups."""
    from lmcache.integration.vllm import lmcache_mp_connector as connector

    name: str = connector.get_dcp_decorated_model_name(vllm_config, None)
    strategy: Any = connector.build_parallel_strategy_from_vllm_config(vllm_config, 1)
    unnamed = ""
    if strategy.mla_only:
        unnamed = "MLA: ranks share objects"
    elif num_groups != 1:
        unnamed = f"{num_groups} KV cache groups"
    elif strategy.dcp_size != 1:
        unnamed = "decode context parallelism: the model's name depends on the KV layout"
    return LMCacheModel(name, strategy.kv_world_size, unnamed)
