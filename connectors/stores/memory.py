"""The host tier: least recently used values in this process's memory, by reference."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from connectors.stores.base import (
    KVStore,
    ReadRequest,
    StoreCapabilities,
    StoreCapacity,
    StoreKey,
)
from connectors.stores.buffers import Buffer, BufferPool
from connectors.stores.documents import DocumentShelf
from spm.errors import IntegrityError

_CAPABILITIES = StoreCapabilities(
    remote=False, delete=True, touch=True, exact_ttl=False, documents=True, capacity=True
)


class MemoryStore(KVStore):
    """Keeps up to ``capacity_bytes`` of buffers, each by one reference; copies nothing. Its
    values have no lifetime, only its documents have; those do not count as capacity.

    It never blocks, so deadlines do not matter to it, and it never raises ``StoreError``.
    It registers as a ``reclaim`` of the pool: when that is full, the least recently used
    values that nobody else references are given back.

    ``on_evict(key)`` is called, without a lock held, on the thread that caused the
    eviction (a writer, or whoever acquires from the pool). It is not called for deleted
    or replaced values. A key that another thread writes again at that very moment may be
    reported although it is back.

    Lock order: this store's lock, then the pool's. The pool calls ``reclaim`` unlocked.
    """

    def __init__(
        self,
        pool: BufferPool,
        capacity_bytes: int,
        on_evict: Callable[[StoreKey], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._capacity_bytes = capacity_bytes
        self._on_evict = on_evict
        self._lock = threading.Lock()
        self._entries: OrderedDict[StoreKey, Buffer] = OrderedDict()
        self._bytes = 0
        self._documents = DocumentShelf(clock)
        self._closed = False
        pool.add_reclaim(self._reclaim)

    @property
    def capabilities(self) -> StoreCapabilities:
        return _CAPABILITIES

    @property
    def used_bytes(self) -> int:
        """Bytes of the values kept now, at most ``capacity_bytes``."""
        return self._bytes

    def get_many(
        self, reads: Sequence[ReadRequest], deadline_s: float = 0.0
    ) -> list[Buffer | None]:
        """The very buffers that were put, each with one more reference; refreshes recency."""
        with self._lock:
            return [self._get(read) for read in reads]

    def put_many(
        self, items: Sequence[tuple[StoreKey, Buffer]], deadline_s: float = 0.0
    ) -> list[bool]:
        """Keep a reference to each buffer; False for a value larger than the whole store.

        Less recently used values make room and are reported through ``on_evict``.
        """
        with self._lock:
            stored = [self._put(key, buffer) for key, buffer in items]
            evicted = self._evict_over_capacity()
        self._report(evicted)
        return stored

    def contains_many(self, keys: Sequence[StoreKey], deadline_s: float = 0.0) -> list[bool]:
        with self._lock:
            return [key in self._entries for key in keys]

    def delete_many(self, keys: Sequence[StoreKey], deadline_s: float = 0.0) -> int:
        with self._lock:
            return sum(self._drop(key) or self._documents.drop(key) for key in keys)

    def touch_many(
        self,
        keys: Sequence[StoreKey],
        deadline_s: float = 0.0,
        ttl_s: Sequence[int] | None = None,
    ) -> list[bool]:
        with self._lock:
            return [self._refresh(key) for key in keys]

    def put_document(
        self, key: StoreKey, content: bytes, ttl_s: int, deadline_s: float = 0.0
    ) -> bool:
        with self._lock:
            return not self._closed and self._documents.put(key, content, ttl_s)

    def get_document(self, key: StoreKey, max_bytes: int, deadline_s: float = 0.0) -> bytes | None:
        with self._lock:
            return self._documents.get(key, max_bytes)

    def capacity(self, deadline_s: float = 0.0) -> StoreCapacity:
        return StoreCapacity(self._bytes, self._capacity_bytes)

    def close(self) -> None:
        """Give every reference back; later writes are refused. Nothing is reported."""
        with self._lock:
            self._closed = True
            self._documents.clear()
            for key in list(self._entries):
                self._drop(key)

    def check_integrity(self) -> None:
        with self._lock:
            counted = sum(buffer.size_bytes for buffer in self._entries.values())
            if counted != self._bytes:
                raise IntegrityError(f"memory store counts {self._bytes} bytes, holds {counted}")
            if counted > self._capacity_bytes:
                raise IntegrityError(f"{counted} bytes held, {self._capacity_bytes} allowed")
            self._documents.check_integrity()

    def clear(self) -> None:
        """Forget every value; eviction is not reported, the caller knows."""
        with self._lock:
            for key in list(self._entries):
                self._drop(key)

    def _get(self, read: ReadRequest) -> Buffer | None:
        buffer = self._entries.get(read.key)
        if buffer is None or buffer.size_bytes != read.size_bytes:
            return None
        self._entries.move_to_end(read.key)
        return buffer.retain()

    def _put(self, key: StoreKey, buffer: Buffer) -> bool:
        if self._closed or buffer.size_bytes > self._capacity_bytes:
            return False
        buffer.retain()
        self._drop(key)
        self._entries[key] = buffer
        self._bytes += buffer.size_bytes
        return True

    def _refresh(self, key: StoreKey) -> bool:
        if key not in self._entries:
            return False
        self._entries.move_to_end(key)
        return True

    def _drop(self, key: StoreKey) -> bool:
        buffer = self._entries.pop(key, None)
        if buffer is None:
            return False
        self._bytes -= buffer.size_bytes
        buffer.release()
        return True

    def _evict_over_capacity(self) -> list[StoreKey]:
        evicted: list[StoreKey] = []
        while self._bytes > self._capacity_bytes:
            key = next(iter(self._entries))
            self._drop(key)
            evicted.append(key)
        return evicted

    def _reclaim(self, size_bytes: int) -> bool:
        """Give back enough for the pool to serve ``size_bytes``, or nothing at all.

        A buffer somebody else references frees no memory when evicted, so it stays.
        """
        with self._lock:
            missing_bytes = self._pool.used_bytes + size_bytes - self._pool.capacity_bytes
            victims: list[StoreKey] = []
            for key, buffer in self._entries.items():
                if missing_bytes <= 0:
                    break
                if not buffer.shared:
                    victims.append(key)
                    missing_bytes -= buffer.size_bytes
            if missing_bytes > 0:
                return False
            for key in victims:
                self._drop(key)
        self._report(victims)
        return True

    def _report(self, evicted: Sequence[StoreKey]) -> None:
        if self._on_evict is not None:
            for key in evicted:
                self._on_evict(key)
