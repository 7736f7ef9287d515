"""Retain, offload or drop: the boundaries of the rule, and what never happens."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spm.auto_policy import (
    AMPLE_FREE_SHARE,
    UNKNOWN_GAP_PRESSURE,
    AutoAction,
    IdleSession,
    decide,
)

RETAIN, OFFLOAD, DROP = AutoAction
GIB = 2**30

FULL = IdleSession(
    expected_gap_s=10.0,
    kv_bytes=GIB,
    stored_bytes=GIB,
    load_bytes_per_s=4.0 * GIB,
    recompute_s=None,
    free_share=0.0,
    pool_bytes=40 * GIB,
)
"""Pressure 1, everything stored, so that gap x bandwidth is just the pool: break-even."""


def action(session: IdleSession) -> AutoAction:
    return decide(session).action


def test_break_even_is_where_gap_times_bandwidth_is_the_pool() -> None:
    decision = decide(FULL)
    assert decision.hold_s == decision.move_s == decision.reload_s == 0.25
    assert decision.pressure == 1.0
    assert decision.action is RETAIN
    assert action(replace(FULL, expected_gap_s=10.01)) is OFFLOAD
    assert action(replace(FULL, load_bytes_per_s=4.01 * GIB)) is OFFLOAD
    assert action(replace(FULL, pool_bytes=39 * GIB)) is OFFLOAD
    assert action(replace(FULL, expected_gap_s=9.99)) is RETAIN


@given(st.integers(1, 40 * GIB))
def test_the_size_of_a_stored_session_is_of_no_account(kv_bytes: int) -> None:
    session = replace(FULL, kv_bytes=kv_bytes, stored_bytes=kv_bytes)
    assert action(replace(session, expected_gap_s=9.99)) is RETAIN
    assert action(replace(session, expected_gap_s=10.01)) is OFFLOAD


def test_what_is_not_stored_yet_has_to_be_moved_twice() -> None:
    unstored = replace(FULL, stored_bytes=0, expected_gap_s=19.99)
    assert decide(unstored).move_s == 0.5
    assert action(unstored) is RETAIN
    assert action(replace(unstored, expected_gap_s=20.01)) is OFFLOAD
    assert action(replace(unstored, stored_bytes=GIB)) is OFFLOAD


def test_half_the_pressure_doubles_the_break_even() -> None:
    half = replace(FULL, free_share=AMPLE_FREE_SHARE / 2)
    assert decide(half).pressure == 0.5
    assert action(replace(half, expected_gap_s=19.99)) is RETAIN
    assert action(replace(half, expected_gap_s=20.01)) is OFFLOAD


def test_without_pressure_holding_is_free() -> None:
    session = replace(FULL, free_share=AMPLE_FREE_SHARE, recompute_s=0.0)
    for gap_s in (1e9, None):
        decision = decide(replace(session, expected_gap_s=gap_s))
        assert decision.action is RETAIN
        assert "No pressure" in decision.reason


def test_an_unknown_return_is_decided_by_pressure_alone() -> None:
    share = AMPLE_FREE_SHARE * (1 - UNKNOWN_GAP_PRESSURE)
    unknown = replace(FULL, expected_gap_s=None, free_share=share)
    assert action(unknown) is OFFLOAD
    assert action(replace(unknown, free_share=share + 0.001)) is RETAIN
    assert action(replace(unknown, recompute_s=0.01)) is DROP
    assert action(replace(unknown, recompute_s=0.01, free_share=share + 0.001)) is RETAIN
    assert decide(unknown).hold_s is None


def test_dropped_only_if_computing_beats_reloading() -> None:
    late = replace(FULL, expected_gap_s=100.0)
    assert action(replace(late, recompute_s=0.25)) is OFFLOAD
    assert action(replace(late, recompute_s=0.249)) is DROP
    assert action(replace(late, recompute_s=None)) is OFFLOAD
    soon = replace(FULL, expected_gap_s=4.0)
    assert action(replace(soon, recompute_s=0.1)) is RETAIN
    assert action(replace(soon, recompute_s=0.099)) is DROP


def test_with_nowhere_to_go_it_stays() -> None:
    decision = decide(replace(FULL, load_bytes_per_s=None, expected_gap_s=1e9, recompute_s=0.0))
    assert decision.action is RETAIN
    assert decision.move_s is decision.reload_s is None


def test_a_session_without_blocks_stays() -> None:
    assert action(replace(FULL, kv_bytes=0, stored_bytes=0, expected_gap_s=None)) is RETAIN


def test_the_reason_is_a_sentence_with_the_numbers() -> None:
    reason = decide(replace(FULL, expected_gap_s=100.0)).reason
    assert reason == (
        "Holding it for 100 s costs others 2.5 s of the pool; "
        "moving it out and back costs 0.25 s at pressure 1.00, which is less."
    )


SESSIONS = st.builds(
    lambda stored, kv, **rest: IdleSession(kv_bytes=kv, stored_bytes=min(stored, kv), **rest),
    stored=st.integers(0, 2**40),
    kv=st.integers(0, 2**40),
    expected_gap_s=st.none() | st.floats(0, 1e9),
    load_bytes_per_s=st.none() | st.floats(1.0, 1e12),
    recompute_s=st.none() | st.floats(0, 1e6),
    free_share=st.floats(0, 1) | st.floats(0, AMPLE_FREE_SHARE),
    pool_bytes=st.integers(1, 2**42),
)


def never_back_to_retain(session: IdleSession, more: IdleSession) -> None:
    if action(session) is not RETAIN:
        assert action(more) is action(session)


@given(SESSIONS, st.floats(0, 1e9))
def test_a_longer_gap_never_turns_leaving_into_staying(session: IdleSession, by_s: float) -> None:
    if session.expected_gap_s is not None:
        never_back_to_retain(
            session, replace(session, expected_gap_s=session.expected_gap_s + by_s)
        )


@given(SESSIONS, st.floats(0, 1))
def test_more_pressure_never_turns_leaving_into_staying(session: IdleSession, of: float) -> None:
    never_back_to_retain(session, replace(session, free_share=session.free_share * of))


@given(SESSIONS, st.integers(0, 2**40))
def test_more_stored_never_turns_leaving_into_staying(session: IdleSession, more: int) -> None:
    stored_bytes = min(session.kv_bytes, session.stored_bytes + more)
    never_back_to_retain(session, replace(session, stored_bytes=stored_bytes))


@given(SESSIONS, st.floats(1, 1e6))
def test_a_faster_tier_never_turns_offloading_into_anything_else(
    session: IdleSession, times: float
) -> None:
    if action(session) is OFFLOAD:
        assert session.load_bytes_per_s is not None
        faster = replace(session, load_bytes_per_s=session.load_bytes_per_s * times)
        assert action(faster) is OFFLOAD


@given(SESSIONS)
def test_nothing_is_dropped_without_pressure_or_evidence(session: IdleSession) -> None:
    decision = decide(session)
    assert decision.reason.endswith(".")
    if decision.action is DROP:
        assert decision.pressure > 0
        assert decision.reload_s is not None
        assert session.recompute_s is not None
        assert session.recompute_s < decision.reload_s
    if decision.action is not RETAIN and decision.hold_s is not None:
        leave_s = session.recompute_s if decision.action is DROP else decision.move_s
        assert leave_s is not None
        assert decision.hold_s > leave_s


@pytest.mark.parametrize(
    "bad",
    [
        {"expected_gap_s": -1.0},
        {"expected_gap_s": math.nan},
        {"expected_gap_s": math.inf},
        {"kv_bytes": -1},
        {"stored_bytes": GIB + 1},
        {"load_bytes_per_s": 0.0},
        {"load_bytes_per_s": math.inf},
        {"recompute_s": -1.0},
        {"free_share": 1.1},
        {"free_share": math.nan},
        {"pool_bytes": 0},
    ],
)
def test_numbers_that_make_no_sense_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        replace(FULL, **bad)  # type: ignore[arg-type]
