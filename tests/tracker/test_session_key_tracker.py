"""SessionKeyTracker by example."""

from collections.abc import Callable

import pytest

from tests.clock import FakeClock
from tracker.errors import IntegrityError
from tracker.ids import (
    BlockHash,
    BlockKey,
    GroupId,
    SessionId,
    SessionRef,
    TenantId,
    make_block_key,
)
from tracker.key_index import KeyState
from tracker.session_key_tracker import Refusal, SessionKeyTracker, TrackOutcome

G0, G1 = GroupId(0), GroupId(1)
DONE = TrackOutcome()


def ref(name: str, tenant: str = "t") -> SessionRef:
    return SessionRef(TenantId(tenant), SessionId(name))


def keys(names: str, group: GroupId = G0) -> list[BlockKey]:
    return [make_block_key(BlockHash(name.encode()), group) for name in names]


def key(name: str, group: GroupId = G0) -> BlockKey:
    return keys(name, group)[0]


A, B, C, D = (ref(name) for name in "abcd")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(50.0)


@pytest.fixture
def tracker(clock: FakeClock) -> SessionKeyTracker:
    return SessionKeyTracker(max_sessions=4, max_keys=8, clock=clock)


@pytest.mark.parametrize(("max_sessions", "max_keys"), [(1, 5), (2, 0)])
def test_bounds_too_small_are_refused(max_sessions: int, max_keys: int, clock: FakeClock) -> None:
    with pytest.raises(ValueError, match="bounds too small"):
        SessionKeyTracker(max_sessions, max_keys, clock)


def test_nothing_is_known_of_an_unknown_session(tracker: SessionKeyTracker) -> None:
    assert not tracker.touch(A)
    assert not tracker.free_session(A)
    assert tracker.free_session_tree(A) == []
    assert tracker.truncate(A, G0, 0) == 0
    assert tracker.keys_of(A) == []
    assert tuple(tracker.blocks(A, G0)) == ()
    assert tracker.idle_since_s(A) is None
    assert tracker.state_of(key("x")) is None
    assert tracker.num_sessions == 0


def test_open_is_idempotent_and_refreshes_activity(
    tracker: SessionKeyTracker, clock: FakeClock
) -> None:
    assert tracker.open(A) == DONE
    clock.now_s = 60.0
    assert tracker.idle_since_s(A) == 50.0
    assert tracker.open(A) == DONE
    assert tracker.idle_since_s(A) == 60.0
    clock.now_s = 70.0
    assert tracker.touch(A)
    assert tracker.idle_since_s(A) == 70.0
    assert tracker.num_sessions == 1


def test_a_parent_may_come_later_and_is_opened_and_refreshed(
    tracker: SessionKeyTracker, clock: FakeClock
) -> None:
    tracker.open(B)
    assert tracker.open(B, parent=A) == DONE
    assert tracker.parent_of(B) == A
    assert tracker.children_of(A) == (B,)
    clock.now_s = 60.0
    tracker.open(B, parent=A)
    assert tracker.idle_since_s(A) == 60.0
    tracker.open(B)
    assert tracker.parent_of(B) == A
    tracker.check_integrity()


def test_a_cycle_is_refused_but_the_session_is_open(tracker: SessionKeyTracker) -> None:
    assert tracker.open(A, parent=A).refused is Refusal.CYCLE
    assert tracker.idle_since_s(A) is not None
    tracker.open(B, parent=A)
    tracker.open(C, parent=B)
    assert tracker.open(A, parent=C).refused is Refusal.CYCLE
    assert tracker.parent_of(A) is None
    tracker.check_integrity()


def test_a_parent_of_another_tenant_is_refused_and_left_alone(
    tracker: SessionKeyTracker, clock: FakeClock
) -> None:
    stranger = ref("a", tenant="other")
    assert tracker.open(B, parent=stranger).refused is Refusal.OTHER_TENANT
    assert tracker.idle_since_s(stranger) is None
    assert tracker.idle_since_s(B) is not None
    tracker.open(B, parent=A)
    tracker.open(stranger)
    clock.now_s = 60.0
    assert tracker.open(B, parent=stranger).refused is Refusal.OTHER_TENANT
    assert tracker.idle_since_s(stranger) == 50.0
    assert tracker.parent_of(B) == A


