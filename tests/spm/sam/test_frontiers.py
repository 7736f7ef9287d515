"""What a session can resume from: branches, rewinds, interruptions, and the bounds."""

import pytest

from spm.agent_hint import AgentHint, BlockRange, Edit, EditType, SessionState
from spm.operation import Status
from spm.sam.claims import MAX_FRONTIERS
from spm.sam.restoring import RestoredBlock
from spm.sam.zones import Zone
from tests.spm.sam.kit import FINISHED_HINT, Rig, ref_of, ttl

A, B, C = ref_of("a"), ref_of("b"), ref_of("c")
HOUR = ttl(3600)


def test_a_rewind_demotes_what_only_the_old_frontier_held() -> None:
    rig = Rig()
    old = rig.turn(A, HOUR, 1, 2, 3)
    rig.after(1)
    new = rig.turn(A, HOUR, 1, 4)
    assert rig.zones(old) == [Zone.SOON, Zone.DEMOTED, Zone.DEMOTED]
    assert rig.zone(new) is Zone.SOON
    assert rig.order()[:2] == [old[2], old[1]]


def test_a_compaction_spares_what_another_session_claims() -> None:
    rig = Rig()
    old = rig.turn(A, HOUR, 1, 2)
    rig.turn(B, ttl(0), 1)
    rig.after(1)
    rig.turn(A, HOUR, 5)
    assert rig.zones(old) == [Zone.ASSOCIATED, Zone.DEMOTED]


def test_branches_that_overlap_in_time_do_not_supersede_each_other() -> None:
    rig = Rig()
    left, right = rig.start(1, 2), rig.start(1, 3)
    rig.after(1)
    rig.end(left, A, HOUR)
    rig.after(1)
    rig.end(right, A, HOUR)
    assert rig.zone(left.ids) is rig.zone(right.ids) is Zone.SOON
    rig.after(1)
    rig.turn(A, HOUR, 1, 2, 5)
    assert rig.zones(right.ids) == [Zone.SOON, Zone.DEMOTED]


def test_a_prefix_goes_after_its_tail() -> None:
    rig = Rig()
    ids = rig.turn(A, HOUR, 1, 2, 3)
    assert rig.take_all()[-3:] == ids[::-1]


def test_a_prefix_goes_after_its_tail_when_the_blocks_were_free_already() -> None:
    for leave in ("preempted", "retained", "finished"):
        rig = Rig(8)
        ids = rig.turn(A, ttl(0), 1, 2, 3)
        if leave == "preempted":
            blocks = [rig.pool.blocks[i] for i in ids]
            rig.sam.preempted(B, HOUR, rig.clock.now_s, [blocks])
        else:
            rig.sam.retain(A, HOUR if leave == "retained" else FINISHED_HINT)
        order = [i for i in rig.order() if i in ids]
        assert order == ids[::-1], leave


def test_a_request_preempted_often_leaves_one_frontier_and_its_end_supersedes_it() -> None:
    rig = Rig(32)
    branch = rig.start(1, 2)
    victim = rig.start(1, 3)
    rig.after(1)
    rig.end(branch, A, HOUR)
    for _ in range(2 * MAX_FRONTIERS):
        rig.free(victim)
        rig.sam.preempted(A, HOUR, victim.arrived_s, [rig.hits(victim.request)])
        rig.serve(victim)
        rig.after(1)
    assert rig.claims.num_records == 4
    rig.end(victim, A, HOUR)
    assert rig.claims.num_records == 4
    assert rig.zone(branch.ids) is rig.zone(victim.ids) is Zone.SOON


def test_beyond_the_bound_the_oldest_branch_is_given_up() -> None:
    rig = Rig(32)
    branches = [rig.start(1, 10 + n) for n in range(MAX_FRONTIERS + 2)]
    for branch in branches:
        rig.after(1)
        rig.end(branch, A, HOUR)
    tails = rig.zones([branch.ids[1] for branch in branches])
    assert tails == [Zone.DEMOTED] * 2 + [Zone.SOON] * MAX_FRONTIERS
    assert rig.claims.num_records == 2 * MAX_FRONTIERS


