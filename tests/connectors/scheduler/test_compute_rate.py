"""The compute rate follows steps from their start to their end, however many are under way."""

import pytest

from connectors.scheduler.compute_rate import ComputeRate
from tests.clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def step(rate: ComputeRate, clock: FakeClock, num_tokens: int, seconds: float) -> None:
    rate.note_step(num_tokens)
    clock.now_s += seconds
    rate.note_end()


def test_nothing_is_known_before_a_prompt_was_computed(clock: FakeClock) -> None:
    rate = ComputeRate(clock)
    step(rate, clock, 16, 0.01)
    assert rate.seconds_for(1000) is None
    step(rate, clock, 1000, 0.5)
    assert rate.seconds_for(4000) == pytest.approx(2.0)


def test_steps_scheduled_ahead_are_not_taken_for_fast_ones(clock: FakeClock) -> None:
    """Catches measuring from one scheduling to the next: with asynchronous scheduling the
    second step is scheduled a moment after the first."""
    rate = ComputeRate(clock)
    rate.note_step(1000)
    clock.now_s += 0.001
    rate.note_step(1000)
    for _ in range(10):
        clock.now_s += 0.5
        rate.note_end()
        rate.note_step(1000)
    assert rate.seconds_for(1000) == pytest.approx(0.5, rel=0.01)


def test_time_without_steps_counts_for_none(clock: FakeClock) -> None:
    rate = ComputeRate(clock)
    step(rate, clock, 1000, 0.5)
    clock.now_s += 30.0
    step(rate, clock, 1000, 0.5)
    assert rate.seconds_for(1000) == pytest.approx(0.5)


def test_an_end_of_an_unknown_step_and_one_that_hung_say_nothing(clock: FakeClock) -> None:
    rate = ComputeRate(clock)
    rate.note_end()
    step(rate, clock, 1000, 100.0)
    assert rate.seconds_for(1) is None


def test_what_running_requests_have_left_comes_first(clock: FakeClock) -> None:
    rate = ComputeRate(clock)
    step(rate, clock, 1000, 1.0)
    rate.backlog_tokens = 3000
    assert rate.seconds_until(1000) == pytest.approx(4.0)
