"""Any store, with faults put into it on purpose (see :mod:`spm.fault_plan`)."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from connectors.stores.base import KVStore, ReadRequest, StoreCapabilities, StoreCapacity, StoreKey
from connectors.stores.buffers import Buffer, BufferPool
from spm.errors import StoreTimeoutError, StoreUnavailableError
from spm.fault_plan import FaultKind, FaultPlan, StoreCall

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_WRITES = frozenset((StoreCall.PUT, StoreCall.DOCUMENT, StoreCall.STREAM))
_CHANGES = _WRITES | {StoreCall.DELETE}


class _Call:
    """One call: what befalls it."""

    def __init__(self, plan: FaultPlan, kind: StoreCall, number: int, age_s: float) -> None:
        self.plan, self.kind, self.number, self.age_s = plan, kind, number, age_s
        self.faults = plan.of_call(kind, number, age_s)

    @property
    def refused(self) -> bool:
        """Whether the store says no to what the call wants to change."""
        return (FaultKind.OUT_OF_MEMORY in self.faults and self.kind in _WRITES) or (
            FaultKind.READ_ONLY in self.faults and self.kind in _CHANGES
        )

    def reached(self, count: int) -> int:
        """How many of ``count`` values are done before the connection fails. Raises
        ``StoreUnavailableError`` if that is in the first."""
        if FaultKind.DISCONNECT not in self.faults:
            return count
        done = self.plan.place(self.kind, self.number, count)
        if count and not done:
            raise _disconnected()
        return done

    def of_value(self, position: int) -> frozenset[FaultKind]:
        return self.plan.of_value(self.kind, self.number, position, self.age_s)


class FaultyStore(KVStore):
    """Passes calls on to ``inner`` unless the plan says otherwise. Any thread."""

    def __init__(
        self,
        inner: KVStore,
        plan: FaultPlan,
        pool: BufferPool,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        """Takes over ``inner``. Changed values are copies in buffers of ``pool``. ``wait``
        passes so many seconds, by default until :meth:`close`."""
        self._inner = inner
        self._plan = plan
        self._pool = pool
        self._clock = clock
        self._closed = threading.Event()
        self._wait = wait if wait is not None else self._closed.wait
        self._started_s = clock()
        self._numbers = {kind: itertools.count() for kind in StoreCall}
        logger.warning("faults are put into %r on purpose: for trials only", inner)

    @property
    def capabilities(self) -> StoreCapabilities:
        return self._inner.capabilities

    def get_many(self, reads: Sequence[ReadRequest], deadline_s: float) -> list[Buffer | None]:
        call = self._begin(StoreCall.GET, deadline_s)
        reached = call.reached(len(reads))
        evicted = [
            read.key for at, read in enumerate(reads) if FaultKind.EVICTION in call.of_value(at)
        ]
        if evicted:
            self._inner.delete_many(evicted, deadline_s)
        found = self._inner.get_many(reads[:reached], deadline_s)
        damaged = [self._damaged(call, at, buffer) for at, buffer in enumerate(found)]
        return [*damaged, *([None] * (len(reads) - reached))]

    def put_many(self, items: Sequence[tuple[StoreKey, Buffer]], deadline_s: float) -> list[bool]:
        call = self._begin(StoreCall.PUT, deadline_s)
        if call.refused:
            return [False] * len(items)
        reached = call.reached(len(items))
        lost = {at for at in range(reached) if FaultKind.LOST_WRITE in call.of_value(at)}
        kept = [item for at, item in enumerate(items[:reached]) if at not in lost]
        stored = iter(self._inner.put_many(kept, deadline_s) if kept else ())
        answers = [at in lost or next(stored) for at in range(reached)]
        return [*answers, *([False] * (len(items) - reached))]

    def contains_many(self, keys: Sequence[StoreKey], deadline_s: float) -> list[bool]:
        self._begin_whole(StoreCall.CONTAINS, deadline_s)
        return self._inner.contains_many(keys, deadline_s)

    def delete_many(self, keys: Sequence[StoreKey], deadline_s: float) -> int:
        return self._change(
            StoreCall.DELETE, deadline_s, 0, lambda: self._inner.delete_many(keys, deadline_s)
        )

    def touch_many(
        self, keys: Sequence[StoreKey], deadline_s: float, ttl_s: Sequence[int] | None = None
    ) -> Sequence[bool | None]:
        self._begin_whole(StoreCall.TOUCH, deadline_s)
        return self._inner.touch_many(keys, deadline_s, ttl_s)

    def expire_many(self, keys: Sequence[StoreKey], ttl_s: int, deadline_s: float) -> int:
        return self._change(
            StoreCall.DELETE,
            deadline_s,
            0,
            lambda: self._inner.expire_many(keys, ttl_s, deadline_s),
        )

    def put_document(self, key: StoreKey, content: bytes, ttl_s: int, deadline_s: float) -> bool:
        return self._change(
            StoreCall.DOCUMENT,
            deadline_s,
            False,
            lambda: self._inner.put_document(key, content, ttl_s, deadline_s),
        )

    def get_document(self, key: StoreKey, max_bytes: int, deadline_s: float) -> bytes | None:
        call = self._begin_whole(StoreCall.GET, deadline_s)
        content = self._inner.get_document(key, max_bytes, deadline_s)
        faults = call.of_value(0)
        if content is None or FaultKind.EVICTION in faults:
            return None
        if content and FaultKind.FLIPPED_BIT in faults:
            changed = bytearray(content)
            self._flip(call, memoryview(changed))
            content = bytes(changed)
        return content[: len(content) // 2] if FaultKind.SHORT_READ in faults else content

    def append_stream(
        self, key: StoreKey, entries: Sequence[bytes], max_length: int, deadline_s: float
    ) -> int:
        return self._change(
            StoreCall.STREAM,
            deadline_s,
            0,
            lambda: self._inner.append_stream(key, entries, max_length, deadline_s),
        )

    def capacity(self, deadline_s: float) -> StoreCapacity | None:
        self._begin_whole(StoreCall.CAPACITY, deadline_s)
        return self._inner.capacity(deadline_s)

    def close(self) -> None:
        """Also ends every wait."""
        self._closed.set()
        self._inner.close()

    def check_integrity(self) -> None:
        self._inner.check_integrity()

    # --- faults ------------------------------------------------------------------------

    def _begin(self, kind: StoreCall, deadline_s: float) -> _Call:
        """What befalls a call before anything is done. Raises ``StoreError``."""
        age_s = self._clock() - self._started_s
        call = _Call(self._plan, kind, next(self._numbers[kind]), age_s)
        if call.faults:
            names = ",".join(sorted(fault.value for fault in call.faults))
            logger.debug("%s %d: %s", kind.value, call.number, names)
        if self._plan.starting(age_s):
            raise StoreUnavailableError("an injected fault: the store is loading")
        if FaultKind.HANG in call.faults:
            self._wait(max(0.0, deadline_s - self._clock()))
            raise StoreTimeoutError("an injected fault: no answer")
        if FaultKind.ERROR in call.faults:
            raise StoreUnavailableError("an injected fault: connection refused")
        if FaultKind.DELAY in call.faults:
            delay_s = self._plan.delay_s(kind, call.number)
            left_s = max(0.0, deadline_s - self._clock())
            self._wait(min(delay_s, left_s))
            if delay_s >= left_s:
                raise StoreTimeoutError("an injected fault: a late answer")
        return call

    def _begin_whole(self, kind: StoreCall, deadline_s: float) -> _Call:
        """Of a call that a broken connection ends as a whole."""
        call = self._begin(kind, deadline_s)
        if FaultKind.DISCONNECT in call.faults:
            raise _disconnected()
        return call

    def _change(
        self, kind: StoreCall, deadline_s: float, refused: _T, change: Callable[[], _T]
    ) -> _T:
        return refused if self._begin_whole(kind, deadline_s).refused else change()

    def _damaged(self, call: _Call, at: int, buffer: Buffer | None) -> Buffer | None:
        """A value as it comes back."""
        faults = call.of_value(at)
        short, flipped = FaultKind.SHORT_READ in faults, FaultKind.FLIPPED_BIT in faults
        if buffer is None or not (short or flipped):
            return buffer
        size_bytes = buffer.size_bytes // 2 if short else buffer.size_bytes
        copy = self._pool.acquire(size_bytes) if size_bytes else None
        if copy is not None:
            copy.view[:] = buffer.view[:size_bytes]
            if flipped:
                self._flip(call, copy.view)
        buffer.release()
        return copy

    def _flip(self, call: _Call, data: memoryview) -> None:
        bit = self._plan.place(call.kind, call.number, 8 * len(data))
        data[bit // 8] ^= 1 << bit % 8


def _disconnected() -> StoreUnavailableError:
    return StoreUnavailableError("an injected fault: the connection was closed")
