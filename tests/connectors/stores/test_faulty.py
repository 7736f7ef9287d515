"""Each fault put into a store is the fault it says, and nothing worse."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.stores.base import KVStore, ReadRequest, StoreKey
from connectors.stores.buffers import Buffer, BufferPool
from connectors.stores.factory import create_remote_store
from connectors.stores.faulty import FaultyStore
from connectors.stores.memory import MemoryStore
from spm.errors import StoreError, StoreTimeoutError, StoreUnavailableError
from spm.fault_plan import FaultKind, FaultPlan, FaultsConfig
from tests.clock import FakeClock

SIZE = 1000
KEYS = [StoreKey(f"key-{at}") for at in range(8)]
LATER_S = 100.0


class Trial:
    """A store in memory with faults put into it."""

    def __init__(self, *kinds: FaultKind, share: float = 1.0, **more: float) -> None:
        self.pool = BufferPool(1_000_000)
        self.clock = FakeClock()
        self.inner = MemoryStore(self.pool, 500_000)
        names = ",".join(kind.value for kind in kinds)
        config = FaultsConfig(seed=3, kinds=names, share=share, **more)
        self.store = FaultyStore(
            self.inner, FaultPlan(config), self.pool, self.clock, self.pass_time
        )

    def pass_time(self, seconds: float) -> None:
        self.clock.now_s += seconds

    def put(self, store: KVStore | None = None) -> list[bool]:
        items = [(key, self._filled(at)) for at, key in enumerate(KEYS)]
        try:
            return (store or self.store).put_many(items, self.clock() + LATER_S)
        finally:
            for _, buffer in items:
                buffer.release()

    def get(self, keys: list[StoreKey] = KEYS) -> list[bytes | None]:
        reads = [ReadRequest(key, SIZE) for key in keys]
        found = self.store.get_many(reads, self.clock() + LATER_S)
        values = [None if buffer is None else bytes(buffer.view) for buffer in found]
        for buffer in found:
            if buffer is not None:
                buffer.release()
        return values

    def _filled(self, at: int) -> Buffer:
        buffer = self.pool.acquire(SIZE)
        assert buffer is not None
        buffer.view[:] = bytes([at]) * SIZE
        return buffer

    def assert_nothing_left(self) -> None:
        self.store.check_integrity()
        self.store.close()
        assert self.pool.used_bytes == 0


def value(at: int) -> bytes:
    return bytes([at]) * SIZE


@pytest.fixture
def filled(request: pytest.FixtureRequest) -> Iterator[Trial]:
    trial = Trial(request.param)
    trial.put(trial.inner)
    yield trial
    trial.assert_nothing_left()


def with_fault(kind: FaultKind) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("filled", [kind], indirect=True, ids=[kind.value])


@with_fault(FaultKind.DELAY)
def test_a_delay_takes_time_and_works(filled: Trial) -> None:
    before_s = filled.clock()
    assert filled.get() == [value(at) for at in range(8)]
    assert 0 < filled.clock() - before_s < 0.1


@with_fault(FaultKind.HANG)
def test_a_hang_ends_at_the_deadline(filled: Trial) -> None:
    before_s = filled.clock()
    with pytest.raises(StoreTimeoutError):
        filled.get()
    assert filled.clock() - before_s == LATER_S


@with_fault(FaultKind.ERROR)
def test_an_error_comes_at_once(filled: Trial) -> None:
    for call in (filled.get, filled.put):
        with pytest.raises(StoreUnavailableError):
            call()


@with_fault(FaultKind.DISCONNECT)
def test_a_broken_connection_leaves_a_beginning(filled: Trial) -> None:
    lengths = set()
    for _ in range(60):
        try:
            values = filled.get()
        except StoreUnavailableError:
            lengths.add(0)
            continue
        arrived = [at for at, one in enumerate(values) if one is not None]
        assert values[: len(arrived)] == [value(at) for at in arrived]
        lengths.add(len(arrived))
    assert lengths == set(range(8))


@with_fault(FaultKind.SHORT_READ)
def test_a_short_read_is_shorter(filled: Trial) -> None:
    assert filled.get() == [value(at)[: SIZE // 2] for at in range(8)]


@with_fault(FaultKind.FLIPPED_BIT)
def test_one_bit_is_changed_in_what_is_read_and_not_in_what_is_kept(filled: Trial) -> None:
    for at, one in enumerate(filled.get()):
        assert one is not None
        different = int.from_bytes(one, "big") ^ int.from_bytes(value(at), "big")
        assert different.bit_count() == 1
    (kept,) = filled.inner.get_many([ReadRequest(KEYS[1], SIZE)])
    assert kept is not None
    assert bytes(kept.view) == value(1)
    kept.release()


def test_a_lost_write_is_acknowledged() -> None:
    trial = Trial(FaultKind.LOST_WRITE)
    assert trial.put() == [True] * 8
    assert trial.get() == [None] * 8
    trial.assert_nothing_left()


@with_fault(FaultKind.EVICTION)
def test_what_is_evicted_was_there_a_moment_ago(filled: Trial) -> None:
    assert filled.store.contains_many(KEYS, LATER_S) == [True] * 8
    assert filled.get() == [None] * 8
    assert filled.store.contains_many(KEYS, LATER_S) == [False] * 8


@pytest.mark.parametrize("kind", [FaultKind.OUT_OF_MEMORY, FaultKind.READ_ONLY])
def test_writes_are_refused_and_reads_are_not(kind: FaultKind) -> None:
    trial = Trial(kind)
    trial.put(trial.inner)
    assert trial.put() == [False] * 8
    assert trial.get() == [value(at) for at in range(8)]
    name = StoreKey("document")
    assert not trial.store.put_document(name, b"text", 60, LATER_S)
    assert trial.store.append_stream(name, [b"entry"], 10, LATER_S) == 0
    assert trial.store.touch_many(KEYS, LATER_S) == [True] * 8
    deleted = 0 if kind is FaultKind.READ_ONLY else 8
    assert trial.store.delete_many(KEYS, LATER_S) == deleted
    trial.assert_nothing_left()


def test_a_slow_start_ends() -> None:
    trial = Trial(share=0.0, slow_start_s=5.0)
    with pytest.raises(StoreUnavailableError):
        trial.put()
    trial.pass_time(5.0)
    assert trial.put() == [True] * 8
    trial.assert_nothing_left()


@given(seed=st.integers(0, 10**6), share=st.floats(0, 1))
@settings(max_examples=60)
def test_whatever_is_mixed_a_read_is_right_damaged_or_missing(seed: int, share: float) -> None:
    """Positions never shift, only ``StoreError`` is raised, and no buffer is left behind."""
    trial = Trial()
    trial.store = FaultyStore(
        trial.inner,
        FaultPlan(FaultsConfig(seed=seed, share=share)),
        trial.pool,
        trial.clock,
        trial.pass_time,
    )
    for _ in range(5):
        try:
            trial.put()
            values = trial.get()
        except StoreError:
            continue
        for at, one in enumerate(values):
            if one is not None:
                near = sum(byte != at for byte in one)
                assert near <= 1
                assert len(one) in (SIZE, SIZE // 2)
    trial.assert_nothing_left()


def test_settings_put_them_into_any_kind_of_store() -> None:
    pool = BufferPool(10_000)
    store = create_remote_store(
        "memory",
        pool=pool,
        url="memory://",
        connect_timeout_s=1.0,
        ttl_s=None,
        faults=FaultsConfig(kinds="error", share=1.0),
    )
    with pytest.raises(StoreUnavailableError):
        store.contains_many([KEYS[0]], LATER_S)
    store.close()
