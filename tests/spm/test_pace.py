"""Pace: no more than so many a second, whatever the batches, and time is not saved up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spm.pace import Pace


@given(st.lists(st.tuples(st.integers(0, 500), st.floats(0, 5)), min_size=1, max_size=50))
def test_no_more_than_the_rate_and_one_batch(batches: list[tuple[int, float]]) -> None:
    pace, now_s, spent = Pace(100.0), 1000.0, 0
    for count, pause_s in batches:
        now_s = max(now_s + pause_s, pace.ready_s)
        assert spent <= 100 * (now_s - 1000.0) + 1e-6, "all before was paid for"
        pace.spend(count, now_s)
        spent += count


def test_time_not_used_is_lost() -> None:
    pace = Pace(100.0)
    pace.spend(100, 0.0)
    pace.spend(100, 50.0)
    assert pace.ready_s == 51.0


def test_what_was_done_is_measured_and_forgotten_again() -> None:
    pace = Pace(1e9)
    for second in range(30):
        pace.spend(50, float(second))
    assert pace.measured_per_s(30.0) == pytest.approx(50, rel=0.1)
    pace.measured_per_s(45.0)
    assert pace.measured_per_s(60.0) == 0
