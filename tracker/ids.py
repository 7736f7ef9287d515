"""Typed identifiers shared by all layers."""

from dataclasses import dataclass
from typing import NewType

TenantId = NewType("TenantId", str)
SessionId = NewType("SessionId", str)

GroupId = NewType("GroupId", int)
"""Index of a KV cache group in vLLM's ``KVCacheConfig.kv_cache_groups``."""

BlockHash = NewType("BlockHash", bytes)
"""vLLM's prefix-cache hash of one block; covers tokens, LoRA, images and cache_salt."""

BlockKey = NewType("BlockKey", bytes)
"""A connector key: block hash followed by the group id (4 bytes, big endian).

The same bytes as vLLM's ``BlockHashWithGroupId``. Says nothing about rank, model or
namespace; :mod:`spm.keys` turns it into the name a store sees.
"""


@dataclass(frozen=True, slots=True)
class SessionRef:
    """A session is addressed by tenant and id together; an id alone is never enough."""

    tenant: TenantId
    session_id: SessionId


def make_block_key(block_hash: BlockHash, group: GroupId) -> BlockKey:
    """Pack a block hash and its KV cache group into one connector key."""
    return BlockKey(block_hash + group.to_bytes(4, "big"))


def split_block_key(key: BlockKey) -> tuple[BlockHash, GroupId]:
    """Inverse of :func:`make_block_key`."""
    return BlockHash(key[:-4]), GroupId(int.from_bytes(key[-4:], "big"))
