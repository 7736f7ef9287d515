"""One direction of a link in virtual time: batches one after another, the urgent ones first."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count


@dataclass(slots=True)
class Batch:
    """Some bytes of one transfer. ``done`` is called with the time at which they arrived."""

    size_bytes: int
    done: Callable[[float], None]
    cancelled: bool = False


@dataclass(slots=True, order=True)
class _Queued:
    rank: int
    number: int
    asked_s: float = field(compare=False)
    batch: Batch = field(compare=False)


class Link:
    """Serves the lowest rank first, and within it in order. A batch that has begun ends."""

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._queue: list[_Queued] = []
        self._numbers = count()
        self._busy_until_s = 0.0
        self._current: Batch | None = None
        self.moved_bytes = 0

    def submit(self, batch: Batch, rank: int, now_s: float) -> None:
        """To be moved after what waits with the same or a lower rank."""
        heapq.heappush(self._queue, _Queued(rank, next(self._numbers), now_s, batch))

    def hasten(self, batches: set[int], rank: int) -> None:
        """Queued batches with these ids (of the objects) get a lower rank."""
        for queued in self._queue:
            if id(queued.batch) in batches:
                queued.rank = min(queued.rank, rank)
        heapq.heapify(self._queue)

    def advance(self, now_s: float) -> None:
        """Let time pass up to ``now_s``."""
        while (at_s := self.next_s()) is not None and at_s <= now_s:
            batch, self._current = self._current, None
            assert batch is not None
            batch.done(at_s)

    def next_s(self) -> float | None:
        """When the next batch arrives, as far as is known now; None: nothing moves."""
        while self._current is None and self._queue:
            queued = heapq.heappop(self._queue)
            if queued.batch.cancelled:
                continue
            started_s = max(queued.asked_s, self._busy_until_s)
            seconds = self._latency_s + queued.batch.size_bytes / self._bytes_per_s
            self._current, self._busy_until_s = queued.batch, started_s + seconds
            self.moved_bytes += queued.batch.size_bytes
        return self._busy_until_s if self._current is not None else None