def test_over_max_records_the_session_idle_longest_loses_its_claims() -> None:
    rig = Rig(32, max_records=6)
    first, second = rig.turn(A, HOUR, 1, 2, 3), rig.turn(B, HOUR, 4, 5, 6)
    assert rig.claims.num_records == 6
    rig.after(1)
    rig.turn(A, HOUR, 1, 2, 3)
    third = rig.turn(C, HOUR, 7)
    assert rig.zone(first) is rig.zone(third) is Zone.SOON
    assert rig.zone(second) is Zone.ORDINARY
    assert rig.claims.num_records == 4


def test_over_max_records_a_flood_costs_its_own_tenant() -> None:
    rig = Rig(64, max_records=6)
    theirs = rig.turn(ref_of("theirs", "other"), HOUR, 50, 51)
    for number in range(10):
        rig.after(1)
        mine = rig.turn(ref_of(f"flood-{number}"), HOUR, 2 * number, 2 * number + 1)
    assert rig.zone(theirs) is rig.zone(mine) is Zone.SOON
    assert rig.claims.num_records == 6


def test_over_max_records_ever_larger_tenants_still_displace_each_other() -> None:
    rig = Rig(64, max_records=6)
    for number in range(8):
        rig.after(1)
        rig.turn(ref_of("s", f"tenant-{number}"), HOUR, *range(2 + number))
        assert rig.claims.num_records <= max(6, 2 + number)


def test_over_max_records_one_session_alone_gives_up_its_oldest_branches() -> None:
    rig = Rig(32, max_records=5)
    branches = [rig.start(1, 10 + n) for n in range(4)]
    for branch in branches:
        rig.after(1)
        rig.end(branch, A, HOUR)
    assert rig.claims.num_records == 4
    tails = rig.zones([branch.ids[1] for branch in branches])
    assert tails == [Zone.ORDINARY] * 2 + [Zone.SOON] * 2


def test_tenants_beyond_the_table_share_the_last_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spm.sam.claims.MAX_TENANTS", 2)
    rig = Rig(32)
    for name in "abcd":
        rig.turn(ref_of("s", name), HOUR, ord(name))
    assert len(rig.claims._tenants) == 2
    assert rig.table.ledger.tenant_blocks == {0: 1, 1: 3}
    rig.sam.check_integrity()


def test_block_offset_protects_the_prefix_in_logical_blocks() -> None:
    rig = Rig(scales=(2,))
    ids = rig.turn(A, ttl(60, offset=1), 1, 2, 3)
    assert rig.zones(ids) == [Zone.SOON, Zone.SOON, Zone.ASSOCIATED]
    assert rig.claims.logical_blocks(A) == 2
    result = rig.sam.edit(A, Edit(EditType.EVICT, BlockRange(0, 1)))
    assert (result.status, result.blocks) == (Status.OK, 2)
    assert rig.zones(ids) == [Zone.FINISHED, Zone.FINISHED, Zone.ASSOCIATED]


def test_a_request_that_says_nothing_renews_what_was_said_until_that_expires() -> None:
    rig = Rig()
    rig.turn(A, ttl(10), 1)
    rig.after(9)
    ids = rig.turn(A, None, 1)
    rig.after(9)
    assert rig.zone(ids) is Zone.SOON
    rig.after(20)
    assert rig.zone(rig.turn(A, None, 1)) is Zone.ORDINARY


def test_a_reset_of_the_prefix_cache_ends_every_claim() -> None:
    rig = Rig()
    ids = rig.turn(A, HOUR, 1, 2)
    rig.turn(B, AgentHint(state=SessionState.WAITING_USER), 1)
    assert rig.pool.reset_prefix_cache()
    rig.sam.tick(int(rig.clock.now_s))
    assert rig.zone(ids) is Zone.ORDINARY
    assert (rig.claims.num_records, rig.table.ledger.num_marked) == (0, 0)
    rig.sam.check_integrity()


def test_a_restored_block_is_not_given_up_for_what_it_held_before() -> None:
    """An ordinary block is reused without notice: a place behind still names it."""
    rig = Rig(4)
    rig.turn(A, None, 1, 2, 3)
    running = rig.start(9)
    (block,) = running.blocks
    rig.sam.restored(A, [RestoredBlock(0, 0, block)], renew=False)
    rig.end(running, A, ttl(60))
    assert rig.zones([block.block_id]) == [Zone.SOON]
