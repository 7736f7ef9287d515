"""Small opaque values with a lifetime, in this process's memory."""

from collections import OrderedDict
from collections.abc import Callable

from connectors.stores.base import MAX_DOCUMENT_BYTES, StoreKey
from spm.errors import IntegrityError

_CAPACITY_BYTES = 4 * MAX_DOCUMENT_BYTES
_OVERHEAD_BYTES = 300
"""Of a document beside its content: so that a million empty ones are no free lunch."""


class DocumentShelf:
    """Keeps up to 64 MiB of documents; those written longest ago make room for new ones.

    Not thread-safe: whoever owns it holds a lock. ``clock`` gives monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._documents: OrderedDict[StoreKey, tuple[bytes, float]] = OrderedDict()
        self._bytes = 0

    def put(self, key: StoreKey, content: bytes, ttl_s: int) -> bool:
        """Write or replace; False if it is too large. ``ttl_s`` 0: no expiry."""
        if len(content) > MAX_DOCUMENT_BYTES:
            return False
        self.drop(key)
        until_s = self._clock() + ttl_s if ttl_s else float("inf")
        self._documents[key] = (content, until_s)
        self._bytes += len(content) + _OVERHEAD_BYTES
        while self._bytes > _CAPACITY_BYTES:
            self.drop(next(iter(self._documents)))
        return True

    def get(self, key: StoreKey, max_bytes: int) -> bytes | None:
        """The content, unless it is absent, expired or longer than ``max_bytes``."""
        content, until_s = self._documents.get(key, (b"", 0.0))
        if until_s <= self._clock():
            self.drop(key)
            return None
        return content if len(content) <= max_bytes else None

    def drop(self, key: StoreKey) -> bool:
        """Forget it; False if it was not there."""
        if key not in self._documents:
            return False
        content, _ = self._documents.pop(key)
        self._bytes -= len(content) + _OVERHEAD_BYTES
        return True

    def clear(self) -> None:
        """Forget all."""
        self._documents.clear()
        self._bytes = 0

    def check_integrity(self) -> None:
        """Raise :class:`spm.errors.IntegrityError` if bytes were miscounted."""
        counted = sum(len(content) + _OVERHEAD_BYTES for content, _ in self._documents.values())
        if counted != self._bytes or counted > _CAPACITY_BYTES:
            raise IntegrityError(f"documents: {self._bytes} bytes counted, {counted} held")
