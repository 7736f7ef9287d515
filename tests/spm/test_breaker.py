"""The circuit breaker, on a clock that only moves when told."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spm.breaker import BreakerState, CircuitBreaker
from tests.clock import FakeClock


def highest() -> float:
    """No jitter: every pause has its full length."""
    return 1.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def make(clock: FakeClock, uniform: Callable[[], float] = highest) -> CircuitBreaker:
    return CircuitBreaker(
        failures=3, backoff_s=1.0, backoff_cap_s=5.0, clock=clock, uniform=uniform
    )


def state_of(breaker: CircuitBreaker) -> str:
    return breaker.state.value


def fail(breaker: CircuitBreaker, times: int) -> None:
    for _ in range(times):
        assert breaker.allow()
        breaker.record_failure()


def test_only_consecutive_failures_open_it(clock: FakeClock) -> None:
    breaker = make(clock)
    fail(breaker, 2)
    breaker.record_success()
    fail(breaker, 2)
    assert state_of(breaker) == "closed"
    fail(breaker, 1)
    assert state_of(breaker) == "open"
    assert not breaker.allow()


def test_one_probe_is_admitted_and_its_success_closes(clock: FakeClock) -> None:
    breaker = make(clock)
    fail(breaker, 3)
    clock.now_s += 0.99
    assert not breaker.allow()
    clock.now_s += 0.01
    assert breaker.allow()
    assert state_of(breaker) == "half_open"
    assert not breaker.allow()
    breaker.record_success()
    assert state_of(breaker) == "closed"
    fail(breaker, 3)
    clock.now_s += 1.0
    assert breaker.allow(), "the backoff starts over after a success"


def test_pauses_double_up_to_the_cap(clock: FakeClock) -> None:
    breaker = make(clock)
    fail(breaker, 3)
    pauses: list[float] = []
    while len(pauses) < 6:
        start_s = clock.now_s
        while not breaker.allow():
            clock.now_s += 0.25
        pauses.append(clock.now_s - start_s)
        breaker.record_failure()
    assert pauses == [1.0, 4.0, 5.0, 5.0, 5.0, 5.0]


def test_a_lost_probe_is_replaced(clock: FakeClock) -> None:
    breaker = make(clock)
    fail(breaker, 3)
    clock.now_s += 1.0
    assert breaker.allow()
    clock.now_s += 1.9
    assert not breaker.allow()
    clock.now_s += 0.1
    assert breaker.allow()
    assert not breaker.allow()


def test_late_reports_do_not_move_an_open_breaker(clock: FakeClock) -> None:
    breaker = make(clock)
    fail(breaker, 3)
    breaker.record_success()
    breaker.record_failure()
    assert state_of(breaker) == "open"
    clock.now_s += 1.0
    assert breaker.allow()


def test_jitter_shortens_pauses_by_at_most_half(clock: FakeClock) -> None:
    breaker = make(clock, uniform=lambda: 0.0)
    fail(breaker, 3)
    clock.now_s += 0.49
    assert not breaker.allow()
    clock.now_s += 0.01
    assert breaker.allow()


def test_many_pauses_do_not_overflow(clock: FakeClock) -> None:
    breaker = make(clock)
    fail(breaker, 3)
    for _ in range(3000):
        clock.now_s += 5.0
        assert breaker.allow()
        breaker.record_failure()


@given(st.lists(st.sampled_from(["allow", "ok", "fail", "wait"]), max_size=60))
def test_never_stuck_and_never_a_crowd(steps: list[str]) -> None:
    clock = FakeClock()
    breaker = make(clock)
    for step in steps:
        before = breaker.state
        if step == "wait":
            clock.now_s += 0.4
        elif step == "ok":
            breaker.record_success()
        elif step == "fail":
            breaker.record_failure()
        elif breaker.allow() and before is not BreakerState.CLOSED:
            assert state_of(breaker) == "half_open"
            assert not breaker.allow()
    clock.now_s += 5.0
    assert breaker.allow()
    breaker.record_success()
    assert state_of(breaker) == "closed"


def test_tripping_opens_at_once_and_a_probe_follows_after_the_pause(clock: FakeClock) -> None:
    breaker = make(clock)
    breaker.record_success()
    breaker.trip()
    assert not breaker.allow()
    breaker.trip()
    clock.now_s += 1.0
    assert breaker.allow(), "a second trip while open does not prolong the pause"
