"""Host in front of remote: what is asked where, and what a failing remote may cost."""

import contextlib
from collections.abc import Iterator, Sequence

import pytest

from connectors.stores.base import (
    KVStore,
    ReadRequest,
    StoreCapabilities,
    StoreCapacity,
    StoreKey,
    Tier,
)
from connectors.stores.buffers import Buffer, BufferPool
from connectors.stores.memory import MemoryStore
from connectors.stores.tiered import TieredStore
from spm.breaker import BreakerState, CircuitBreaker
from spm.errors import (
    StoreError,
    StoreRefusedError,
    StoreTimeoutError,
    StoreUnavailableError,
)

SIZE = 100
LATER_S = 1000.0
A, B, C = (StoreKey(name) for name in "abc")


class ProxyStore(KVStore):
    """A remote in memory that fails on command and notes which keys it was asked for."""

    def __init__(self, pool: BufferPool) -> None:
        self.inner = MemoryStore(pool, 10_000)
        self.failure: StoreError | None = None
        self.asked: list[StoreKey] = []

    def _ask(self, keys: Sequence[StoreKey]) -> None:
        self.asked.extend(keys)
        if self.failure is not None:
            raise self.failure

    @property
    def capabilities(self) -> StoreCapabilities:
        return StoreCapabilities(remote=True, delete=True, touch=True, exact_ttl=False)

    def get_many(self, reads: Sequence[ReadRequest], deadline_s: float) -> list[Buffer | None]:
        self._ask([read.key for read in reads])
        return self.inner.get_many(reads)

    def put_many(self, items: Sequence[tuple[StoreKey, Buffer]], deadline_s: float) -> list[bool]:
        self._ask([key for key, _ in items])
        return self.inner.put_many(items)

    def contains_many(self, keys: Sequence[StoreKey], deadline_s: float) -> list[bool]:
        self._ask(keys)
        return self.inner.contains_many(keys)

    def delete_many(self, keys: Sequence[StoreKey], deadline_s: float) -> int:
        self._ask(keys)
        return self.inner.delete_many(keys)

    def touch_many(
        self, keys: Sequence[StoreKey], deadline_s: float, ttl_s: Sequence[int] | None = None
    ) -> list[bool]:
        self._ask(keys)
        return self.inner.touch_many(keys)

    def capacity(self, deadline_s: float) -> StoreCapacity | None:
        self._ask([])
        return self.inner.capacity()

    def close(self) -> None:
        self.inner.close()

    def check_integrity(self) -> None:
        self.inner.check_integrity()