def test_equal_ids_of_two_tenants_are_two_sessions(tracker: SessionKeyTracker) -> None:
    other = ref("a", tenant="other")
    tracker.associate(A, G0, 0, keys("xy"))
    tracker.associate(other, G0, 0, keys("x"))
    assert tracker.sessions_of(key("x")) == {A, other}
    assert tracker.free_session(A)
    assert tracker.state_of(key("x")) is KeyState.TRACKED
    assert tracker.state_of(key("y")) is KeyState.ORPHANED


def test_association_is_lazy_and_idempotent(tracker: SessionKeyTracker) -> None:
    for _ in range(3):
        assert tracker.associate(A, G0, 0, keys("xyz")) == DONE
    assert tracker.associate(A, G0, 1, keys("yz")) == DONE
    assert (tracker.num_sessions, tracker.num_keys, tracker.num_references) == (1, 3, 3)
    tracker.associate(A, G0, 3, keys("w"))
    assert list(tracker.blocks(A, G0)) == keys("xyzw")
    tracker.check_integrity()


def test_the_same_key_at_two_indexes_is_one_reference(tracker: SessionKeyTracker) -> None:
    tracker.associate(A, G0, 0, keys("xyx"))
    assert tracker.num_references == 2
    assert tracker.keys_of(A) == keys("xy")
    tracker.associate(A, G0, 0, keys("w"))
    assert tracker.state_of(key("x")) is KeyState.TRACKED
    assert tracker.truncate(A, G0, 2) == 1
    assert tracker.state_of(key("x")) is KeyState.ORPHANED
    tracker.associate(A, G0, 0, keys("zzzz"))
    assert tracker.truncate(A, G0, 2) == 2
    assert tracker.truncate(A, G0, 1) == 1
    assert tracker.state_of(key("z")) is KeyState.TRACKED
    tracker.check_integrity()


def test_groups_are_kept_apart(tracker: SessionKeyTracker) -> None:
    tracker.associate(A, G0, 0, keys("xy", G0))
    tracker.associate(A, G1, 0, keys("xy", G1))
    assert tracker.keys_of(A) == keys("xy", G0) + keys("xy", G1)
    assert tracker.keys_of(A, G1) == keys("xy", G1)
    tracker.truncate(A, G1, 1)
    assert list(tracker.blocks(A, G0)) == keys("xy", G0)
    assert tracker.state_of(key("y", G1)) is KeyState.ORPHANED
    tracker.check_integrity()


def test_a_late_start_leaves_a_hole_and_positions_do_not_shift(tracker: SessionKeyTracker) -> None:
    tracker.associate(A, G0, 2, keys("z"))
    assert list(tracker.blocks(A, G0)) == [None, None, key("z")]
    tracker.associate(A, G0, 0, keys("x"))
    assert list(tracker.blocks(A, G0)) == [key("x"), None, key("z")]
    assert tracker.truncate(A, G0, 2) == 1
    assert list(tracker.blocks(A, G0)) == keys("x")
    tracker.check_integrity()


def test_a_negative_index_is_refused_and_changes_nothing(tracker: SessionKeyTracker) -> None:
    assert tracker.associate(A, G0, -1, keys("x")).refused is Refusal.NEGATIVE_INDEX
    assert (tracker.num_sessions, tracker.num_keys) == (0, 0)
    tracker.associate(A, G0, 0, keys("xy"))
    assert tracker.truncate(A, G0, -1) == 2
    assert tracker.num_references == 0


