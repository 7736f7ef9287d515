"""Sizes and identities of the values one worker reads and writes."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from connectors.stores.buffers import Buffer, ByteArray
from connectors.worker.layout import GroupLayout
from spm.keys import KeySpace, Rank, StoreKey
from spm.value_auth import Authenticator
from spm.value_format import HEADER_BYTES, ValueIdentity
from tracker.ids import BlockKey, GroupId, split_block_key


@dataclass(frozen=True, slots=True)
class ValueCodec:
    """Knows, for a block key, its store key, its size and what its header must say."""

    rank: Rank
    layouts: Mapping[GroupId, GroupLayout]
    auth: Authenticator | None = None
    """With it values are authenticated."""

    def layout_of(self, key: BlockKey) -> GroupLayout:
        """Layout of the key's group on this rank."""
        return self.layouts[split_block_key(key)[1]]

    def value_bytes(self, key: BlockKey) -> int:
        """Header and payload."""
        return HEADER_BYTES + self.layout_of(key).payload_bytes

    def store_key(self, key: BlockKey, key_space: KeySpace) -> StoreKey:
        """Name of this rank's value."""
        return key_space.store_key(key, self.rank)

    def identity(self, key: BlockKey, key_space: KeySpace) -> ValueIdentity:
        """What the value's header has to match."""
        block_hash, group = split_block_key(key)
        return ValueIdentity(key_space.effective_fingerprint, self.rank, group, block_hash)


def payload_of(buffer: Buffer) -> ByteArray:
    """The KV bytes of a value, as an array that copies can work on."""
    return np.asarray(buffer.array[HEADER_BYTES:])
