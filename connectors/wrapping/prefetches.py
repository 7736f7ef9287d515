"""Prefetches over a wrapped connector: a session's missing blocks, loaded prefix by prefix.

One fill goes on at a time, none begins while a request waits for a load, and each is at most
``prefetch_inflight_bytes``. So inference never waits for more than one small load, and what
did arrive is a usable prefix whatever happens to the rest. Scheduler thread only.
"""

from collections.abc import Callable
from dataclasses import dataclass

from connectors.wrapping.chains import SessionChain
from connectors.wrapping.fill_state import FillEnd, FillOutcome
from connectors.wrapping.fills import PoolFills
from connectors.wrapping.stand_in import StandIns
from spm.agent_hint import BlockRange, Edit
from spm.config import SpmConfig
from spm.errors import IntegrityError
from spm.events import BlocksLoaded
from spm.manager import SessionAwarePoolingManager
from spm.metrics import Counters, Metric
from spm.operation import Operation, Status
from spm.residency import Tier
from spm.sam.manager import SessionAwareManager
from spm.sam.restoring import RestoredBlock
from tracker.ids import BlockKey, SessionRef

PATIENCE_S = 60.0
"""After so long in line a prefetch is not worth beginning any more."""

_WHY = {
    FillEnd.NOTHING: (Status.NOT_FOUND, "the rest is not stored"),
    FillEnd.SHORT: (Status.FAILED, "the connector did not deliver all of it"),
    FillEnd.LATE: (Status.FAILED, "the connector did not answer in time"),
    FillEnd.IN_STEP: (Status.UNSUPPORTED, "the connector loads only within a request's own step"),
    FillEnd.NO_ROOM: (Status.REJECTED, "inference needs the room in the GPU pool"),
    FillEnd.RAISED: (Status.FAILED, "the connector failed; the engine's log has it"),
}


@dataclass(slots=True, eq=False)
class _Prefetch:
    """One operation, in line or being filled."""

    operation: Operation
    chain: SessionChain
    stop: int
    left: set[int]
    """Logical blocks of the range that are not in the pool yet."""
    room: int
    """Blocks of the pool it may still take."""
    since_s: float
    """When it was asked for, or last got something."""
    begun: bool = False
    least: int = 1
    """Blocks to ask for at once, found by asking for too few."""


