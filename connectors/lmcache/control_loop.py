"""The control worker's thread: takes what may be done now and asks the server."""

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from connectors.lmcache.control import (
    MAX_DELETED_OBJECTS,
    LMCacheControl,
    ObjectName,
    WarmResult,
)
from connectors.lmcache.control_news import KeepOver, SessionWarmed, StatusSeen, WarmEnded
from connectors.lmcache.control_state import ControlState, DeleteOrder, Flight, Warm
from spm.breaker import CircuitBreaker
from spm.errors import StoreError, StoreRefusedError
from spm.metrics import Counters, Metric
from tracker.ids import BlockKey

logger = logging.getLogger(__name__)

MAX_FLIGHTS = 4
"""Warm prefetches the server is at for us."""
POLL_S = 0.05
"""A prefetch is asked about this often."""
_PAUSE_S = 0.5
"""After an error, and while the breaker is open, background work waits so long."""
_LONGEST_WAIT_S = 3600.0
_NO_ANSWER = "LMCache's control API does not answer: try again later"

_T = TypeVar("_T")
_Job = Callable[[], None]


class ControlLoop:
    """Strict order: prefetches under way, prefetches asked for, what the server is, deletes,
    keeping sessions (one at a time). The lock is held to take work and to report, never while
    the server is asked.
    """

    def __init__(
        self,
        state: ControlState,
        control: LMCacheControl,
        breaker: CircuitBreaker,
        counters: Counters,
        deadline_s: float,
        on_news: Callable[[], None] | None,
        clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._control = control
        self._breaker = breaker
        self._counters = counters
        self._deadline_s = deadline_s
        self._on_news = on_news
        self._clock = clock
        self._resume_s = -math.inf

    def run(self) -> None:
        """Until the state is closed."""
        while True:
            try:
                job = self._next_job()
                if job is None:
                    return
                job()
            except Exception:  # thread boundary: the thread must outlive any bug below
                logger.exception("unexpected error in the LMCache control thread")
                self._counters.add(Metric.INTERNAL_ERRORS, label="control")
                self._state.flights.clear()  # whoever waits for one has a deadline
                self._resume_s = self._clock() + _PAUSE_S
            if self._on_news is not None:
                self._on_news()

    # --- taking work, lock held -----------------------------------------------------------

    def _next_job(self) -> _Job | None:
        state = self._state
        with state.condition:
            while not state.closed:
                now_s = self._clock()
                job = self._prefetch_job(now_s) or self._background_job(now_s)
                if job is not None:
                    return job
                state.waiting = True
                wait_s = min(max(0.0, self._looks_again_s() - now_s), _LONGEST_WAIT_S)
                state.condition.wait(wait_s)
                state.waiting = False
        return None

    def _prefetch_job(self, now_s: float) -> _Job | None:
        state = self._state
        for flight in state.flights:
            if flight.polled_s + POLL_S <= now_s:
                flight.polled_s = now_s
                return partial(self._poll, flight)
        if state.warms and len(state.flights) < MAX_FLIGHTS:
            return partial(self._begin, state.warms.popleft(), state.generation)
        return None

    def _background_job(self, now_s: float) -> _Job | None:
        state = self._state
        if self._breaker.begin_probe():
            return self._probe
        if self._resume_s > now_s or self._background_due_s() > now_s:
            return None
        if not self._breaker.allow():
            self._resume_s = self._breaker.next_probe_s
            return None
        if state.status_due_s <= now_s:
            state.status_due_s = now_s + state.kept.interval_s
            return self._look
        if state.deletes:
            return self._delete_job()
        return self._keep_job(now_s)

    def _delete_job(self) -> _Job:
        """One request: of one tier, and of no more objects than one may have."""
        state = self._state
        assert state.objects_of is not None, "keys are taken only when they have names"
        order = next(iter(state.deletes.values()))
        objects: list[ObjectName] = []
        keys: list[BlockKey] = []
        for key, wanted in state.deletes.items():
            ranks = [*state.objects_of(key)]
            if wanted != order or len(objects) + len(ranks) > MAX_DELETED_OBJECTS:
                break
            keys.append(key)
            objects += ranks
        for key in keys:
            del state.deletes[key]
        state.deleting = set(keys)
        return partial(self._delete, objects, order)

    def _keep_job(self, now_s: float) -> _Job | None:
        state = self._state
        taken = None if self._is_keeping else state.kept.take(now_s)
        if taken is None:
            return None
        ref, request = taken
        if request is None:
            state.tell(KeepOver(ref))
            return self._nothing
        flight = Flight("", request, now_s + state.kept.interval_s, state.generation, ref=ref)
        return partial(self._submit, flight)

    @property
    def _is_keeping(self) -> bool:
        return any(flight.ref is not None for flight in self._state.flights)

    def _background_due_s(self) -> float:
        state = self._state
        keeps_s = math.inf if self._is_keeping else state.kept.next_due_s()
        return min(-math.inf if state.deletes else keeps_s, state.status_due_s)

    def _looks_again_s(self) -> float:
        polls = [flight.polled_s + POLL_S for flight in self._state.flights]
        due_s = max(self._resume_s, self._background_due_s())
        return min(due_s, self._breaker.next_probe_s, *polls)

    # --- doing it, lock not held ----------------------------------------------------------

    def _nothing(self) -> None:
        """There is news, and nothing to ask for."""

    def _begin(self, warm: Warm, generation: int) -> None:
        flight = Flight("", warm.request, warm.deadline_s, generation, number=warm.number)
        if self._clock() >= warm.deadline_s:
            self._end(flight, None, "it waited too long for its turn")
        elif not self._breaker.allow():
            self._end(flight, None, _NO_ANSWER)
        else:
            self._submit(flight)

    def _submit(self, flight: Flight) -> None:
        try:
            name = self._ask(lambda end_s: self._control.submit_warm(flight.request, end_s))
        except StoreError as error:
            self._end(flight, None, str(error))
            return
        if name is None:
            self._end(flight, WarmResult(0, 0))
            return
        flight.name = name
        self._state.flights.append(flight)

    def _poll(self, flight: Flight) -> None:
        """An error may pass; that the server does not know the prefetch will not."""
        result, detail = None, _NO_ANSWER
        try:
            if self._breaker.allow():
                result = self._ask(lambda end_s: self._control.poll_warm(flight.name, end_s))
                detail = "LMCache was not done in time; it goes on"
        except StoreRefusedError as error:
            self._land(flight, None, str(error))
            return
        except StoreError as error:
            detail = str(error)
        if result is not None or self._clock() >= flight.deadline_s:
            self._land(flight, result, "" if result is not None else detail)

    def _land(self, flight: Flight, result: WarmResult | None, detail: str = "") -> None:
        self._state.flights.remove(flight)
        self._end(flight, result, detail)

    def _end(self, flight: Flight, result: WarmResult | None, detail: str = "") -> None:
        state = self._state
        with state.condition:
            if flight.ref is None:
                if flight.number in state.wanted:
                    state.wanted.remove(flight.number)
                    state.tell(WarmEnded(flight.number, result, detail))
                return
            if result is not None and flight.generation == state.generation:
                state.tell(SessionWarmed(flight.ref, flight.request.num_tokens, result))
        found, total = (result.found, result.total) if result is not None else (0, 0)
        self._counters.add(Metric.KEEP_ALIVE_KEYS, found, "touched")
        self._counters.add(Metric.KEEP_ALIVE_KEYS, total - found, "gone")
        self._counters.add(Metric.KEEP_ALIVE_KEYS, result is None, "failed")

    def _delete(self, objects: Sequence[ObjectName], order: DeleteOrder) -> None:
        """Objects in use (LMCache is storing them in its second tier, say) are tried again."""
        state, skipped = self._state, 0
        try:
            done = self._ask(lambda end_s: self._control.delete(objects, order.tier, end_s))
            skipped = done.skipped
            self._counters.add(Metric.STORE_DELETED_KEYS, done.deleted)
        except StoreError as error:
            logger.debug("LMCache control: %s", error)
            self._counters.add(Metric.KEEPER_DROPPED, len(state.deleting), "delete")
        with state.condition:
            if skipped and order.tries > 1:
                again = DeleteOrder(order.tier, order.tries - 1)
                state.deletes.update(dict.fromkeys(state.deleting, again))
                self._resume_s = self._clock() + _PAUSE_S
            state.deleting.clear()

    def _probe(self) -> None:
        """Nobody waits for this; only this thread uses the breaker."""
        answered = False
        try:
            self._control.status(self._clock() + self._deadline_s)
            answered = True
        except StoreRefusedError:
            answered = True
        except StoreError as error:
            logger.debug("LMCache control: %s", error)
        finally:
            self._breaker.end_probe(answered=answered)
        self._counters.add(Metric.CONTROL_CALLS, label="ok" if answered else "failed")

    def _look(self) -> None:
        state = self._state
        try:
            status = self._ask(self._control.status)
        except StoreError as error:
            logger.debug("LMCache control: %s", error)
            with state.condition:
                if state.status is None:  # nothing is known yet: do not wait an interval
                    state.status_due_s = self._clock() + _PAUSE_S
            return
        with state.condition:
            before, state.status = state.status, status
            if before is None or before.kind != status.kind:
                state.tell(StatusSeen(status))

    def _ask(self, ask: Callable[[float], _T]) -> _T:
        """The breaker hears of it; that the server refuses says that it is there."""
        try:
            answer = ask(self._clock() + self._deadline_s)
        except StoreRefusedError:
            self._breaker.record_success()
            self._counters.add(Metric.CONTROL_CALLS, label="refused")
            raise
        except StoreError:
            self._breaker.record_failure()
            self._counters.add(Metric.CONTROL_CALLS, label="failed")
            raise
        self._breaker.record_success()
        self._counters.add(Metric.CONTROL_CALLS, label="ok")
        return answer
