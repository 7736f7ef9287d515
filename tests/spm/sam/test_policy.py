"""What a hint means, case by case."""

import pytest

from spm.agent_hint import AgentHint, CacheControl, SessionState
from spm.sam.policy import ASSOCIATED, UNHINTED, Retention, decide, is_protected
from spm.sam.zones import (
    MAX_TENANTS,
    Zone,
    claim_target,
    claim_tenant,
    claim_zone,
    has_expired,
    make_claim,
    target_of,
    target_tick,
    target_zone,
    tick_of,
)

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


def test_claims_are_ordered_by_strength_and_read_back() -> None:
    claims = [
        make_claim(Zone.ORDINARY),
        make_claim(Zone.ASSOCIATED),
        make_claim(Zone.LATER, 5, MAX_TENANTS - 1),
        make_claim(Zone.LATER, 6),
        make_claim(Zone.SOON, 2),
        make_claim(Zone.SOON, (1 << 32) - 1, MAX_TENANTS - 1),
    ]
    assert claims == sorted(claims)
    assert max(claims) < 1 << 64
    for claim in claims:
        target = claim_target(claim)
        assert target_zone(target) == claim_zone(claim)
        assert make_claim(claim_zone(claim), target_tick(target), claim_tenant(claim)) == claim
    assert target_of(Zone.LATER, 1 << 40) < target_of(Zone.SOON)


def test_a_deadline_is_rounded_up_to_a_tick_and_only_protection_expires() -> None:
    assert [tick_of(s) for s in (4.0, 4.01, 4.99, 5.0)] == [4, 5, 5, 5]
    claim = make_claim(Zone.LATER, 5)
    assert [has_expired(claim, now) for now in (4, 5, 6)] == [False, True, True]
    assert not has_expired(make_claim(Zone.ASSOCIATED), 1 << 31)
