"""KeepAliveRing: every held key comes round once an interval, evenly, whatever happens."""

import gc
import math
import tracemalloc
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from spm.errors import IntegrityError
from spm.keepalive import KeepAliveRing
from tracker.ids import BlockHash, BlockKey, GroupId, make_block_key

START_S = 1000.0
FOREVER_S = math.inf
A, B, C = (BlockKey(name) for name in (b"a", b"b", b"c"))


def keys_of(count: int) -> list[BlockKey]:
    hashes = (BlockHash(at.to_bytes(32, "big")) for at in range(count))
    return [make_block_key(block_hash, GroupId(0)) for block_hash in hashes]


def ring_of(*keys: BlockKey, interval_s: float = 10.0, slots: int = 8) -> KeepAliveRing:
    ring = KeepAliveRing(interval_s, 100_000, slots)
    ring.hold(keys, FOREVER_S)
    return ring


def drain(ring: KeepAliveRing, now_s: float, limit: int = 1000) -> list[BlockKey]:
    """All that is due."""
    taken: list[BlockKey] = []
    while ring.next_due_s(now_s) <= now_s:
        taken += [key for key, _ in ring.take(now_s, limit)]
    return taken


def test_every_key_comes_once_an_interval_and_evenly() -> None:
    keys = keys_of(10_000)
    ring = ring_of(*keys, interval_s=100.0, slots=1024)
    ring.take(START_S, 1)
    for turn in range(3):
        by_second = [drain(ring, START_S + 100 * turn + second) for second in range(1, 101)]
        counts = Counter(key for taken in by_second for key in taken)
        assert len(counts) >= 9_980  # slots at the edge may have their turn a second later
        assert set(counts.values()) <= {1, 2}
        assert max(map(len, by_second)) < 200, "a hundred a second"
        assert ring.behind_s(START_S + 100 * (turn + 1)) == 0


def test_a_key_is_held_until_the_latest_of_its_holds() -> None:
    ring = ring_of()
    assert ring.hold([A, B], 20.0) == 2
    assert ring.hold([A], 50.0) == 1
    assert ring.hold([A], 30.0) == 1
    assert (ring.until_s(A), ring.until_s(B), ring.until_s(C)) == (50.0, 20.0, None)
    assert len(ring) == 2


def test_dropped_keys_are_gone_at_once() -> None:
    ring = ring_of(A, B)
    assert ring.drop([A, C]) == 1
    assert A not in ring
    assert (B in ring, len(ring)) == (True, 1)
    ring.take(0.0, 1)
    assert drain(ring, 10.0) == [B]


def test_keys_leave_when_their_time_has_passed() -> None:
    ring = ring_of(A)
    ring.hold([B], 15.0)
    ring.take(0.0, 1)
    assert set(drain(ring, 10.0)) == {A, B}
    assert drain(ring, 20.0) == [A]
    assert len(ring) == 1


def test_over_its_bound_new_keys_are_refused_and_known_ones_renewed() -> None:
    ring = KeepAliveRing(10.0, 2)
    assert ring.hold([A, B, C], 20.0) == 2
    assert ring.hold([A, B, C], 30.0) == 2
    assert (ring.until_s(A), ring.until_s(C)) == (30.0, None)
    ring.drop([A])
    assert ring.hold([C], 30.0) == 1


def test_a_capped_rate_makes_it_late_by_what_is_missing() -> None:
    ring = ring_of(*keys_of(2_000), interval_s=10.0, slots=100)
    now_s = START_S
    for _ in range(10 * 400):  # 100 keys a second: a turn takes twice the interval
        ring.take(now_s, 10)
        now_s += 0.1
    assert ring.behind_s(now_s) == pytest.approx(10.0, abs=0.5)
    assert ring.next_due_s(now_s) <= now_s


def test_after_a_long_silence_one_turn_is_owed_and_then_it_is_even_again() -> None:
    keys = keys_of(1_000)
    ring = ring_of(*keys, interval_s=10.0, slots=100)
    drain(ring, START_S)
    now_s = START_S + 5_000
    assert ring.behind_s(now_s) > 4_900
    assert sorted(drain(ring, now_s)) == keys
    assert ring.behind_s(now_s) == 0
    assert max(len(drain(ring, now_s + second)) for second in range(1, 10)) < 200


def test_a_ring_that_was_empty_starts_over() -> None:
    ring = ring_of(*keys_of(100))
    ring.take(START_S, 1)
    ring.drop(keys_of(100))
    assert ring.next_due_s(START_S) == math.inf
    now_s = START_S + 1e6
    ring.hold(keys_of(100), FOREVER_S)
    assert ring.behind_s(now_s) == 0
    assert len(drain(ring, now_s)) < 50, "not all at once"
    assert len(set(drain(ring, now_s + 10.0))) > 50


def test_mass_expiry_is_spread_over_calls() -> None:
    keys = keys_of(10_000)
    ring = KeepAliveRing(10.0, 10_000, slots=4)
    ring.hold(keys, START_S + 1)
    now_s, calls = START_S + 20, 0
    ring.take(now_s - 10, 100)
    while ring.next_due_s(now_s) <= now_s:
        before = len(ring)
        assert ring.take(now_s, 100) == []
        assert before - len(ring) <= 100
        calls += 1
    assert calls >= 99
    assert len(ring) == 0