def test_compaction_supersedes_what_nobody_else_holds(tracker: SessionKeyTracker) -> None:
    tracker.associate(A, G0, 0, keys("uvw"))
    tracker.associate(B, G0, 0, keys("uv"))
    tracker.associate(A, G0, 1, keys("xy"))
    assert list(tracker.blocks(A, G0)) == keys("uxy")
    assert tracker.state_of(key("v")) is KeyState.TRACKED
    assert tracker.sessions_of(key("v")) == {B}
    assert tracker.state_of(key("w")) is KeyState.ORPHANED
    tracker.check_integrity()


def test_keys_that_only_move_are_kept(tracker: SessionKeyTracker) -> None:
    tracker.associate(A, G0, 0, keys("xyz"))
    tracker.associate(A, G0, 0, keys("yzx"))
    assert tracker.take_orphans(9) == []
    assert tracker.num_references == 3
    tracker.check_integrity()


def test_truncate_is_no_activity(tracker: SessionKeyTracker, clock: FakeClock) -> None:
    tracker.associate(A, G0, 0, keys("xyz"))
    clock.now_s = 60.0
    assert tracker.truncate(A, G0, 1) == 2
    assert tracker.truncate(A, G0, 1) == 0
    assert tracker.idle_since_s(A) == 50.0


def test_a_freed_session_leaves_orphans_tail_first(tracker: SessionKeyTracker) -> None:
    tracker.associate(A, G0, 0, keys("wxyz"))
    tracker.associate(B, G0, 0, keys("w"))
    assert tracker.free_session(A)
    assert not tracker.free_session(A)
    assert tracker.state_of(key("w")) is KeyState.TRACKED
    assert tracker.num_keys == 4
    assert tracker.take_orphans(2) == keys("zy")
    assert tracker.take_orphans(2) == keys("x")
    assert tracker.num_keys == 1
    tracker.check_integrity()


def test_superseded_keys_are_collected_tail_first_too(tracker: SessionKeyTracker) -> None:
    tracker.associate(A, G0, 0, keys("wx"))
    tracker.associate(A, G0, 0, keys("yz"))
    assert tracker.take_orphans(9) == keys("xw")


def test_an_orphan_that_is_associated_again_is_tracked(tracker: SessionKeyTracker) -> None:
    tracker.associate(A, G0, 0, keys("x"))
    tracker.free_session(A)
    assert tracker.state_of(key("x")) is KeyState.ORPHANED
    tracker.associate(B, G0, 0, keys("x"))
    assert tracker.state_of(key("x")) is KeyState.TRACKED
    assert tracker.take_orphans(1) == []


def test_a_tree_is_freed_children_first(tracker: SessionKeyTracker) -> None:
    tracker.open(B, parent=A)
    tracker.open(C, parent=B)
    tracker.open(D, parent=A)
    tracker.associate(C, G0, 0, keys("x"))
    assert tracker.free_session_tree(A) == [C, B, D, A]
    assert tracker.free_session_tree(A) == []
    assert tracker.num_sessions == 0
    assert tracker.take_orphans(9) == keys("x")
    tracker.check_integrity()


def test_children_of_a_freed_session_become_roots(tracker: SessionKeyTracker) -> None:
    tracker.open(B, parent=A)
    tracker.open(C, parent=B)
    tracker.free_session(B)
    assert tracker.parent_of(C) is None
    assert tracker.free_session_tree(A) == [A]
    assert tracker.idle_since_s(C) is not None


def test_the_session_idle_longest_makes_room(tracker: SessionKeyTracker) -> None:
    for session in (A, B, C, D):
        tracker.open(session)
    tracker.touch(A)
    assert tracker.open(ref("e")) == TrackOutcome(forgotten=(B,))
    assert tracker.associate(ref("f"), G0, 0, keys("x")) == TrackOutcome(forgotten=(C,))
    assert tracker.num_sessions == 4
    tracker.check_integrity()


