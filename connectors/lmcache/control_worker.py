"""LMCache's control API off the scheduler's thread.

Ownership: the scheduler thread says what it wants and polls for news; one worker thread talks
to the server. One lock guards what is between them; it is never held while the server is
asked. An idle engine takes no steps, so the worker keeps its own time. What was asked before a
reset is not told of any more.
"""

import threading
import time
from collections.abc import Callable, Sequence

from connectors.lmcache.control import DeleteTier, LMCacheControl, ServerStatus, WarmRequest
from connectors.lmcache.control_loop import ControlLoop
from connectors.lmcache.control_news import ControlNews
from connectors.lmcache.control_state import (
    MAX_DELETES,
    MAX_WARMS_QUEUED,
    ControlState,
    DeleteOrder,
    ObjectsOf,
    Warm,
)
from connectors.lmcache.kept_sessions import KeptSessions
from spm.breaker import BreakerState, CircuitBreaker
from spm.config import SpmConfig
from spm.metrics import Counters, Metric
from tracker.ids import BlockKey, SessionRef

_DELETE_TRIES = 4


class ControlWorker:
    """One thread, bounded queues and a circuit breaker.

    Every method belongs to the scheduler thread, and none but :meth:`close` waits for the
    server.
    """

    def __init__(
        self,
        control: LMCacheControl,
        breaker: CircuitBreaker,
        counters: Counters,
        config: SpmConfig,
        control_deadline_s: float,
        on_news: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``control_deadline_s``: longest wait for one request. ``on_news`` is called on the
        worker thread, no lock held, after each round that may have found something."""
        self._breaker = breaker
        self._counters = counters
        self._clock = clock
        kept = KeptSessions(config.keep_alive.interval_s)
        self._state = ControlState(kept, max_news=2 * config.max_sessions + MAX_WARMS_QUEUED)
        self._loop = ControlLoop(
            self._state, control, breaker, counters, control_deadline_s, on_news, clock
        )
        self._thread = threading.Thread(
            target=self._loop.run, name="spm-lmcache-control", daemon=True
        )
        self._thread.start()

    @property
    def breaker_state(self) -> BreakerState:
        """Whether the server is being asked."""
        return self._breaker.state

    @property
    def server(self) -> ServerStatus | None:
        """As last seen; None: it never answered."""
        return self._state.status

    # --- what is wanted -------------------------------------------------------------------

    def use(self, objects_of: ObjectsOf | None) -> None:
        """Chunks are named like this from now on; what waits to be deleted under other names is
        not."""
        state = self._state
        with state.condition:
            self._count_dropped(len(state.deletes))
            state.deletes.clear()
            state.deleting.clear()
            state.objects_of = objects_of

    def warm(self, number: int, request: WarmRequest, deadline_s: float) -> bool:
        """Ask for one :class:`WarmEnded`. False, and no answer, if too many wait."""
        state = self._state
        with state.condition:
            if state.closed or len(state.warms) >= MAX_WARMS_QUEUED:
                return False
            state.warms.append(Warm(number, request, deadline_s))
            state.wanted.add(number)
            state.wake()
            return True

    def forget(self, number: int) -> None:
        """Nobody waits for that any more. The server goes on with it."""
        with self._state.condition:
            self._state.wanted.discard(number)

    def keep(self, ref: SessionRef, request: WarmRequest, until_s: float) -> None:
        """Keep a session's chunks in the server's host tier until then."""
        state = self._state
        with state.condition:
            if not state.closed:
                state.kept.hold(ref, request, until_s, self._clock())
                state.wake()

    def drop(self, ref: SessionRef) -> None:
        """Not any more."""
        with self._state.condition:
            self._state.kept.drop(ref)

    def delete(self, keys: Sequence[BlockKey], tier: DeleteTier) -> int:
        """Have all ranks' objects of these chunks deleted when nobody waits for anything else,
        unless they are spared before. Returns how many are accepted."""
        state = self._state
        with state.condition:
            room = MAX_DELETES - len(state.deletes)
            accepted = keys[:room] if state.objects_of is not None and not state.closed else ()
            state.deletes.update(dict.fromkeys(accepted, DeleteOrder(tier, _DELETE_TRIES)))
            self._count_dropped(len(keys) - len(accepted))
            if accepted:
                state.wake()
            return len(accepted)

    def spare(self, keys: Sequence[BlockKey]) -> None:
        """These are wanted again."""
        state = self._state
        if not state.deletes and not state.deleting:
            return
        with state.condition:
            for key in keys:
                state.deletes.pop(key, None)
            state.deleting.difference_update(keys)

    def reset(self) -> None:
        """Nothing asked so far matters any more; nothing is kept."""
        state = self._state
        with state.condition:
            state.generation += 1
            state.warms.clear()
            state.wanted.clear()
            state.deletes.clear()
            state.deleting.clear()
            state.kept.clear()
            state.news.clear()

    # --- what is known --------------------------------------------------------------------

    def poll(self) -> list[ControlNews]:
        """News since the last call. Cheap if there is none."""
        state = self._state
        if not state.news:  # every step asks; what comes now can wait for the next
            return []
        with state.condition:
            news = [*state.news]
            state.news.clear()
            return news

    def sessions_kept(self) -> tuple[int, float]:
        """How many sessions are kept in the host tier, and by how many seconds that is late."""
        with self._state.condition:
            return len(self._state.kept), self._state.kept.behind_s(self._clock())

    # --- the rest -------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the thread; waits at most for the call under way. Idempotent."""
        with self._state.condition:
            self._state.closed = True
            self._state.wake()
        self._thread.join()

    def _count_dropped(self, count: int) -> None:
        self._counters.add(Metric.KEEPER_DROPPED, count, "delete")
