"""A session's own gaps: averaged, bounded, forgotten."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spm.gaps import NEWEST_WEIGHT, SessionGaps
from tracker.ids import SessionId, SessionRef, TenantId

A, B, C = (SessionRef(TenantId("default"), SessionId(name)) for name in "abc")


@pytest.fixture
def gaps() -> SessionGaps:
    return SessionGaps(max_sessions=2)


def test_a_session_that_never_came_back_is_unknown(gaps: SessionGaps) -> None:
    gaps.note_start(A, 1.0)
    assert gaps.expected_gap_s(A) is None
    gaps.note_end(A, 2.0)
    assert gaps.expected_gap_s(A) is None


def test_gaps_are_averaged(gaps: SessionGaps) -> None:
    gaps.note_end(A, 10.0)
    gaps.note_start(A, 14.0)
    assert gaps.expected_gap_s(A) == 4.0
    gaps.note_end(A, 20.0)
    gaps.note_start(A, 34.0)
    assert gaps.expected_gap_s(A) == pytest.approx(4.0 + NEWEST_WEIGHT * 10.0)
    assert gaps.expected_gap_s(B) is None


def test_only_the_first_arrival_ends_a_gap(gaps: SessionGaps) -> None:
    gaps.note_end(A, 10.0)
    gaps.note_start(A, 14.0)
    gaps.note_start(A, 100.0)
    assert gaps.expected_gap_s(A) == 4.0


def test_a_gap_begins_with_the_last_end(gaps: SessionGaps) -> None:
    gaps.note_end(A, 10.0)
    gaps.note_end(A, 13.0)
    gaps.note_start(A, 14.0)
    assert gaps.expected_gap_s(A) == 1.0


def test_the_least_recently_heard_of_is_forgotten_first(gaps: SessionGaps) -> None:
    for ref in (A, B):
        gaps.note_end(ref, 0.0)
        gaps.note_start(ref, 1.0)
    gaps.note_start(A, 2.0)
    gaps.note_end(C, 3.0)
    assert len(gaps) == 2
    assert gaps.expected_gap_s(A) == 1.0
    assert gaps.expected_gap_s(B) is None


def test_a_session_that_is_over_starts_anew(gaps: SessionGaps) -> None:
    gaps.note_end(A, 0.0)
    gaps.note_start(A, 1.0)
    gaps.forget(A)
    gaps.forget(A)
    assert gaps.expected_gap_s(A) is None
    assert len(gaps) == 0


def test_a_clock_read_out_of_order_gives_no_negative_gap(gaps: SessionGaps) -> None:
    gaps.note_end(A, 5.0)
    gaps.note_start(A, 4.0)
    assert gaps.expected_gap_s(A) == 0.0


def test_the_bound_is_positive() -> None:
    with pytest.raises(ValueError, match="max_sessions"):
        SessionGaps(0)


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_the_average_lies_between_the_extremes(lengths_s: list[float]) -> None:
    gaps, now_s = SessionGaps(1), 0.0
    seen_s = []
    for length_s in lengths_s:
        gaps.note_end(A, now_s)
        seen_s.append(now_s + length_s - now_s)
        now_s += length_s
        gaps.note_start(A, now_s)
    got_s = gaps.expected_gap_s(A)
    assert got_s is not None
    assert min(seen_s) - 1e-6 <= got_s <= max(seen_s) + 1e-6
