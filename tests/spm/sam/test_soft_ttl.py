"""A TTL is a priority with a deadline, never a pin."""

import pytest
from vllm.v1.core.block_pool import BlockPool

from spm.agent_hint import AgentHint, SessionState
from spm.metrics import Metric
from spm.sam import block_table
from spm.sam.zones import Zone
from tests.spm.sam.kit import BLOCK_TOKENS, Rig, ref_of, ttl

A, B, C, D = (ref_of(name) for name in "abcd")
LATER = AgentHint(state=SessionState.WAITING_USER)


@pytest.mark.fault("F33", breaks="what is protected is never taken")
def test_with_everything_protected_every_allocation_succeeds() -> None:
    rig, stock = Rig(16), BlockPool(16, True, BLOCK_TOKENS)
    rig.turn(A, ttl(3600), *range(15))
    assert rig.table.ledger.num_protected == 15
    for n in (1, 5, 9):
        taken = rig.pool.get_new_blocks(n)
        assert len(taken) == len(stock.get_new_blocks(n))
        assert rig.counted(Metric.SAM_OVERRIDDEN_BLOCKS) == n
    assert rig.table.ledger.num_protected == 0
    with pytest.raises(ValueError, match="free blocks"):
        rig.pool.get_new_blocks(1)
    rig.sam.check_integrity()


def test_the_reservation_that_expires_first_breaks_first() -> None:
    rig = Rig(10)
    long = rig.turn(A, ttl(300), 1, 2)
    short = rig.turn(B, ttl(30), 3, 4)
    middle = rig.turn(C, ttl(60), 5, 6)
    assert rig.take_all()[-6:] == [*short[::-1], *middle[::-1], *long[::-1]]


def test_zones_go_in_their_order() -> None:
    rig = Rig(14)
    soon = rig.turn(ref_of("soon"), ttl(10), 1)
    later = rig.turn(ref_of("later"), ttl(300, resume_s=60), 2)
    associated = rig.turn(ref_of("associated"), ttl(0), 3)
    ordinary = rig.turn(ref_of("ordinary"), None, 4)
    rewound = rig.turn(ref_of("rewound"), None, 5, 6)
    over = rig.start(7)
    rig.clock.now_s += 1
    rig.turn(ref_of("rewound"), None, 5)
    rig.end(over, ref_of("over"), AgentHint(state=SessionState.FINISHED))
    taken = rig.take_all()
    assert taken[:2] == [*over.ids, rewound[1]]
    assert taken[-5:] == [*ordinary, rewound[0], *associated, *later, *soon]


@pytest.mark.parametrize("limit", [1, 2, 4096])
def test_a_skipped_tick_keeps_no_expired_block_from_being_taken_first(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when there are more of them than are looked at in one go, and when what has expired
    falls to a weaker claim of somebody else instead of becoming ordinary."""
    monkeypatch.setattr(block_table, "_RELIEF_BLOCKS", limit)
    rig = Rig(11)
    unexpired = rig.turn(A, LATER, 1, 2)
    expired = rig.turn(B, ttl(5), 3, 4)
    shared = rig.turn(D, ttl(5), 5, 6)
    rig.turn(C, ttl(0), 5, 6)
    rig.pool.get_new_blocks(10 - 6)
    rig.clock.now_s += 6
    taken = rig.take_all()
    assert sorted(taken[:2]) == sorted(expired)
    assert sorted(taken[2:4]) == sorted(shared)
    assert sorted(taken[4:]) == sorted(unexpired)
    assert rig.counted(Metric.SAM_OVERRIDDEN_BLOCKS) == 2


def test_what_only_falls_to_a_weaker_claim_does_not_end_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_table, "_RELIEF_BLOCKS", 1)
    rig = Rig(5)
    rig.turn(A, ttl(2), 1, 2)
    rig.turn(C, ttl(0), 1, 2)
    expired = rig.turn(B, ttl(4), 3)
    rig.pool.get_new_blocks(1)
    rig.clock.now_s += 6
    assert rig.pool.get_new_blocks(1)[0].block_id == expired[0]


def test_a_tick_moves_at_most_so_many_and_goes_on_at_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_table, "_RELIEF_BLOCKS", 3)
    rig = Rig(10)
    ids = rig.turn(A, ttl(5), *range(8))
    left = []
    rig.after(6)
    for _ in range(4):
        left.append(rig.zones(ids).count(Zone.SOON))
        assert rig.table.ledger.num_protected == 0, "they do not count any more"
        rig.sam.tick(int(rig.clock.now_s))
    assert left == [5, 2, 0, 0]
    assert rig.counted(Metric.SAM_EXPIRED_BLOCKS) == 8


def test_protection_ends_at_the_first_whole_second_after_its_deadline() -> None:
    rig = Rig()
    ids = rig.turn(A, ttl(5), 1)
    rig.after(5.7)  # the clock began at .25
    assert rig.zone(ids) is Zone.SOON
    rig.after(0.05)
    assert rig.zone(ids) is Zone.ORDINARY


def test_empty_segments_are_dropped_also_when_nothing_is_marked_any_more() -> None:
    rig = Rig()
    for n in range(50):
        rig.turn(A, ttl(1), 1)
        rig.sam.closed(A)
        rig.after(1.0 + n % 2)
    rig.after(5)
    assert rig.table.ledger.num_marked == 0
    assert len(rig.segments()) == 4


@pytest.mark.parametrize("late", [True, False])
def test_no_boundary_is_handed_out_while_expired_blocks_wait(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Nothing is protected any more, and most of it still lies where it was."""
    monkeypatch.setattr(block_table, "_RELIEF_BLOCKS", 2)
    rig = Rig(16)
    rig.turn(A, ttl(5), *range(15))
    rig.clock.now_s += 6
    if not late:
        rig.sam.tick(int(rig.clock.now_s))
    taken = [block.block_id for block in rig.pool.get_new_blocks(12)]
    assert len(set(taken)) == 12
    assert min(taken) > 0
    rig.sam.check_integrity()


def test_a_shared_block_that_expired_is_found_when_nothing_else_is_free() -> None:
    """Its sessions' expiry alone makes it ordinary: no block is left to be moved for that."""
    rig = Rig(2)
    first, second = rig.start(1), rig.start(1)
    rig.end(first, A)
    rig.end(second, B, ttl(0.5))
    rig.clock.now_s += 1
    assert len(rig.pool.get_new_blocks(1)) == 1
    assert rig.counted(Metric.SAM_OVERRIDDEN_BLOCKS) == 0


def test_a_session_that_closes_during_a_backlog_leaves_nothing_protected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_table, "_RELIEF_BLOCKS", 2)
    rig = Rig(8)
    ids = rig.turn(A, ttl(0.5), 1, 2, 3)
    rig.after(1)
    assert None not in rig.zones(ids)
    rig.sam.closed(A)
    assert rig.zone(ids) is Zone.ORDINARY