def test_a_session_and_its_parent_never_displace_each_other(clock: FakeClock) -> None:
    tracker = SessionKeyTracker(max_sessions=2, max_keys=8, clock=clock)
    tracker.open(A)
    tracker.open(B)
    # A is the older one and gets a parent that needs room.
    assert tracker.open(A, parent=C).forgotten == (B,)
    assert tracker.parent_of(A) == C
    # The parent is the older one and gets a new child that needs room.
    assert tracker.open(D, parent=C).forgotten == (A,)
    assert tracker.parent_of(D) == C
    # Both are new.
    assert set(tracker.open(A, parent=B).forgotten) == {C, D}
    assert tracker.parent_of(A) == B
    tracker.check_integrity()


def test_orphans_make_room_before_sessions_do(tracker: SessionKeyTracker) -> None:
    tracker.associate(A, G0, 0, keys("abcd"))
    tracker.associate(B, G0, 0, keys("efgh"))
    tracker.truncate(A, G0, 1)
    outcome = tracker.associate(C, G0, 0, keys("ij"))
    assert outcome == TrackOutcome(dropped_keys=2, orphans=tuple(keys("dc")))
    assert tracker.take_orphans(9) == keys("b")
    assert tracker.num_sessions == 3
    tracker.check_integrity()


def test_idle_sessions_make_room_and_give_only_what_is_needed(tracker: SessionKeyTracker) -> None:
    tracker.associate(A, G0, 0, keys("abcd"))
    tracker.associate(B, G0, 0, keys("abef"))
    tracker.associate(C, G0, 0, keys("gh"))
    outcome = tracker.associate(C, G0, 2, keys("i"))
    assert outcome == TrackOutcome((A,), dropped_keys=1, orphans=tuple(keys("d")))
    assert list(tracker.blocks(B, G0)) == keys("abef")
    assert tracker.take_orphans(9) == keys("c")
    tracker.check_integrity()


def test_a_range_given_up_leaves_holes_and_later_blocks_where_they_are(
    tracker: SessionKeyTracker,
) -> None:
    tracker.associate(A, G0, 0, keys("abcde"))
    tracker.associate(B, G0, 0, keys("ab"))
    assert tracker.give_up(A, G0, 1, 3) == keys("cb")
    assert list(tracker.blocks(A, G0)) == [key("a"), None, None, key("d"), key("e")]
    assert tracker.sessions_of(key("b")) == {B}
    assert not tracker.is_held(key("c"))
    assert tracker.give_up(A, G0, 3, 10**9) == keys("ed")
    assert list(tracker.blocks(A, G0)) == keys("a"), "no list ends with a hole"
    assert tracker.give_up(A, G0, -5, 9) == keys("a")
    assert tuple(tracker.blocks(A, G0)) == ()
    assert tracker.idle_since_s(A) is not None, "it is open without a block"
    assert tracker.take_orphans(9) == keys("ced"), "the others are B's"
    tracker.check_integrity()


def test_a_key_listed_twice_is_given_up_with_its_last_place(tracker: SessionKeyTracker) -> None:
    tracker.associate(A, G0, 0, keys("xyx"))
    assert tracker.give_up(A, G0, 0, 1) == []
    assert tracker.is_held(key("x"))
    assert tracker.give_up(A, G0, 2, 3) == keys("x")
    assert list(tracker.blocks(A, G0)) == [None, key("y")]
    tracker.check_integrity()


def test_nothing_is_given_up_where_nothing_is(tracker: SessionKeyTracker) -> None:
    assert tracker.give_up(A, G0, 0, 9) == []
    tracker.associate(A, G0, 0, keys("ab"))
    assert tracker.give_up(A, G1, 0, 9) == []
    assert tracker.give_up(A, G0, 2, 9) == []
    assert tracker.give_up(A, G0, 1, 1) == []
    assert list(tracker.blocks(A, G0)) == keys("ab")


