"""Reference-counted, reusable host buffers: the one place host KV memory is counted.

A value is gathered from the GPU pool into a buffer once; the memory store keeps that
same buffer by reference and the remote store sends from it. A value read from the wire
lands in a buffer, is scattered to the GPU pool from it and may be kept by the memory
store, again by reference.
"""

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from spm.errors import IntegrityError

ByteArray = npt.NDArray[np.uint8]
Allocator = Callable[[int], ByteArray]


def allocate_pageable(size_bytes: int) -> ByteArray:
    """Ordinary host memory; the CUDA path passes an allocator of pinned memory instead."""
    return np.empty(size_bytes, dtype=np.uint8)


class Buffer:
    """One value's bytes. Created with one reference; the last ``release`` recycles it."""

    __slots__ = ("_pool", "_refs", "array", "verified")

    def __init__(self, pool: "BufferPool", array: ByteArray) -> None:
        self._pool = pool
        self._refs = 1
        self.array = array
        self.verified = False
        """Set by whoever wrote the value itself or checked its checksum."""

    @property
    def size_bytes(self) -> int:
        return int(self.array.nbytes)

    @property
    def view(self) -> memoryview:
        """The bytes, writable; only the creator writes, and only before sharing it."""
        return self.array.data

    @property
    def shared(self) -> bool:
        """Whether more than one reference exists now. Exact only for a caller that keeps
        others from taking references meanwhile; they may still release theirs."""
        return self._refs > 1

    def retain(self) -> "Buffer":
        """Take another reference. Any thread."""
        self._pool.add_reference(self)
        return self

    def release(self) -> None:
        """Give one reference back. Any thread. Using the buffer afterwards is a bug."""
        self._pool.drop_reference(self)


class BufferPool:
    """Bounded pool of :class:`Buffer`, recycled by exact size. Thread-safe.

    Memory stores register a ``reclaim``: when the bound is reached they are asked in turn,
    without the pool's lock held, to give references back.
    """

    def __init__(self, capacity_bytes: int, allocate: Allocator = allocate_pageable) -> None:
        self._capacity_bytes = capacity_bytes
        self._allocate = allocate
        self._lock = threading.Lock()
        self._free: dict[int, list[ByteArray]] = {}
        self._free_bytes = 0
        self._used_bytes = 0
        self._reclaims: list[Callable[[int], bool]] = []

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes in buffers somebody holds a reference to."""
        return self._used_bytes

    def add_reclaim(self, reclaim: Callable[[int], bool]) -> None:
        """Register who gives memory back under pressure: ``reclaim(size_bytes)`` frees
        enough for that many bytes and returns True, or frees nothing and returns False."""
        self._reclaims.append(reclaim)

    def acquire(self, size_bytes: int) -> Buffer | None:
        """A buffer of exactly ``size_bytes`` with one reference, or ``None`` if all
        memory is referenced. The contents are undefined. Any thread, without locks held
        that ``reclaim`` takes."""
        if size_bytes > self._capacity_bytes:
            return None
        while True:
            try:
                array = self._take(size_bytes)
            except MemoryError:
                return None
            if array is not None:
                return Buffer(self, array)
            if not any(reclaim(size_bytes) for reclaim in self._reclaims):
                return None

    def _take(self, size_bytes: int) -> ByteArray | None:
        """An unused array; ``None`` at the bound, MemoryError if the machine is full."""
        with self._lock:
            recycled = self._free.get(size_bytes)
            if recycled:
                array = recycled.pop()
                self._count_unused(size_bytes, recycled)
                self._used_bytes += size_bytes
                return array
            if self._used_bytes + size_bytes > self._capacity_bytes:
                return None
            self._trim_free(self._capacity_bytes - self._used_bytes - size_bytes)
            self._used_bytes += size_bytes
        try:
            return self._allocate(size_bytes)
        except MemoryError:
            with self._lock:
                self._used_bytes -= size_bytes
            raise

    def _count_unused(self, size_bytes: int, arrays: list[ByteArray]) -> None:
        """Account for one array that left ``arrays``; lock held."""
        self._free_bytes -= size_bytes
        if not arrays:
            del self._free[size_bytes]

    def _trim_free(self, limit_bytes: int) -> None:
        """Drop recycled arrays of other sizes until they fit; lock held."""
        for size_bytes, arrays in list(self._free.items()):
            while arrays and self._free_bytes > limit_bytes:
                arrays.pop()
                self._count_unused(size_bytes, arrays)

    def add_reference(self, buffer: Buffer) -> None:
        with self._lock:
            if buffer._refs <= 0:
                raise IntegrityError("retain() on a buffer that was already released")
            buffer._refs += 1

    def drop_reference(self, buffer: Buffer) -> None:
        with self._lock:
            if buffer._refs <= 0:
                raise IntegrityError("release() on a buffer that was already released")
            buffer._refs -= 1
            if buffer._refs:
                return
            self._used_bytes -= buffer.size_bytes
            self._free.setdefault(buffer.size_bytes, []).append(buffer.array)
            self._free_bytes += buffer.size_bytes

    def check_integrity(self) -> None:
        """Raise :class:`IntegrityError` if the byte counts do not add up."""
        with self._lock:
            free_bytes = sum(size * len(arrays) for size, arrays in self._free.items())
            if free_bytes != self._free_bytes:
                raise IntegrityError(f"free bytes {self._free_bytes} != counted {free_bytes}")
            if self._used_bytes < 0 or self._used_bytes + free_bytes > self._capacity_bytes:
                raise IntegrityError(
                    f"used {self._used_bytes} + free {free_bytes} outside 0..{self._capacity_bytes}"
                )
