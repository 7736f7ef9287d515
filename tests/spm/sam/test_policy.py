"""What a hint means, case by case."""

import pytest

from spm.agent_hint import AgentHint, CacheControl, SessionState
from spm.sam.policy import ASSOCIATED, UNHINTED, Retention, decide, is_protected
from spm.sam.zones import Zone, target_of, target_tick, target_zone, tick_of

TOOL, USER, FINISHED = (
    SessionState.WAITING_TOOL,
    SessionState.WAITING_USER,
    SessionState.FINISHED,
)
SOON_S = 10.0
TTL = CacheControl(60.0)


@pytest.mark.parametrize(
    ("control", "resume_s", "state", "expected"),
    [
        (None, None, None, ASSOCIATED),
        (None, None, FINISHED, Retention(Zone.FINISHED)),
        (TTL, 1.0, FINISHED, Retention(Zone.FINISHED)),
        (TTL, None, None, Retention(Zone.SOON, 60.0)),
        (TTL, None, TOOL, Retention(Zone.SOON, 60.0)),
        (TTL, None, USER, Retention(Zone.LATER, 60.0)),
        (TTL, 10.0, None, Retention(Zone.SOON, 60.0)),
        (TTL, 10.5, None, Retention(Zone.LATER, 60.0)),
        (TTL, 10.5, TOOL, Retention(Zone.LATER, 60.0)),
        (TTL, 0.0, USER, Retention(Zone.SOON, 60.0)),
        (TTL, 80_000.0, None, Retention(Zone.LATER, 60.0)),
        (CacheControl(0.0), None, None, ASSOCIATED),
        (CacheControl(0.0), 5.0, TOOL, ASSOCIATED),
        (CacheControl(60.0, 0), None, None, Retention(Zone.SOON, 60.0, 0)),
        (CacheControl(60.0, 7), None, USER, Retention(Zone.LATER, 60.0, 7)),
        (None, 5.0, None, Retention(Zone.SOON, 300.0)),
        (None, 3000.0, None, Retention(Zone.LATER, 3000.0)),
        (None, 3600.0, None, Retention(Zone.LATER, 3600.0)),
        (None, 3600.5, None, ASSOCIATED),
        (None, 3600.5, TOOL, ASSOCIATED),
        (None, None, TOOL, Retention(Zone.SOON, 300.0)),
        (None, None, USER, Retention(Zone.LATER, 300.0)),
    ],
)
def test_decide(
    control: CacheControl | None,
    resume_s: float | None,
    state: SessionState | None,
    expected: Retention,
) -> None:
    hint = AgentHint(cache_control=control, expected_resume_s=resume_s, state=state)
    assert decide(hint, SOON_S) == expected
    assert is_protected(expected) == (expected.ttl_s > 0)


def test_no_hint_is_vllms_own_order() -> None:
    assert decide(None, SOON_S) == UNHINTED == Retention(Zone.ORDINARY)


def test_targets_are_ordered_as_blocks_are_taken_and_read_back() -> None:
    places = [
        (Zone.FINISHED, 0),
        (Zone.DEMOTED, 0),
        (Zone.ORDINARY, 0),
        (Zone.ASSOCIATED, 0),
        (Zone.LATER, 5),
        (Zone.LATER, 6),
        (Zone.SOON, 2),
        (Zone.SOON, (1 << 32) - 1),
    ]
    targets = [target_of(*place) for place in places]
    assert targets == sorted(targets)
    assert [(target_zone(t), target_tick(t)) for t in targets] == places
    assert target_of(Zone.LATER, 1 << 40) < target_of(Zone.SOON)


def test_a_deadline_is_rounded_up_to_a_tick() -> None:
    assert [tick_of(s) for s in (4.0, 4.01, 4.99, 5.0)] == [4, 5, 5, 5]