class WrappedPrefetches:
    """Those of one engine."""

    def __init__(
        self,
        config: SpmConfig,
        fills: PoolFills,
        stand_ins: StandIns,
        sam: SessionAwareManager,
        manager: SessionAwarePoolingManager,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._inflight_bytes = config.prefetch_inflight_bytes
        self.fills = fills
        self._stand_ins = stand_ins
        self._sam = sam
        self._manager = manager
        self._counters = counters
        self._clock = clock
        self.block_bytes = 1
        """Size of a block on one rank; set before the first step."""
        self.on_published: Callable[[BlockKey, SessionRef | None], None] = lambda key, ref: None
        """Told of every block put into the GPU pool, and for whom; set before the first step."""
        self._line: list[_Prefetch] = []
        """In order of asking; the first one's fill may go on."""
        self._least = 1
        """Blocks behind the pool's that have to be asked for at once to be given any: a
        connector may store in units of many blocks."""

    @property
    def is_possible(self) -> bool:
        """Whether anything can be put into the GPU pool."""
        fills = self.fills
        return fills.pool is not None and not fills.loads_in_step and self._stand_ins.works

    # --- asking ------------------------------------------------------------------------

    def start(
        self, ref: SessionRef, edit: Edit, chain: SessionChain, span: BlockRange, cut: str
    ) -> Operation:
        """Bring a range's blocks, and what has to be there before them, into the pool. What is
        there already is protected at once. ``cut``: why they are not all that was asked for."""
        operation = Operation(ref, edit, span.stop - span.start)
        operation.cut = cut
        pool = self.fills.pool
        assert pool is not None
        found = [(at, pool.find(chain.keys[at])) for at in range(span.start, span.stop)]
        present = [RestoredBlock(0, at, block) for at, block in found if block is not None]
        self._sam.restored(ref, present)
        operation.done_blocks = len(present)
        left = {at for at, block in found if block is None}
        if not left:
            return operation.end(Status.OK)
        missing = span.stop - len(self.fills.local_blocks(chain, span.stop))
        room = self.fills.room(missing, sum(one.room for one in self._line))
        if not room:
            why, detail = _WHY[FillEnd.NO_ROOM]
            return operation.end(Status.PARTIAL if present else why, detail)
        room, now_s = min(room, missing), self._clock()
        self._line.append(_Prefetch(operation, chain, span.stop, left, room, now_s))
        return operation

    # --- a step ------------------------------------------------------------------------

    def step(self, *, requests_load: bool) -> None:
        """Once a step, before the fills': begin the next one. ``requests_load``: a request
        waits for a load, which goes first."""
        if not self._line:
            return
        if not self._stand_ins.works:
            self._end_all(FillEnd.RAISED)
        elif self.fills.overdue and self.fills.is_loading:
            self._end_all(FillEnd.LATE)
        elif not self.fills.busy and not requests_load:
            self._begin(self._line[0])
        self._expire()

    def _begin(self, prefetch: _Prefetch) -> None:
        if not prefetch.begun:
            prefetch.begun = True
            self._counters.add(Metric.PREFETCH_WAITS)
            self._counters.add(Metric.PREFETCH_WAIT_SECONDS, self._clock() - prefetch.since_s)
        local = len(self.fills.local_blocks(prefetch.chain, prefetch.stop))
        prefetch.left.difference_update(range(local))
        if not prefetch.left:
            self._through(prefetch)
            return
        limit = min(prefetch.stop, local + prefetch.room)
        most = max(self._least, prefetch.least, self._inflight_bytes // self.block_bytes)
        stop = min(limit, local + most)

        def filled(outcome: FillOutcome) -> None:
            self._filled(prefetch, outcome)
            if outcome.end is FillEnd.NOTHING and prefetch.left:
                if stop < limit:
                    prefetch.least = 2 * (stop - local)
                else:
                    self._end(prefetch, FillEnd.NO_ROOM if stop < prefetch.stop else outcome.end)

        if stop > local:
            self.fills.start(prefetch.chain, stop, filled)
        else:
            self._end(prefetch, FillEnd.NO_ROOM)

    def _filled(self, prefetch: _Prefetch, outcome: FillOutcome) -> None:
        restored = outcome.restored
        if restored:
            self._note_arrived(prefetch.operation.ref, restored, prefetch.chain)
            prefetch.left.difference_update(one.index for one in restored)
            prefetch.room -= min(prefetch.room, len(restored))
            prefetch.since_s = self._clock()
            self._least = max(self._least, prefetch.least)
        prefetch.operation.done_blocks = prefetch.operation.blocks - len(prefetch.left)
        if not prefetch.left:
            self._through(prefetch)
        elif outcome.end not in (FillEnd.ARRIVED, FillEnd.NOTHING):
            self._end(prefetch, outcome.end)

    def _note_arrived(
        self, ref: SessionRef, restored: list[RestoredBlock], chain: SessionChain
    ) -> None:
        keys = [chain.keys[one.index] for one in restored]
        self._sam.restored(ref, restored, renew=False)
        self._counters.add(Metric.PREFETCHED_BLOCKS, len(restored), "gpu")
        self._manager.handle(BlocksLoaded(Tier.REMOTE, keys, ref))
        for key in keys:
            self.on_published(key, ref)

    def _expire(self) -> None:
        late_s = self._clock() - PATIENCE_S
        waiting = self._line[1:] if self.fills.busy else self._line
        for prefetch in [one for one in waiting if one.since_s <= late_s]:
            self._finish(prefetch, Status.FAILED, "the connector is too busy")

    # --- ends --------------------------------------------------------------------------

    def _through(self, prefetch: _Prefetch) -> None:
        self._line.remove(prefetch)
        prefetch.operation.done_blocks = prefetch.operation.blocks
        prefetch.operation.end(Status.OK)

    def _end(self, prefetch: _Prefetch, end: FillEnd) -> None:
        self._finish(prefetch, *_WHY[end])

    def _finish(self, prefetch: _Prefetch, why: Status, detail: str) -> None:
        """It ends with what has arrived, or as ``why``. What is in flight still becomes cached
        blocks, but nobody's."""
        if prefetch is self._line[0]:
            self.fills.abandon()
        self._line.remove(prefetch)
        done = prefetch.operation.done_blocks
        prefetch.operation.end(Status.PARTIAL if done else why, detail)

    def _end_all(self, end: FillEnd) -> None:
        for prefetch in list(self._line):
            self._end(prefetch, end)

    def request_arrived(self, ref: SessionRef) -> None:
        """The session is back, and loads what is missing with its request."""
        detail = "a request of the session came first and loads the rest"
        for prefetch in [one for one in self._line if one.operation.ref == ref]:
            self._finish(prefetch, Status.PARTIAL, detail)

    def release(self, ref: SessionRef) -> None:
        """The session has ended, or gave its blocks up."""
        for prefetch in [one for one in self._line if one.operation.ref == ref]:
            self._finish(prefetch, Status.FAILED, "the session gave its blocks up")

    def cancel_all(self) -> None:
        """The cache was reset: nothing that is on its way may be used."""
        self.fills.cancel()
        for prefetch in list(self._line):
            self._finish(prefetch, Status.FAILED, "the cache was reset")

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._line) or self.fills.busy

    @property
    def pending(self) -> bool:
        """Whether steps are needed to bring them to an end."""
        return bool(self._line) or self.fills.pending

    def status(self) -> dict[str, int]:
        """For the operation ``status``."""
        blocks = self.fills.num_blocks
        waiting = len(self._line) - (bool(self._line) and self.fills.busy)
        return {
            "waiting": waiting,
            "in_flight": int(self.fills.busy),
            "in_flight_bytes": blocks * self.block_bytes,
        }

    def check_integrity(self, *, idle: bool) -> None:
        """Raise :class:`IntegrityError` if blocks or operations are lost; with ``idle`` also if
        any is left over."""
        self.fills.check_integrity()
        if any(one.operation.done or not one.left for one in self._line):
            raise IntegrityError("a prefetch has nothing left to do")
        if idle and (self._line or self.fills.pending):
            raise IntegrityError(f"idle, but {len(self._line)} prefetches go on")
