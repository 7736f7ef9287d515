"""LookupService on a store that answers when told: events, no sleeps."""

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from connectors.scheduler.lookup import (
    MAX_QUEUED_LOOKUPS,
    LookupAnswer,
    LookupQuery,
    LookupService,
)
from connectors.stores.base import KVStore, ReadRequest, StoreCapabilities, StoreKey
from connectors.stores.buffers import Buffer
from spm.breaker import BreakerState, CircuitBreaker
from spm.errors import StoreUnavailableError
from spm.metrics import Counters
from tests.clock import FakeClock
from tracker.ids import BlockKey

PATIENCE_S = 10.0
"""Only a broken test waits this long."""


class ScriptedStore(KVStore):
    """Answers existence queries by a function; everything else is not asked for here."""

    def __init__(self) -> None:
        self.answer: Callable[[Sequence[StoreKey]], list[bool]] = lambda keys: [True] * len(keys)
        self.asked: list[list[StoreKey]] = []
        self.deadlines: list[float] = []
        self.closed = 0

    def contains_many(self, keys: Sequence[StoreKey], deadline_s: float) -> list[bool]:
        self.asked.append(list(keys))
        self.deadlines.append(deadline_s)
        return self.answer(keys)

    def close(self) -> None:
        self.closed += 1

    @property
    def capabilities(self) -> StoreCapabilities:
        raise NotImplementedError

    def get_many(self, reads: Sequence[ReadRequest], deadline_s: float) -> list[Buffer | None]:
        raise NotImplementedError

    def put_many(self, items: Sequence[tuple[StoreKey, Buffer]], deadline_s: float) -> list[bool]:
        raise NotImplementedError

    def delete_many(self, keys: Sequence[StoreKey], deadline_s: float) -> int:
        raise NotImplementedError

    def touch_many(
        self, keys: Sequence[StoreKey], deadline_s: float, ttl_s: Sequence[int] | None = None
    ) -> list[bool]:
        raise NotImplementedError

    def check_integrity(self) -> None:
        raise NotImplementedError


class Gate:
    """Holds the lookup thread inside the store until opened."""

    def __init__(self, store: ScriptedStore) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.closed_meanwhile = False
        self._store = store

    def __call__(self, keys: Sequence[StoreKey]) -> list[bool]:
        self.entered.set()
        assert self.opened.wait(PATIENCE_S)
        self.closed_meanwhile |= self._store.closed > 0
        return [True] * len(keys)