def test_what_makes_no_sense_is_refused() -> None:
    for interval_s, max_keys, slots in [(0.0, 1, 1), (1.0, 0, 1), (1.0, 1, 0)]:
        with pytest.raises(ValueError, match="must be positive"):
            KeepAliveRing(interval_s, max_keys, slots)
    with pytest.raises(ValueError, match="NaN"):
        ring_of().hold([A], math.nan)


def test_check_integrity_sees_lost_and_misplaced_keys() -> None:
    ring = ring_of(*keys_of(50))
    ring._size += 1
    with pytest.raises(IntegrityError, match="51 keys counted, 50 held"):
        ring.check_integrity()
    ring._size -= 1
    ring._slots.reverse()
    with pytest.raises(IntegrityError, match="another slot"):
        ring.check_integrity()


@pytest.fixture
def traced() -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
def test_a_key_takes_at_most_250_bytes_however_many_hold_it() -> None:
    keys = keys_of(60_000)
    before = tracemalloc.get_traced_memory()[0]
    ring = KeepAliveRing(30.0, 60_000)
    for session in range(3):
        for at, key in enumerate(keys):
            ring.hold([key], START_S + 1000.5 + at + session)  # an instant of its own each
    for second in range(45):
        drain(ring, START_S + second)
    gc.collect()
    assert (tracemalloc.get_traced_memory()[0] - before) / len(keys) <= 125


KEYS = st.lists(st.sampled_from(keys_of(12)), max_size=6)


class RingMachine(RuleBasedStateMachine):
    """Four slots and twelve keys, so that slots are shared and turns are short."""

    INTERVAL_S = 8.0

    def __init__(self) -> None:
        super().__init__()
        self.now_s = START_S
        self.ring = KeepAliveRing(self.INTERVAL_S, max_keys=10, slots=4)
        self.until_s: dict[BlockKey, float] = {}
        self.since_s: dict[BlockKey, float] = {}
        """When each was last taken, or when it came."""
        self.waits_for_a_start = True
        self.drained_s: list[float] = []

    @rule(keys=KEYS, ttl_s=st.floats(-3, 60))
    def hold(self, keys: list[BlockKey], ttl_s: float) -> None:
        held = 0
        for key in keys:
            if key not in self.until_s:
                if len(self.until_s) >= 10:
                    continue
                self.waits_for_a_start |= not self.until_s
                self.since_s[key] = self.now_s
            self.until_s[key] = max(self.now_s + ttl_s, self.until_s.get(key, 0.0))
            held += 1
        assert self.ring.hold(keys, self.now_s + ttl_s) == held

    @rule(keys=KEYS)
    def drop(self, keys: list[BlockKey]) -> None:
        dropped = sum(self.forget(key) for key in keys)
        assert self.ring.drop(keys) == dropped

    @rule()
    def clear(self) -> None:
        self.ring.clear()
        self.until_s.clear()

    @rule(limit=st.integers(0, 12))
    def take(self, limit: int) -> None:
        if self.until_s and self.waits_for_a_start:
            self.waits_for_a_start = False
            self.since_s = dict.fromkeys(self.since_s, self.now_s)
        before = len(self.ring)
        taken = self.ring.take(self.now_s, limit)
        keys = [key for key, _ in taken]
        assert len(set(keys)) == len(keys)
        assert len(keys) + before - len(self.ring) <= max(1, limit)
        for key, until_s in taken:
            assert until_s == self.until_s[key] > self.now_s
            self.since_s[key] = self.now_s
        for key in [key for key in self.until_s if key not in self.ring]:
            assert self.until_s[key] <= self.now_s, "left before its time"
            self.forget(key)

    @rule(limit=st.integers(1, 5))
    def take_all_that_is_due(self, limit: int) -> None:
        self.take(limit)
        while self.ring.next_due_s(self.now_s) <= self.now_s:
            self.take(limit)
        assert self.ring.behind_s(self.now_s) == 0
        # What a limited call took of a slot, before a silence, waits for that slot's next turn.
        slot_s = self.INTERVAL_S / 4
        before_s = max((at for at in self.drained_s if at <= self.now_s - slot_s), default=0.0)
        for key in self.until_s:
            oldest_s = min(self.now_s - self.INTERVAL_S - 1e-6, before_s)
            assert self.since_s[key] >= oldest_s, "left out"
        self.drained_s.append(self.now_s)

    @rule(elapsed_s=st.floats(0, 3) | st.sampled_from([2.0, 8.0, 100.0]))
    def sleep(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s

    @rule()
    def sleep_until_something_is_due(self) -> None:
        due_s = self.ring.next_due_s(self.now_s)
        if due_s < math.inf:
            self.now_s = max(self.now_s, due_s)
            assert self.ring.behind_s(self.now_s) >= 0

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.ring.check_integrity()
        assert len(self.ring) == len(self.until_s)
        for key in keys_of(12):
            assert self.ring.until_s(key) == self.until_s.get(key)

    def forget(self, key: BlockKey) -> bool:
        return self.until_s.pop(key, None) is not None


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
