"""The one place where the names of stored values are built and taken apart."""

import hashlib
from dataclasses import dataclass
from typing import NewType, Protocol

from tracker.ids import BlockHash, BlockKey, GroupId, make_block_key, split_block_key

StoreKey = NewType("StoreKey", str)
"""Full name of one value in a store: namespace, fingerprint, group, rank, block hash."""

Fingerprint = NewType("Fingerprint", bytes)
"""16 bytes that stand for everything that must be equal for KV to be interchangeable."""

Rank = NewType("Rank", int)
"""Worker rank inside one engine (pipeline x tensor parallel)."""


def fingerprint_of(parts: dict[str, str]) -> Fingerprint:
    """Hash named parts, order-independent and unambiguous, to a fingerprint."""
    digest = hashlib.sha256()
    for name in sorted(parts):
        for text in (name, parts[name]):
            data = text.encode()
            digest.update(len(data).to_bytes(8, "big") + data)
    return Fingerprint(digest.digest()[:16])


class KeyNames(Protocol):
    """How a store calls the values of keys: by :class:`KeySpace` if they are ours."""

    def store_key(self, key: BlockKey, rank: Rank) -> StoreKey:
        """Name of ``key``'s value for one rank."""
        ...


@dataclass(frozen=True, slots=True)
class KeySpace:
    """Names of one engine configuration's values.

    ``epoch`` is empty until the cache is reset (new weights, say); from then on the
    engine reads and writes under names nobody has used before.
    """

    namespace: str
    fingerprint: Fingerprint
    epoch: bytes = b""

    @property
    def effective_fingerprint(self) -> Fingerprint:
        """What headers carry: the fingerprint, mixed with the epoch if there is one."""
        if not self.epoch:
            return self.fingerprint
        return Fingerprint(hashlib.sha256(self.fingerprint + self.epoch).digest()[:16])

    def store_key(self, key: BlockKey, rank: Rank) -> StoreKey:
        """Name of ``key``'s value for one rank. Never contains a session id."""
        block_hash, group = split_block_key(key)
        fingerprint = self.effective_fingerprint.hex()
        return StoreKey(f"{self.namespace}:{fingerprint}:{group}:{rank}:{block_hash.hex()}")


def block_key_of(store_key: StoreKey) -> BlockKey:
    """The block key inside a store key built by :meth:`KeySpace.store_key`."""
    _, group, _, block_hash = store_key.rsplit(":", 3)
    return make_block_key(BlockHash(bytes.fromhex(block_hash)), GroupId(int(group)))