def test_a_session_too_large_alone_keeps_its_prefix(tracker: SessionKeyTracker) -> None:
    tracker.associate(A, G0, 0, keys("z"))
    outcome = tracker.associate(B, G0, 0, keys("abcdefghij"))
    assert outcome == TrackOutcome((A,), dropped_keys=3, orphans=tuple(keys("z")))
    assert list(tracker.blocks(B, G0)) == keys("abcdefgh")
    assert tracker.associate(B, G0, 8, keys("ij")) == TrackOutcome(dropped_keys=2)
    assert tracker.num_keys == 8
    tracker.check_integrity()


def test_every_group_keeps_a_prefix_of_like_length(tracker: SessionKeyTracker) -> None:
    tracker.associate(A, G0, 0, keys("abcdefgh", G0))
    outcome = tracker.associate(A, G1, 0, keys("abcdefgh", G1))
    assert outcome.dropped_keys == len(outcome.orphans) == 8
    assert list(tracker.blocks(A, G0)) == keys("abcd", G0)
    assert list(tracker.blocks(A, G1)) == keys("abcd", G1)
    tracker.check_integrity()


def test_an_odd_bound_leaves_the_first_group_one_block_more(clock: FakeClock) -> None:
    tracker = SessionKeyTracker(max_sessions=2, max_keys=3, clock=clock)
    tracker.associate(A, G0, 0, keys("abc", G0))
    tracker.associate(A, G1, 0, keys("abc", G1))
    assert list(tracker.blocks(A, G0)) == keys("ab", G0)
    assert list(tracker.blocks(A, G1)) == keys("a", G1)


def test_an_index_far_out_allocates_nothing(tracker: SessionKeyTracker) -> None:
    assert tracker.associate(A, G0, 10**15, keys("xy")) == TrackOutcome(dropped_keys=2)
    assert tracker.associate(A, G0, 9, keys("xyz")) == TrackOutcome(dropped_keys=3)
    assert tuple(tracker.blocks(A, G0)) == ()
    assert tracker.num_sessions == 1
    tracker.check_integrity()


def test_what_is_returned_is_a_copy(tracker: SessionKeyTracker) -> None:
    tracker.associate(A, G0, 0, keys("xy"))
    before = tracker.blocks(A, G0)
    tracker.associate(A, G0, 0, keys("zz"))
    assert list(before) == keys("xy")


def close_a_linked_session(tracker: SessionKeyTracker) -> None:
    del tracker._sessions[A]


def swap_the_order(tracker: SessionKeyTracker) -> None:
    tracker._order.touch(A.tenant, A)


def miscount_repeats(tracker: SessionKeyTracker) -> None:
    tracker._sessions[C]._repeats[key("x")] = 1


def end_with_a_hole(tracker: SessionKeyTracker) -> None:
    tracker._sessions[C]._groups[G0].append(None)


def lose_a_reference(tracker: SessionKeyTracker) -> None:
    tracker._index.release(key("x"), C)


def list_an_unindexed_key(tracker: SessionKeyTracker) -> None:
    tracker._sessions[C]._groups[G0].append(key("y"))


def link_across_tenants(tracker: SessionKeyTracker) -> None:
    tracker.open(ref("z", tenant="other"))
    tracker._tree.set_parent(C, ref("z", tenant="other"))


def lower_the_session_bound(tracker: SessionKeyTracker) -> None:
    tracker._max_sessions = 2


def lower_the_key_bound(tracker: SessionKeyTracker) -> None:
    tracker._max_keys = 0


@pytest.mark.parametrize(
    "corrupt",
    [
        close_a_linked_session,
        swap_the_order,
        miscount_repeats,
        end_with_a_hole,
        lose_a_reference,
        list_an_unindexed_key,
        link_across_tenants,
        lower_the_session_bound,
        lower_the_key_bound,
    ],
)
def test_check_integrity_sees(
    corrupt: Callable[[SessionKeyTracker], None], tracker: SessionKeyTracker, clock: FakeClock
) -> None:
    tracker.open(B, parent=A)
    clock.now_s = 60.0
    tracker.associate(C, G0, 0, keys("x"))
    tracker.check_integrity()
    corrupt(tracker)
    with pytest.raises(IntegrityError):
        tracker.check_integrity()
