"""TtlWheel by example, and against a plain dict of deadlines."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tracker.errors import IntegrityError
from tracker.ttl_wheel import DEFAULT_SLOTS, TtlWheel


class FakeClock:
    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000.25)


def test_expires_at_the_deadline_rounded_up_to_the_tick(clock: FakeClock) -> None:
    wheel: TtlWheel[str] = TtlWheel(clock)
    wheel.register("a", 2.5)
    assert wheel.deadline_s("a") == 1002.75
    clock.now_s = 1002.99
    assert wheel.advance() == []
    assert "a" in wheel
    clock.now_s = 1003.0
    assert wheel.advance() == ["a"]
    assert "a" not in wheel
    assert wheel.deadline_s("a") is None
    assert wheel.advance() == []


def test_a_deadline_on_the_tick_is_due_on_that_tick() -> None:
    clock = FakeClock(1000.0)
    wheel: TtlWheel[str] = TtlWheel(clock)
    wheel.register("a", 3)
    clock.now_s = math.nextafter(1003.0, 0)
    assert wheel.advance() == []
    clock.now_s = 1003.0
    assert wheel.advance() == ["a"]


def test_default_turn_is_an_hour_and_longer_deadlines_wait_their_turn(clock: FakeClock) -> None:
    assert DEFAULT_SLOTS == 3600
    wheel: TtlWheel[str] = TtlWheel(clock)
    wheel.register("one hour", 3600)
    wheel.register("same slot, three turns on", 3 * 3600)
    clock.now_s += 3601
    assert wheel.advance() == ["one hour"]
    clock.now_s += 3600
    assert wheel.advance() == []
    clock.now_s += 3600
    assert wheel.advance() == ["same slot, three turns on"]


def test_many_skipped_turns_return_everything_due_once(clock: FakeClock) -> None:
    wheel: TtlWheel[int] = TtlWheel(clock, slots=8)
    for ttl_s in range(1, 101):
        wheel.register(ttl_s, ttl_s)
    clock.now_s += 90.75
    assert sorted(wheel.advance()) == list(range(1, 91))
    assert len(wheel) == 10
    clock.now_s += 1000
    assert sorted(wheel.advance()) == list(range(91, 101))
    wheel.check_integrity()


def test_register_twice_is_a_refresh(clock: FakeClock) -> None:
    wheel: TtlWheel[str] = TtlWheel(clock, slots=4)
    wheel.register("a", 2)
    wheel.register("a", 5)
    assert len(wheel) == 1
    clock.now_s += 4
    assert wheel.advance() == []
    clock.now_s += 4
    assert wheel.advance() == ["a"]


def test_refresh_moves_known_entries_only(clock: FakeClock) -> None:
    wheel: TtlWheel[str] = TtlWheel(clock)
    assert not wheel.refresh("a", 5)
    assert len(wheel) == 0
    wheel.register("a", 5)
    assert wheel.refresh("a", 1)
    clock.now_s += 2
    assert wheel.advance() == ["a"]


def test_removed_entries_never_expire(clock: FakeClock) -> None:
    wheel: TtlWheel[str] = TtlWheel(clock)
    wheel.register("a", 1)
    assert wheel.remove("a")
    assert not wheel.remove("a")
    clock.now_s += 10
    assert wheel.advance() == []


def test_beyond_a_limit_the_rest_waits_for_the_next_advance(clock: FakeClock) -> None:
    wheel: TtlWheel[int] = TtlWheel(clock)
    for entry in range(10):
        wheel.register(entry, 5.0)
    clock.now_s += 6.0
    first = wheel.advance(4)
    wheel.register(next(iter(set(range(10)) - set(first))), 100.0)
    wheel.check_integrity()
    assert (len(first), len(wheel.advance(4)), len(wheel.advance(4))) == (4, 4, 1)
    assert len(wheel) == 1
    wheel.check_integrity()


def test_what_waits_beyond_a_limit_goes_before_what_became_due_later(clock: FakeClock) -> None:
    wheel: TtlWheel[int] = TtlWheel(clock)
    for entry in range(100):
        wheel.register(entry, 5.0 if entry < 50 else 7.0)
    clock.now_s += 6.0
    expired = wheel.advance(16)
    clock.now_s += 2.0
    while batch := wheel.advance(16):
        expired += batch
    assert set(expired[:50]) == set(range(50))
    assert set(expired[50:]) == set(range(50, 100))
    wheel.check_integrity()


def test_what_waits_beyond_a_limit_after_several_turns_can_be_removed() -> None:
    clock = FakeClock(100.0)
    wheel: TtlWheel[str] = TtlWheel(clock, slots=7)
    for entry, ttl_s in (("first", 1.0), ("a turn later", 8.0), ("in another slot", 3.0)):
        wheel.register(entry, ttl_s)
    clock.now_s += 30.0
    assert len(wheel.advance(1)) == 1
    wheel.check_integrity()
    wheel.register("in another slot", 2.0)
    for entry in ("first", "a turn later"):
        wheel.remove(entry)
    wheel.check_integrity()
    assert wheel.advance() == []
    clock.now_s += 2.0
    assert wheel.advance() == ["in another slot"]


@pytest.mark.parametrize("ttl_s", [0.0, -5.0])
def test_a_ttl_of_zero_or_less_is_due_at_once(ttl_s: float) -> None:
    clock = FakeClock(1000.0)
    wheel: TtlWheel[str] = TtlWheel(clock)
    wheel.register("gone again", ttl_s)
    assert wheel.remove("gone again")
    wheel.register("a", ttl_s)
    assert wheel.advance() == ["a"]


@pytest.mark.parametrize("ttl_s", [math.nan, math.inf, -math.inf])
def test_a_ttl_that_is_not_finite_is_refused_and_changes_nothing(ttl_s: float) -> None:
    clock = FakeClock()
    wheel: TtlWheel[str] = TtlWheel(clock)
    wheel.register("a", 5)
    with pytest.raises(ValueError, match="finite"):
        wheel.register("a", ttl_s)
    assert wheel.deadline_s("a") == 1005.0


def test_a_wheel_without_slots_is_refused(clock: FakeClock) -> None:
    with pytest.raises(ValueError, match="slots"):
        TtlWheel[str](clock, slots=0)


def test_advance_touches_only_elapsed_slots(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    visited: list[int] = []
    take_due = TtlWheel._take_due

    def spy(wheel: TtlWheel[str], slot_index: int, now_tick: int) -> list[str]:
        visited.append(slot_index)
        return take_due(wheel, slot_index, now_tick)

    monkeypatch.setattr(TtlWheel, "_take_due", spy)
    wheel: TtlWheel[str] = TtlWheel(clock)
    clock.now_s = 1003.5
    wheel.advance()
    assert visited == [1001, 1002, 1003]
    visited.clear()
    wheel.advance()
    assert visited == []
    clock.now_s += 1_000_000
    wheel.advance()
    assert sorted(visited) == list(range(DEFAULT_SLOTS))


def test_check_integrity_sees_lost_and_misplaced_entries(clock: FakeClock) -> None:
    wheel: TtlWheel[str] = TtlWheel(clock)
    wheel.register("a", 5)
    wheel._deadlines_s["a"] += 10
    with pytest.raises(IntegrityError, match="wrong slot"):
        wheel.check_integrity()
    del wheel._deadlines_s["a"]
    with pytest.raises(IntegrityError, match="1 entries placed, 0 deadlines"):
        wheel.check_integrity()


ENTRIES = st.integers(0, 9)
TTLS_S = st.one_of(st.integers(0, 12), st.floats(0, 60), st.sampled_from([7.0, 14.0, 70.0]))


class WheelMachine(RuleBasedStateMachine):
    """A wheel of seven slots, so a few seconds already are several turns."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock(100.5)
        self.wheel: TtlWheel[int] = TtlWheel(self.clock, slots=7)
        self.deadlines_s: dict[int, float] = {}

    @rule(entry=ENTRIES, ttl_s=TTLS_S)
    def register(self, entry: int, ttl_s: float) -> None:
        self.wheel.register(entry, ttl_s)
        self.deadlines_s[entry] = self.clock.now_s + ttl_s

    @rule(entry=ENTRIES, ttl_s=TTLS_S)
    def refresh(self, entry: int, ttl_s: float) -> None:
        assert self.wheel.refresh(entry, ttl_s) is (entry in self.deadlines_s)
        if entry in self.deadlines_s:
            self.deadlines_s[entry] = self.clock.now_s + ttl_s

    @rule(entry=ENTRIES)
    def remove(self, entry: int) -> None:
        assert self.wheel.remove(entry) is (self.deadlines_s.pop(entry, None) is not None)

    @rule(elapsed_s=st.one_of(st.floats(0, 3), st.sampled_from([1.0, 7.0, 30.0]), st.floats(0, 99)))
    def sleep(self, elapsed_s: float) -> None:
        self.clock.now_s += elapsed_s

    @rule()
    def sleep_to_the_tick(self) -> None:
        self.clock.now_s = math.floor(self.clock.now_s) + 1.0

    @precondition(lambda self: self.deadlines_s)
    @rule()
    def sleep_to_a_deadline(self) -> None:
        self.clock.now_s = max(self.clock.now_s, min(self.deadlines_s.values()))

    @rule()
    def advance(self) -> None:
        now_s = self.clock.now_s
        expired = self.wheel.advance()
        due = {e for e, deadline_s in self.deadlines_s.items() if math.ceil(deadline_s) <= now_s}
        assert len(expired) == len(set(expired))
        assert set(expired) == due
        for entry in due:
            assert self.deadlines_s.pop(entry) <= now_s

    @rule(limit=st.integers(0, 4))
    def advance_a_little(self, limit: int) -> None:
        now_s = self.clock.now_s
        due = {e for e, deadline_s in self.deadlines_s.items() if math.ceil(deadline_s) <= now_s}
        expired = self.wheel.advance(limit)
        assert len(expired) == len(set(expired)) == min(limit, len(due))
        assert set(expired) <= due
        for entry in expired:
            del self.deadlines_s[entry]

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.wheel.check_integrity()
        assert len(self.wheel) == len(self.deadlines_s)
        for entry in range(10):
            assert (entry in self.wheel) is (entry in self.deadlines_s)
            assert self.wheel.deadline_s(entry) == self.deadlines_s.get(entry)


TestWheelMachine = WheelMachine.TestCase
TestWheelMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
