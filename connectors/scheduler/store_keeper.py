"""Work on stored keys off the scheduler's thread: keep-alive, checks, deletes, documents, events.

Ownership: the scheduler thread says what it wants and polls for news; one worker thread talks
to the store over a connection of its own. One lock guards the ring of keys, the queues and the
news between them; it is never held while the store is asked. An idle engine takes no steps, so
the worker keeps its own time. Answers about a former key space are dropped, and so is work that
waited when it changed.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from connectors.scheduler.keeper_calls import BlockCalls
from connectors.scheduler.keeper_news import DocumentRead, KeysChecked, News, NewsDesk
from connectors.scheduler.keeper_queues import Document, DocumentQuery, KeyCheck, Question
from connectors.scheduler.keeper_state import KeeperState
from connectors.scheduler.keeper_worker import KeeperWorker
from connectors.stores.base import KVStore, StoreCapabilities, StoreKey
from connectors.stores.prober import StoreProber
from spm.breaker import BreakerState, CircuitBreaker
from spm.config import SpmConfig
from spm.events import KeysGone, KeysSeen
from spm.keepalive import KeepAliveRing
from spm.keys import KeyNames
from spm.metrics import Counters, Metric, metric_key
from spm.pace import Pace
from tracker.ids import BlockKey

_GAUGES = {
    "keys": metric_key(Metric.KEEP_ALIVE_HELD),
    "behind_s": metric_key(Metric.KEEP_ALIVE_BEHIND_SECONDS),
    "used_bytes": metric_key(Metric.REMOTE_USED_BYTES),
    "limit_bytes": metric_key(Metric.REMOTE_LIMIT_BYTES),
}

__all__ = ["DocumentRead", "KeysChecked", "KeysGone", "KeysSeen", "News", "StoreKeeper"]


class StoreKeeper:
    """One thread, one store connection, bounded queues and a circuit breaker, with whoever
    else uses it, for which a second thread probes.

    Every method belongs to the scheduler thread, and none but :meth:`close` waits for the
    store. Blocks are kept alive, checked and deleted on all ranks; a block is there when
    every rank's value is.
    """

    def __init__(
        self,
        store: KVStore,
        breaker: CircuitBreaker,
        counters: Counters,
        config: SpmConfig,
        world_size: int,
        on_news: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes over ``store``. ``on_news`` is called on the worker thread, no lock held,
        after each answer to a check or a read (not for keep-alive)."""
        keep = config.keep_alive
        ttl_s = config.remote.ttl_s if config.remote is not None else 0
        interval_s = min(keep.interval_s, ttl_s / 3) if ttl_s else keep.interval_s
        # Another engine touches what it keeps once an interval: one touch may be late.
        grace_s = max(keep.delete_grace_s, math.ceil(2 * interval_s)) if keep.delete_grace_s else 0
        self._store = store
        self._breaker = breaker
        self._clock = clock
        self._calls = BlockCalls(store, world_size, grace_s)
        self._can = store.capabilities
        self._stream = config.events_stream
        self._state = KeeperState(
            ring=KeepAliveRing(interval_s, config.max_keys),
            desk=NewsDesk(config.max_keys),
            pace=Pace(keep.max_keys_per_s),
            counters=counters,
            capacity_due_s=clock() if self._can.capacity else math.inf,
        )
        worker = KeeperWorker(self._state, store, self._calls, breaker, config, on_news, clock)
        self._thread = threading.Thread(target=worker.run, name="spm-store-keeper", daemon=True)
        self._thread.start()
        self._prober = StoreProber(store, breaker, config, counters, clock)
        self._prober.start()

    @property
    def capabilities(self) -> StoreCapabilities:
        """What the store can do."""
        return self._can

    @property
    def breaker_state(self) -> BreakerState:
        """Whether the store is being asked."""
        return self._breaker.state

    @property
    def keep_alive_supported(self) -> bool:
        """Whether the store can keep keys alive; if not, :meth:`hold` holds none."""
        return self._calls.can_touch

    # --- what is wanted -------------------------------------------------------------------

    def use(self, names: KeyNames | None) -> None:
        """Names are built with this from now on. Nothing is kept alive any more, and what
        waits to be done under the old names is not: open checks and reads are answered None.
        None: there are no names yet, so no keys are taken."""
        state = self._state
        with state.condition:
            state.space = names
            state.generation += 1
            state.ring.clear()
            state.desk.forget_keys()
            state.drop_named()
            state.wake()

    def hold(self, keys: Sequence[BlockKey], until_s: float) -> int:
        """Keep alive until then, or longer if that was said before; none of them is deleted.
        Returns how many are held: not all over ``max_keys``, or if the store cannot."""
        state = self._state
        with state.condition:
            state.queues.spare(keys)
            if not self._calls.can_touch or state.space is None or state.closed:
                return 0
            before = len(state.ring)
            held = state.ring.hold(keys, until_s)
            soon_s = self._clock() + state.ring.interval_s / 32
            if len(state.ring) > before and state.looks_again_s > soon_s:
                state.wake()  # a new key may be due before the worker looks again
            return held

    def drop(self, keys: Iterable[BlockKey]) -> None:
        """Keep alive no longer, from now on."""
        with self._state.condition:
            self._state.ring.drop(keys)

    def check(self, number: int, keys: Sequence[BlockKey], deadline_s: float) -> bool:
        """Ask for :class:`KeysChecked` about these keys, which also refreshes them. False, and
        no answer, if too many questions wait or there are no names yet."""
        return self._ask(KeyCheck(number, tuple(keys), deadline_s), "check")

    def read_document(self, number: int, name: StoreKey, max_bytes: int, deadline_s: float) -> bool:
        """Ask for :class:`DocumentRead`. False, and no answer, if too many questions wait."""
        return self._ask(DocumentQuery(number, name, max_bytes, deadline_s), "document")

    def delete(self, keys: Sequence[BlockKey]) -> int:
        """Have these deleted, or told to expire, when there is nothing better to do and unless
        they are held again before. Returns how many are accepted; the others expire."""
        state = self._state
        with state.condition:
            able = self._calls.can_delete and state.space is not None and not state.closed
            accepted = state.queues.delete(keys) if able else 0
            state.count_dropped("delete", len(keys) - accepted)
            if accepted:
                state.wake()
            return accepted

    def write_document(self, name: StoreKey, content: bytes, ttl_s: int) -> None:
        """Write this; the newest of a name wins. Over the bound the oldest are dropped. While
        the store fails it is tried again."""
        state = self._state
        with state.condition:
            if state.closed or not self._can.documents:
                state.count_dropped("document")
                return
            state.count_dropped("document", state.queues.write(Document(name, content, ttl_s)))
            state.wake()

    def publish(self, entries: Sequence[bytes]) -> None:
        """Append to the configured stream, if there is one. Over the bound the oldest are
        dropped, and so is what the store fails to take."""
        state = self._state
        if not self._stream or not self._can.streams or not entries:
            return
        with state.condition:
            dropped = len(entries) if state.closed else state.queues.publish(entries)
            state.count_dropped("event", dropped)
            state.wake()

    # --- what is known --------------------------------------------------------------------

    def poll(self) -> list[News]:
        """News since the last call: keys seen, answers, keys gone. Cheap if there is none."""
        if not self._state.desk:  # every step asks; what comes now can wait for the next
            return []
        with self._state.condition:
            return self._state.desk.take()

    def status(self) -> dict[str, float | None]:
        """Keys held, the interval, how late it is, and values touched or deleted a second; how
        full the store said it was, about an interval ago (None: not known, or no limit)."""
        state = self._state
        with state.condition:
            now_s, capacity = self._clock(), state.capacity
            return {
                "keys": len(state.ring),
                "interval_s": state.ring.interval_s,
                "behind_s": state.ring.behind_s(now_s),
                "keys_per_s": state.pace.measured_per_s(now_s),
                "used_bytes": capacity.used_bytes if capacity is not None else None,
                "limit_bytes": capacity.limit_bytes if capacity is not None else None,
            }

    def gauges(self) -> dict[str, float]:
        """Current sizes, by metric key; 0 for what is not known."""
        status = self.status()
        return {key: status[name] or 0 for name, key in _GAUGES.items()}

    # --- the rest -------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the thread and close the store; waits at most for the call under way. Open
        questions are answered None. Idempotent."""
        state = self._state
        with state.condition:
            state.closed = True
            state.drop_named()
            state.wake()
        self._thread.join()
        self._prober.close()
        self._store.close()

    def check_integrity(self) -> None:
        """Raise :class:`spm.errors.IntegrityError` if the bookkeeping is off."""
        with self._state.condition:
            self._state.ring.check_integrity()
            self._state.queues.check_integrity()

    def _ask(self, question: Question, what: str) -> bool:
        state = self._state
        with state.condition:
            able = not state.closed and (state.space is not None or what == "document")
            if not able or not state.queues.ask(question, state.desk.unread_answers):
                state.count_dropped(what)
                return False
            state.wake()
            return True
