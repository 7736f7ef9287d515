"""The store keeper's thread: takes what may be done now and asks the store."""

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from connectors.scheduler.keeper_calls import BlockCalls
from connectors.scheduler.keeper_news import Answer, DocumentRead, KeysChecked
from connectors.scheduler.keeper_queues import Document, DocumentQuery, KeyCheck, Question
from connectors.scheduler.keeper_state import KeeperState, no_answer
from connectors.stores.base import KVStore, StoreKey
from spm.breaker import CircuitBreaker
from spm.config import SpmConfig
from spm.errors import StoreError, StoreRefusedError
from spm.keys import KeyNames
from spm.metrics import Metric
from tracker.ids import BlockKey

logger = logging.getLogger(__name__)

BATCH_KEYS = 512
"""Values, or events, in one round trip."""
_PAUSE_S = 0.5
"""Background work asks a breaker that is open, or goes on after an error or a refusal, this
often."""
_LONGEST_WAIT_S = 3600.0

_T = TypeVar("_T")
_Job = Callable[[], None]


class KeeperWorker:
    """Strict order: checks and reads, documents and events, keep-alive, deletes, and how full
    the store is. The lock is held to take work and to report, never while the store is asked.
    """

    def __init__(
        self,
        state: KeeperState,
        store: KVStore,
        calls: BlockCalls,
        breaker: CircuitBreaker,
        config: SpmConfig,
        on_news: Callable[[], None] | None,
        clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._store = store
        self._calls = calls
        self._breaker = breaker
        self._deadline_s = config.batch_deadline_s
        self._stream = StoreKey(config.events_stream)
        self._stream_length = config.events_stream_length
        self._on_news = on_news
        self._clock = clock
        self._batch = max(1, BATCH_KEYS // calls.ranks)
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
                logger.exception("unexpected error in the store keeper")
                self._state.counters.add(Metric.INTERNAL_ERRORS, label="keeper")
                self._breaker.record_failure()
                self._resume_s = self._clock() + _PAUSE_S

    # --- taking work, lock held -----------------------------------------------------------

    def _next_job(self) -> _Job | None:
        state = self._state
        with state.condition:
            while not state.closed:
                now_s = self._clock()
                job = self._question_job() or self._background_job(now_s)
                if job is not None:
                    return job
                state.waiting = True
                state.condition.wait(min(max(0.0, state.looks_again_s - now_s), _LONGEST_WAIT_S))
                state.waiting = False
        return None

    def _question_job(self) -> _Job | None:
        question = self._state.queues.next_question()
        if question is None:
            return None
        return partial(self._ask, question, self._state.space, self._state.generation)

    def _background_job(self, now_s: float) -> _Job | None:
        """What comes next, unless it has to wait until ``looks_again_s``."""
        state = self._state
        state.looks_again_s = max(self._resume_s, self._background_due_s(now_s))
        if state.looks_again_s > now_s:
            return None
        if not self._breaker.allow():
            state.looks_again_s = self._resume_s = now_s + _PAUSE_S
            return None
        if state.queues.has_writes:
            return self._write_job()
        return self._key_job(now_s) or self._capacity_job(now_s)

    def _background_due_s(self, now_s: float) -> float:
        state = self._state
        if state.queues.has_writes:
            return now_s
        keys_due_s = now_s if state.queues.has_deletes else state.ring.next_due_s(now_s)
        paced_s = max(keys_due_s, state.pace.ready_s)
        # Nobody looks how full the store is while keys wait for their turn.
        return paced_s if keys_due_s <= now_s else min(paced_s, state.capacity_due_s)

    def _key_job(self, now_s: float) -> _Job | None:
        state = self._state
        due = state.ring.next_due_s(now_s) <= now_s
        if not due and not state.queues.has_deletes:
            return None
        assert state.space is not None, "keys are taken only when they have names"
        # An empty batch (all had expired) reports nothing to the breaker, which copes.
        if due:
            batch = state.ring.take(now_s, self._batch)
            state.pace.spend(len(batch) * self._calls.ranks, now_s)
            return partial(self._keep_alive, batch, state.space, state.generation)
        wanted = [key for key in state.queues.next_deletes(self._batch) if not self._held(key)]
        state.pace.spend(len(wanted) * self._calls.ranks, now_s)
        return partial(self._delete, wanted, state.space)

    def _capacity_job(self, now_s: float) -> _Job:
        self._state.capacity_due_s = now_s + self._state.ring.interval_s
        return self._look_how_full

    def _write_job(self) -> _Job:
        document = self._state.queues.next_document()
        if document is not None:
            return partial(self._write, document, self._state.generation)
        return partial(self._append, self._state.queues.next_events(BATCH_KEYS))

    def _held(self, key: BlockKey) -> bool:
        until_s = self._state.ring.until_s(key)
        return until_s is not None and until_s > self._clock()

    # --- doing it, lock not held ----------------------------------------------------------

    def _ask(self, question: Question, space: KeyNames | None, generation: int) -> None:
        answer = no_answer(question)
        try:
            if self._clock() < question.deadline_s and self._breaker.allow():
                answer = self._answer(question, space)
            else:
                what = "check" if isinstance(question, KeyCheck) else "document"
                self._state.count_dropped(what)
        finally:
            with self._state.condition:
                current = generation == self._state.generation
                self._state.desk.answer(answer if current else no_answer(question))
            if self._on_news is not None:
                self._on_news()

    def _answer(self, question: Question, space: KeyNames | None) -> Answer:
        if isinstance(question, DocumentQuery):
            read = partial(self._store.get_document, question.name, question.max_bytes)
            return DocumentRead(question.number, self._call(read, question.deadline_s))
        assert space is not None, "checks are taken only when keys have names"
        present: list[bool] = []
        for at in range(0, len(question.keys), self._batch):
            keys = question.keys[at : at + self._batch]
            found = self._touch(space, self._with_instants(keys), question.deadline_s)
            if None in found:
                return no_answer(question)
            present += [there is True for there in found]
        with self._state.condition:
            self._state.desk.found(
                key for key, there in zip(question.keys, present, strict=True) if there
            )
        return KeysChecked(question.number, tuple(present))

    def _with_instants(self, keys: Sequence[BlockKey]) -> list[tuple[BlockKey, float]]:
        """Keys and until when they are kept alive: a check must not shorten their lives."""
        with self._state.condition:
            ring = self._state.ring
            return [(key, ring.until_s(key) or -math.inf) for key in keys]

    def _keep_alive(
        self, batch: Sequence[tuple[BlockKey, float]], space: KeyNames, generation: int
    ) -> None:
        if not batch:
            return
        asked_s = self._clock()
        found = self._touch(space, batch, asked_s + self._deadline_s)
        seen = [key for (key, _), there in zip(batch, found, strict=True) if there]
        gone = [key for (key, _), there in zip(batch, found, strict=True) if there is False]
        counters = self._state.counters
        counters.add(Metric.KEEP_ALIVE_KEYS, len(seen), "touched")
        counters.add(Metric.KEEP_ALIVE_KEYS, len(gone), "gone")
        counters.add(Metric.KEEP_ALIVE_KEYS, len(batch) - len(seen) - len(gone), "failed")
        with self._state.condition:
            if generation == self._state.generation:
                self._state.desk.seen(seen, asked_s)
                self._state.desk.gone(gone, asked_s)

    def _touch(
        self, space: KeyNames, batch: Sequence[tuple[BlockKey, float]], deadline_s: float
    ) -> Sequence[bool | None]:
        touch = partial(self._calls.touch, space, batch, self._clock())
        return self._call(touch, deadline_s) or [None] * len(batch)

    def _delete(self, keys: Sequence[BlockKey], space: KeyNames) -> None:
        if not keys:
            return
        delete = partial(self._calls.delete, space, keys)
        deleted = self._call(delete, self._clock() + self._deadline_s)
        if deleted is None:
            self._state.count_dropped("delete", len(keys))
        else:
            self._state.counters.add(Metric.STORE_DELETED_KEYS, deleted)

    def _write(self, document: Document, generation: int) -> None:
        put = partial(self._store.put_document, document.name, document.content, document.ttl_s)
        written = self._call(put, self._clock() + self._deadline_s)
        with self._state.condition:
            again = written is None and generation == self._state.generation
            if again and not self._state.closed:
                self._state.count_dropped("document", self._state.queues.write_again(document))
            elif not written:
                self._state.count_dropped("document")

    def _append(self, events: Sequence[bytes]) -> None:
        append = partial(self._store.append_stream, self._stream, events, self._stream_length)
        appended = self._call(append, self._clock() + self._deadline_s) or 0
        self._state.count_dropped("event", len(events) - appended)

    def _look_how_full(self) -> None:
        """Without an answer, what was said before holds."""
        deadline_s = self._clock() + self._deadline_s
        said = self._call(lambda end_s: (self._store.capacity(end_s),), deadline_s)
        if said is not None:
            with self._state.condition:
                (self._state.capacity,) = said

    def _call(self, ask: Callable[[float], _T], deadline_s: float) -> _T | None:
        """The store's answer by then, None if it failed; the breaker hears about it. One that
        comes too late is a failure too: a store that is always late must be left alone. One
        that refuses is there, and lookups share its breaker."""
        try:
            answer = ask(deadline_s)
        except StoreRefusedError as error:
            logger.debug("store keeper: %s", error)
            self._resume_s = self._clock() + _PAUSE_S
            return None
        except StoreError as error:
            self._breaker.record_failure(error)
            logger.debug("store keeper: %s", error)
            return None
        if self._clock() < deadline_s:
            self._breaker.record_success()
        else:
            self._breaker.record_failure("its answers are late")
        return answer