class Bench:
    """A tiered store, its parts, and a clock that stands still unless told."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pool = BufferPool(100_000)
        self.host = MemoryStore(self.pool, 10_000)
        self.remote = ProxyStore(self.pool)
        self.breaker = CircuitBreaker(
            failures=2, backoff_s=1.0, backoff_cap_s=4.0, clock=self.clock, uniform=lambda: 1.0
        )
        self.store = TieredStore(self.host, self.remote, self.breaker, self.clock)

    def clock(self) -> float:
        return self.now_s

    def value(self) -> Buffer:
        buffer = self.pool.acquire(SIZE)
        assert buffer is not None
        return buffer

    def put(self, where: KVStore, *keys: StoreKey) -> None:
        for key in keys:
            buffer = self.value()
            where.put_many([(key, buffer)], LATER_S)
            buffer.release()
        self.remote.asked.clear()

    def tiers(self, *keys: StoreKey) -> list[Tier | None]:
        reads = [ReadRequest(key, SIZE) for key in keys]
        hits = self.store.get_many_by_tier(reads, LATER_S)
        for hit in hits:
            if hit is not None:
                hit.buffer.release()
        return [hit.tier if hit is not None else None for hit in hits]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.store.check_integrity()
    bench.store.close()
    assert bench.pool.used_bytes == 0


def test_the_remote_is_asked_only_for_what_the_host_lacks(bench: Bench) -> None:
    bench.put(bench.host, A)
    bench.put(bench.remote, A, C)
    assert bench.tiers(A, B, C) == [Tier.HOST, None, Tier.REMOTE]
    assert bench.remote.asked == [B, C]
    bench.remote.asked.clear()
    assert bench.store.contains_many([A, B, C], LATER_S) == [True, False, True]
    assert bench.remote.asked == [B, C]


def test_remote_values_are_kept_only_when_promoted(bench: Bench) -> None:
    bench.put(bench.remote, A)
    assert bench.tiers(A) == [Tier.REMOTE]
    assert bench.tiers(A) == [Tier.REMOTE]
    (hit,) = bench.store.get_many_by_tier([ReadRequest(A, SIZE)], LATER_S)
    assert hit is not None
    assert bench.store.promote(A, hit.buffer)
    hit.buffer.release()
    assert bench.tiers(A) == [Tier.HOST]


def test_all_in_the_host_never_touches_the_remote(bench: Bench) -> None:
    bench.put(bench.host, A)
    bench.remote.failure = StoreUnavailableError("down")
    assert bench.tiers(A) == [Tier.HOST]
    assert not bench.remote.asked


def test_remote_failure_keeps_what_the_host_gave(bench: Bench) -> None:
    bench.put(bench.host, A)
    bench.remote.failure = StoreTimeoutError("late")
    assert bench.tiers(A, B) == [Tier.HOST, None]
    with pytest.raises(StoreTimeoutError):
        bench.tiers(B)


def test_failing_remote_is_left_alone_and_used_again(bench: Bench) -> None:
    bench.put(bench.remote, A)
    bench.remote.failure = StoreUnavailableError("down")
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            bench.tiers(A)
    bench.remote.asked.clear()
    buffer = bench.value()
    assert bench.tiers(A) == [None]
    assert bench.store.put_remote([(B, buffer)], LATER_S) == [False]
    assert bench.store.put_many([(B, buffer)], LATER_S) == [True], "the host has it"
    assert bench.store.contains_many([A, B], LATER_S) == [False, True]
    assert bench.store.touch_many([A, B], LATER_S) == [False, True]
    assert bench.store.delete_many([A, B], LATER_S) == 1
    assert not bench.remote.asked
    bench.remote.failure = None
    bench.now_s += 1.0
    assert bench.tiers(A) == [None], "whoever needs the value does not probe"
    assert bench.breaker.begin_probe()
    bench.breaker.end_probe(answered=True)
    assert bench.tiers(A) == [Tier.REMOTE]
    buffer.release()


def test_a_remote_that_is_always_late_opens_the_breaker(bench: Bench) -> None:
    bench.put(bench.remote, A)
    for _ in range(2):
        (hit,) = bench.store.get_many_by_tier([ReadRequest(A, SIZE)], deadline_s=bench.now_s)
        assert hit is not None, "what came is used"
        hit.buffer.release()
    assert bench.breaker.state is BreakerState.OPEN


@pytest.mark.parametrize("values", [True, False])
def test_a_read_in_a_hurry_is_no_failure_but_looked_into(bench: Bench, values: bool) -> None:
    """Catches a store that is left alone, by everybody, because requests could not wait."""
    bench.put(bench.remote, A)
    bench.remote.failure = None if values else StoreTimeoutError("late")
    for _ in range(5):
        with contextlib.suppress(StoreTimeoutError):
            (hit,) = bench.store.get_many_by_tier(
                [ReadRequest(A, SIZE)], deadline_s=bench.now_s, hurried=True
            )
            assert hit is not None
            hit.buffer.release()
    assert bench.breaker.state is BreakerState.CLOSED
    assert bench.breaker.begin_probe()


def test_a_store_that_is_not_there_fails_whoever_is_in_a_hurry(bench: Bench) -> None:
    bench.remote.failure = StoreUnavailableError("down")
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            bench.store.get_many_by_tier([ReadRequest(A, SIZE)], LATER_S, hurried=True)
    assert bench.breaker.state is BreakerState.OPEN


def test_a_store_that_refuses_to_write_is_still_read(bench: Bench) -> None:
    """Catches reads from a replica that stop because nothing can be written to it."""
    bench.put(bench.remote, A)
    bench.remote.failure = StoreRefusedError("read only")
    buffer = bench.value()
    for _ in range(5):
        with pytest.raises(StoreRefusedError):
            bench.store.put_remote([(B, buffer)], LATER_S)
    buffer.release()
    bench.remote.failure = None
    assert bench.tiers(A) == [Tier.REMOTE]


def test_writes_go_to_the_tier_asked_for(bench: Bench) -> None:
    buffer = bench.value()
    assert bench.store.put_host([(A, buffer)]) == [True]
    assert bench.store.put_remote([(B, buffer)], LATER_S) == [True]
    buffer.release()
    assert bench.host.contains_many([A, B]) == [True, False]
    assert bench.remote.contains_many([A, B], LATER_S) == [False, True]


@pytest.mark.parametrize("call", ["put_many", "contains_many", "touch_many", "delete_many"])
def test_remote_failure_is_raised_where_the_host_has_nothing(bench: Bench, call: str) -> None:
    bench.remote.failure = StoreUnavailableError("down")
    store = TieredStore(None, bench.remote, bench.breaker)
    buffer = bench.value()
    subject = (A, buffer) if call == "put_many" else A
    with pytest.raises(StoreUnavailableError):
        getattr(store, call)([subject], LATER_S)
    buffer.release()


def test_how_full_the_remote_is_counts(bench: Bench) -> None:
    bench.put(bench.host, A, B)
    bench.put(bench.remote, C)
    assert bench.store.capacity(LATER_S) == StoreCapacity(SIZE, 10_000)
    bench.remote.failure = StoreUnavailableError("down")
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            bench.store.capacity(LATER_S)
    assert bench.store.capacity(LATER_S) is None, "the breaker is open"


def test_without_a_remote_the_host_answers(bench: Bench) -> None:
    store = TieredStore(bench.host, None, bench.breaker)
    bench.put(store, A)
    assert store.contains_many([A, B], LATER_S) == [True, False]
    assert store.capacity(LATER_S) == StoreCapacity(SIZE, 10_000)
    assert store.delete_many([A, B], LATER_S) == 1
    assert not store.capabilities.remote
    assert store.put_document(A, b"content", 10, LATER_S)
    assert store.get_document(A, 100, LATER_S) == b"content"


def test_without_any_tier_everything_is_missing(bench: Bench) -> None:
    store = TieredStore(None, None, bench.breaker)
    buffer = bench.value()
    assert store.put_many([(A, buffer)], LATER_S) == [False]
    assert not store.promote(A, buffer)
    assert store.get_many([ReadRequest(A, SIZE)], LATER_S) == [None]
    assert not store.capabilities.delete
    assert not store.capabilities.residency
    assert store.capacity(LATER_S) is None
    assert not store.put_document(A, b"content", 10, LATER_S)
    assert store.get_document(A, 100, LATER_S) is None
    assert store.expire_many([A], 10, LATER_S) == 0
    assert store.append_stream(A, [b"event"], 10, LATER_S) == 0
    store.close()
    buffer.release()
