"""Existence queries to the remote store, off the scheduler's thread.

Ownership: the scheduler thread submits and polls; one worker thread talks to the store;
two queues lie between them and nothing else is shared. Every query carries a number, and
whoever waits compares it, so an answer that comes too late is an answer to nobody. The
scheduler never waits: it asks again at its next step until its own deadline.
"""

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from connectors.stores.base import KVStore, StoreKey
from spm.breaker import CircuitBreaker
from spm.errors import StoreError
from spm.metrics import Counters, Metric
from tracker.ids import BlockKey

logger = logging.getLogger(__name__)

MAX_QUEUED_LOOKUPS = 1024


@dataclass(frozen=True, slots=True)
class LookupQuery:
    """Is every rank's value of these blocks there? ``names[i]`` are block ``i``'s keys."""

    number: int
    request_id: str
    keys: tuple[BlockKey, ...]
    names: tuple[tuple[StoreKey, ...], ...]
    deadline_s: float
    asked_s: float = math.inf
    """When it was submitted."""


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """``present[i]`` belongs to ``query.keys[i]``; ``None`` if the store did not answer."""

    query: LookupQuery
    present: tuple[bool, ...] | None
    answered_s: float = math.inf
    """When the store had answered."""


class LookupService:
    """One thread, one store connection, a bounded queue and a circuit breaker."""

    def __init__(
        self,
        store: KVStore,
        breaker: CircuitBreaker,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._breaker = breaker
        self._counters = counters
        self._clock = clock
        self._queries: queue.Queue[LookupQuery | None] = queue.Queue(MAX_QUEUED_LOOKUPS)
        self._answers: queue.SimpleQueue[LookupAnswer] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="spm-lookup", daemon=True)
        self._thread.start()

    def submit(self, query: LookupQuery) -> bool:
        """Ask; False if the queue is full or the store is being left alone. Never waits."""
        if not self._breaker.allow():
            self._counters.add(Metric.LOOKUPS, label="refused")
            return False
        try:
            self._queries.put_nowait(query)
        except queue.Full:
            self._counters.add(Metric.LOOKUPS, label="refused")
            return False
        return True

    def poll(self) -> Sequence[LookupAnswer]:
        """Answers since the last call. Never waits."""
        answers = []
        while not self._answers.empty():
            answers.append(self._answers.get())
        return answers

    def close(self) -> None:
        """Stop the thread and close the store; waits at most for one query's deadline."""
        while True:
            try:
                self._queries.put_nowait(None)
                break
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._queries.get_nowait()
        self._thread.join()
        self._store.close()

    def _run(self) -> None:
        while (query := self._queries.get()) is not None:
            try:
                present = self._ask(query)
            except Exception:  # thread boundary: the thread must outlive any bug below
                logger.exception("unexpected error in a lookup; the blocks count as absent")
                self._counters.add(Metric.INTERNAL_ERRORS, label="lookup")
                self._breaker.record_failure()
                present = None
            self._answers.put(LookupAnswer(query, present, self._clock()))

    def _ask(self, query: LookupQuery) -> tuple[bool, ...] | None:
        if self._clock() >= query.deadline_s:  # waited in our own queue: not the store's fault
            self._counters.add(Metric.LOOKUPS, label="late")
            return None
        flat = [name for names in query.names for name in names]
        try:
            found = self._store.contains_many(flat, query.deadline_s)
        except StoreError as error:
            self._breaker.record_failure(error)
            self._counters.add(Metric.LOOKUPS, label="failed")
            logger.debug("lookup failed: %s", error)
            return None
        by_name = dict(zip(flat, found, strict=True))
        self._breaker.record_success()
        self._counters.add(Metric.LOOKUPS, label="answered")
        return tuple(all(by_name[name] for name in names) for names in query.names)