class Rig:
    """A service, its parts, and a way to wait until it has nothing queued."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = ScriptedStore()
        self.counters = Counters()
        self.breaker = CircuitBreaker(failures=2, backoff_s=8, backoff_cap_s=8, clock=self.clock)
        self.service = LookupService(self.store, self.breaker, self.counters, self.clock)
        self._number = 0

    def query(self, *names: Sequence[str], deadline_s: float = 2000.0) -> LookupQuery:
        self._number += 1
        keys = tuple(BlockKey(b"%d" % index) for index in range(len(names)))
        full_names = tuple(tuple(StoreKey(name) for name in block) for block in names)
        return LookupQuery(self._number, "r", keys, full_names, deadline_s)

    def ask(self, *names: Sequence[str], deadline_s: float = 2000.0) -> LookupAnswer:
        query = self.query(*names, deadline_s=deadline_s)
        assert self.service.submit(query)
        return self.answers(1)[0]

    def answers(self, count: int) -> list[LookupAnswer]:
        """Exactly ``count`` answers, as they come."""
        queue = self.service._answers
        return [queue.get(timeout=PATIENCE_S) for _ in range(count)]

    def answers_a_probe(self) -> None:
        self.clock.now_s += 8
        assert self.breaker.begin_probe()
        self.breaker.end_probe(answered=True)

    def counted(self) -> dict[str, float]:
        return {key.split("|")[1]: n for key, n in self.counters.drain().items()}


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.service.close()
    assert not [t for t in threading.enumerate() if t.name == "spm-lookup"], "thread left over"


@pytest.mark.fault("F17", breaks="a block is there when one rank has it")
def test_a_block_is_there_when_every_rank_has_it(rig: Rig) -> None:
    rig.store.answer = lambda keys: [name != "b1" for name in keys]
    answer = rig.ask(["a0", "a1"], ["b0", "b1"], ["c0", "c1"])
    assert answer.present == (True, False, True)
    assert rig.store.asked == [["a0", "a1", "b0", "b1", "c0", "c1"]]
    assert rig.store.deadlines == [2000.0]
    assert rig.counted() == {"answered": 1}


def test_a_store_error_is_no_answer_and_opens_the_breaker(rig: Rig) -> None:
    def fail(keys: Sequence[StoreKey]) -> list[bool]:
        raise StoreUnavailableError("down")

    rig.store.answer = fail
    assert rig.ask(["a"]).present is None
    assert rig.ask(["a"]).present is None
    assert not rig.service.submit(rig.query(["a"]))
    assert len(rig.store.asked) == 2
    assert rig.counted() == {"failed": 2, "refused": 1}


def test_a_store_that_came_back_is_used_again(rig: Rig) -> None:
    test_a_store_error_is_no_answer_and_opens_the_breaker(rig)
    rig.store.answer = lambda keys: [True] * len(keys)
    rig.clock.now_s += 8
    assert not rig.service.submit(rig.query(["a"])), "a request is no probe"
    rig.answers_a_probe()
    assert rig.ask(["a"]).present == (True,)


def test_an_answer_says_when_it_was_there(rig: Rig) -> None:
    def slow(keys: Sequence[StoreKey]) -> list[bool]:
        rig.clock.now_s += 0.25
        return [True] * len(keys)

    rig.store.answer = slow
    started_s = rig.clock.now_s
    assert rig.ask(["a"]).answered_s == started_s + 0.25


@pytest.mark.parametrize("answer", [[], [True], [True] * 3])
def test_an_unexpected_error_counts_as_failure_and_the_thread_lives_on(
    rig: Rig, answer: list[bool]
) -> None:
    rig.store.answer = lambda keys: answer  # not as many as were asked for
    assert rig.ask(["a"], ["b"]).present is None
    assert rig.ask(["a"], ["b"]).present is None
    assert rig.breaker.state is BreakerState.OPEN
    rig.store.answer = lambda keys: [True] * len(keys)
    rig.answers_a_probe()
    assert rig.ask(["a"], ["b"]).present == (True, True)
    assert rig.counted() == {"lookup": 2, "answered": 1}


def test_a_query_past_its_deadline_never_reaches_the_store(rig: Rig) -> None:
    assert rig.ask(["a"], deadline_s=rig.clock.now_s).present is None
    assert rig.store.asked == []
    assert rig.counted() == {"late": 1}


def test_submitting_never_waits_and_the_queue_is_bounded(rig: Rig) -> None:
    rig.store.answer = gate = Gate(rig.store)
    assert rig.service.submit(rig.query(["first"]))
    assert gate.entered.wait(PATIENCE_S)
    for _ in range(MAX_QUEUED_LOOKUPS):
        assert rig.service.submit(rig.query(["queued"]))
    assert not rig.service.submit(rig.query(["refused"]))
    assert rig.service.poll() == []
    assert rig.counted() == {"refused": 1}
    gate.opened.set()
    numbers = [answer.query.number for answer in rig.answers(1 + MAX_QUEUED_LOOKUPS)]
    assert numbers == list(range(1, 2 + MAX_QUEUED_LOOKUPS))


@pytest.mark.parametrize("queued", [0, 1, MAX_QUEUED_LOOKUPS])
def test_closing_waits_for_the_query_in_flight_and_ends_the_thread(rig: Rig, queued: int) -> None:
    rig.store.answer = gate = Gate(rig.store)
    assert rig.service.submit(rig.query(["in flight"]))
    assert gate.entered.wait(PATIENCE_S)
    for _ in range(queued):
        assert rig.service.submit(rig.query(["queued"]))
    closer = threading.Thread(target=rig.service.close)
    closer.start()
    gate.opened.set()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    assert rig.store.closed == 1
    assert not gate.closed_meanwhile
    assert rig.service.poll()[0].present == (True,)
