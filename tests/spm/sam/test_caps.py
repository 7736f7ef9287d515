"""Protected blocks stay under the caps, the prefix first, whoever shares what."""

from spm.agent_hint import AgentHint, SessionState
from spm.sam.zones import Zone
from tests.spm.sam.kit import FINISHED_HINT, Rig, ref_of, ttl

LATER = AgentHint(state=SessionState.WAITING_USER)
A, B = ref_of("a", "one"), ref_of("b", "two")


def charged(rig: Rig) -> dict[int, int]:
    rig.sam.check_integrity()
    return dict(rig.table.ledger.tenant_blocks)


def test_the_prefix_is_protected_first_and_the_rest_associated() -> None:
    rig = Rig(20, share=0.2)
    ids = rig.turn(A, ttl(60), *range(6))
    assert rig.zones(ids) == [Zone.SOON] * 4 + [Zone.ASSOCIATED] * 2
    retention, done = rig.sam.retain(A, LATER)
    assert (retention.zone, done.protected, done.clipped) == (Zone.LATER, 4, 2)
    assert rig.zones(ids) == [Zone.LATER] * 4 + [Zone.ASSOCIATED] * 2


def test_each_tenant_has_its_cap_and_all_have_one() -> None:
    rig = Rig(20, share=0.3, tenant_share=0.2)
    rig.turn(A, ttl(60), *range(6))
    ids = rig.turn(B, ttl(60), *range(10, 16))
    assert rig.zones(ids) == [Zone.SOON] * 2 + [Zone.ASSOCIATED] * 4
    assert charged(rig) == {0: 4, 1: 2}


def test_what_was_protected_may_be_protected_again_at_the_cap() -> None:
    rig = Rig(20, share=0.2)
    for _ in range(3):
        ids = rig.turn(A, ttl(60), 1, 2, 3, 4)
        rig.after(1)
        assert rig.zone(ids) is Zone.SOON
    assert charged(rig) == {0: 4}


def test_a_stronger_claim_on_another_tenants_blocks_is_within_the_cap_too() -> None:
    rig = Rig(20, tenant_share=0.2)
    shared = rig.turn(A, LATER, 1, 2, 3, 4)
    rig.turn(B, ttl(3000), 5, 6, 7)
    rig.turn(ref_of("c", "two"), ttl(3000), 1, 2, 3, 4)
    assert charged(rig) == {0: 3, 1: 4}
    assert rig.zones(shared) == [Zone.SOON] + [Zone.LATER] * 3


def test_what_another_tenant_paid_for_does_not_take_one_over_its_cap() -> None:
    rig = Rig(20, tenant_share=0.2)
    shared = rig.turn(A, ttl(10), 1, 2, 3, 4)
    rig.turn(B, LATER, 1, 2, 3, 4)
    rig.turn(ref_of("c", "two"), LATER, 5, 6, 7)
    assert charged(rig) == {0: 4, 1: 3}
    rig.after(12)
    assert charged(rig) == {1: 4}
    assert sorted(map(str, rig.zones(shared))) == sorted(
        map(str, [Zone.LATER] + [Zone.ASSOCIATED] * 3)
    )


def test_a_promise_that_waits_does_not_break_the_cap_of_all() -> None:
    rig = Rig(20, share=0.2, tenant_share=0.1)
    rig.turn(A, ttl(10), 1, 2)
    rig.turn(B, LATER, 1, 2)
    rig.turn(ref_of("c", "two"), LATER, 5, 6)
    rig.sam.closed(A)
    rig.turn(ref_of("c", "two"), FINISHED_HINT, 5, 6)
    rig.turn(ref_of("d", "three"), ttl(60), 7, 8)
    rig.turn(ref_of("e", "four"), ttl(60), 9, 10)
    rig.turn(ref_of("f", "five"), ttl(0), 1, 2)
    assert sum(charged(rig).values()) == 4


def test_expiry_frees_the_budget() -> None:
    rig = Rig(20, share=0.2)
    rig.turn(A, ttl(10), 1, 2, 3, 4)
    rig.after(12)
    assert rig.zone(rig.turn(B, ttl(10), 5, 6, 7, 8)) is Zone.SOON
    assert charged(rig) == {1: 4}
