"""Blocks that several sessions, or a session and somebody else, have to do with."""

import pytest

from spm.agent_hint import AgentHint, BlockRange, Edit, EditType, SessionState
from spm.sam.zones import Zone
from tests.spm.sam.kit import FINISHED_HINT, Rig, ref_of, ttl

A, B, C = ref_of("a"), ref_of("b"), ref_of("c")
LATER = AgentHint(state=SessionState.WAITING_USER)
EVICT = Edit(EditType.EVICT)


def test_a_shared_block_keeps_the_best_class_any_session_justifies() -> None:
    rig = Rig()
    ids = rig.turn(A, ttl(0), 1, 2)
    assert rig.zone(ids) is Zone.ASSOCIATED
    rig.turn(B, LATER, 1, 2)
    assert rig.zone(ids) is Zone.LATER
    rig.turn(C, ttl(300), 1, 2)
    assert rig.zone(ids) is Zone.SOON
    rig.sam.closed(C, told=True)
    assert rig.zone(ids) is Zone.LATER
    rig.sam.closed(B, told=True)
    assert rig.zone(ids) is Zone.ASSOCIATED
    rig.sam.closed(A, told=True)
    assert rig.zone(ids) is Zone.FINISHED


@pytest.mark.parametrize(
    "way", ["expires", "finishes", "is told to end", "is evicted", "forgotten"]
)
def test_one_session_never_ends_another_ones_deadline(way: str) -> None:
    rig = Rig()
    ids = rig.turn(A, ttl(5), 1, 2)
    rig.turn(B, LATER, 1, 2)  # weaker, longer
    if way == "finishes":
        rig.turn(A, FINISHED_HINT, 1, 2)
    elif way == "is evicted":
        rig.sam.edit(A, EVICT)
    elif way != "expires":
        rig.sam.closed(A, told=way == "is told to end")
    rig.after(6)
    assert rig.zone(ids) is Zone.LATER
    rig.after(293)
    assert rig.zone(ids) is Zone.LATER
    rig.after(3)
    assert rig.zone(ids) is Zone.ORDINARY
    rig.sam.check_integrity()


def test_a_stronger_claim_that_expires_first_leaves_the_weaker_even_while_in_use() -> None:
    rig = Rig()
    ids = rig.turn(A, ttl(5), 1, 2)
    rig.turn(B, LATER, 1, 2)
    reader = rig.start(1, 2)
    rig.after(6)
    rig.sam.check_integrity()
    rig.free(reader)
    rig.after(1)
    assert rig.zone(ids) is Zone.LATER


def test_finished_blocks_go_first() -> None:
    rig = Rig()
    ids = rig.turn(A, FINISHED_HINT, 1, 2)
    assert rig.zone(ids) is Zone.FINISHED
    assert rig.order()[:2] == ids[::-1]


@pytest.mark.parametrize("low", [Zone.FINISHED, Zone.DEMOTED])
def test_who_uses_a_block_placed_low_shows_that_it_is_of_use(low: Zone) -> None:
    rig = Rig()
    ids = rig.turn(A, ttl(60), 1, 2)
    if low is Zone.FINISHED:
        rig.sam.closed(A, told=True)
    else:
        rig.after(1)
        rig.turn(A, ttl(60), 3)
    assert rig.zone(ids) is low
    assert rig.other(1, 2) == ids
    assert rig.zone(ids) is Zone.ORDINARY


def test_blocks_in_use_by_another_request_are_not_placed() -> None:
    rig = Rig()
    ids = rig.turn(A, ttl(60), 1, 2)
    reader = rig.start(1, 2)
    rig.sam.closed(A, told=True)
    rig.free(reader)
    assert rig.zone(ids) is Zone.ORDINARY


def test_a_finishing_request_places_its_own_blocks_not_those_others_use() -> None:
    rig = Rig()
    mine = rig.start(1, 2)
    reader = rig.start(1)
    rig.end(mine, A, FINISHED_HINT)
    rig.free(reader)
    assert rig.zones(mine.ids) == [Zone.ORDINARY, Zone.FINISHED]


def test_a_finishing_request_does_not_pass_for_the_user_of_an_older_branch() -> None:
    rig = Rig()
    first, second = rig.start(1, 2), rig.start(3)
    rig.after(1)
    rig.end(first, A)
    reader = rig.start(1, 2)
    rig.end(second, A, FINISHED_HINT)
    rig.free(reader)
    assert rig.zone(first.ids) is Zone.ORDINARY
    assert rig.zone(second.ids) is Zone.FINISHED


@pytest.mark.parametrize("ends", ["told", "superseded", "evicted"])
def test_a_block_that_holds_somebody_elses_content_by_now_is_not_placed(ends: str) -> None:
    """Ordinary blocks are handed out without notice: the session still remembers its own."""
    rig = Rig(3)
    ids = rig.turn(A, None, 1, 2)
    assert sorted(rig.other(7, 8)) == sorted(ids)
    if ends == "told":
        rig.sam.closed(A, told=True)
    elif ends == "evicted":
        rig.sam.edit(A, EVICT)
    else:
        rig.after(1)
        rig.sam.finished(A, None, rig.clock.now_s, [[rig.pool.null_block]])
    assert rig.zone(ids) is Zone.ORDINARY
    rig.sam.check_integrity()


def test_stale_claims_never_touch_those_made_since() -> None:
    """The block was reused and then held the same content again."""
    rig = Rig(3)
    ids = rig.turn(A, ttl(60), 1, 2)
    rig.other(7, 8)
    rig.pool.evict_blocks(set(ids))
    again = rig.turn(B, ttl(60), 1, 2)
    assert sorted(again) == sorted(ids)
    rig.pool.touch([rig.pool.blocks[i] for i in ids])
    rig.pool.free_blocks([rig.pool.blocks[i] for i in ids])
    rig.sam.retain(A, LATER)
    assert rig.zone(ids) is Zone.SOON
    rig.sam.edit(A, Edit(EditType.EVICT, BlockRange(0, 1)))
    rig.sam.closed(A, told=True)
    rig.sam.check_integrity()
    assert rig.zone(ids) is Zone.SOON
    rig.sam.closed(B)
    assert rig.zone(ids) is Zone.ORDINARY


def test_the_null_block_is_never_claimed() -> None:
    rig = Rig()
    running = rig.start(1, 2)
    groups = [[rig.pool.null_block, running.blocks[1]]]
    rig.sam.finished(A, ttl(60), running.arrived_s, groups)
    rig.free(running)
    assert rig.zones(running.ids) == [Zone.ORDINARY, Zone.SOON]
    rig.sam.check_integrity()


def test_when_both_low_zones_are_filled_none_is_passed_over() -> None:
    rig = Rig()
    over = rig.start(9)
    old = rig.turn(A, None, 1, 2, 3)
    rig.after(1)
    rig.turn(A, None, 1)
    rig.end(over, B, FINISHED_HINT)
    assert [b.block_id for b in rig.pool.get_new_blocks(2)] == [*over.ids, old[2]]
    rig.sam.check_integrity()
    assert rig.take_all()[0] == old[1]
