"""The work queue by example: order, coalescing, promotion, bounds, deadlines."""

import pytest

from spm.work import WorkClass
from spm.work_queue import ClassLimits, Offer, Work, WorkQueue
from tests.clock import FakeClock
from tracker.errors import IntegrityError
from tracker.ids import BlockHash, BlockKey, GroupId, make_block_key

LOAD, PREFETCH, SAVE, OFFLOAD, KEEP_ALIVE, DELETE = WorkClass
KEYS = [make_block_key(BlockHash(bytes([i]) * 4), GroupId(0)) for i in range(9)]
A, B, C, D = KEYS[:4]
Queue = WorkQueue[str, str]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def queue_of(
    clock: FakeClock, max_waiting: int = 8, max_inflight_bytes: int = 100, share: float = 0.5
) -> Queue:
    limits = dict.fromkeys(WorkClass, ClassLimits(max_waiting, max_inflight_bytes))
    return WorkQueue(limits, share, clock)


@pytest.fixture
def queue(clock: FakeClock) -> Queue:
    return queue_of(clock)


def offer(
    queue: Queue, work_class: WorkClass, key: BlockKey, size_bytes: int = 10, owner: str = "me"
) -> Offer:
    return queue.offer(work_class, key, size_bytes, "payload", owner)


def names(works: list[Work[str, str]]) -> list[tuple[WorkClass, BlockKey]]:
    return [(work.work_class, work.key) for work in works]


def test_stronger_classes_go_first_and_within_a_class_the_first(queue: Queue) -> None:
    for work_class, key in ((DELETE, A), (OFFLOAD, B), (SAVE, C), (PREFETCH, D), (SAVE, A)):
        assert offer(queue, work_class, key) is Offer.ACCEPTED
    want = [(PREFETCH, D), (SAVE, C), (SAVE, A), (OFFLOAD, B), (DELETE, A)]
    assert names(queue.take()) == want
    assert queue.take() == []
    queue.check_integrity()


def test_the_same_waits_once_and_belongs_to_all_who_asked(queue: Queue) -> None:
    assert queue.offer(PREFETCH, A, 10, "old", "one", 200.0) is Offer.ACCEPTED
    assert queue.offer(PREFETCH, A, 11, "new", "two", 150.0) is Offer.COALESCED
    (work,) = queue.take()
    assert (work.size_bytes, work.payload, work.deadline_s) == (11, "new", 200.0)
    assert work.owners == {"one", "two"}


def test_what_does_something_else_to_a_key_is_not_the_same(clock: FakeClock) -> None:
    queue = queue_of(clock, share=1.0)
    for work_class in (PREFETCH, SAVE, KEEP_ALIVE, DELETE):
        assert offer(queue, work_class, A) is Offer.ACCEPTED
    assert offer(queue, LOAD, A) is Offer.COALESCED
    assert offer(queue, OFFLOAD, A) is Offer.COALESCED
    assert names(queue.take()) == [(LOAD, A), (SAVE, A), (KEEP_ALIVE, A), (DELETE, A)]


def test_the_stronger_class_wins_whichever_came_first(queue: Queue) -> None:
    offer(queue, OFFLOAD, A)
    offer(queue, SAVE, B)
    assert offer(queue, SAVE, A) is Offer.COALESCED
    assert offer(queue, OFFLOAD, B) is Offer.COALESCED
    assert queue.num_waiting(OFFLOAD) == 0
    assert names(queue.take()) == [(SAVE, B), (SAVE, A)]


def test_an_offer_of_what_is_in_flight_only_adds_its_owner(queue: Queue) -> None:
    queue.offer(OFFLOAD, A, 10, "old", "one")
    queue.take()
    assert queue.offer(SAVE, A, 99, "new", "two") is Offer.COALESCED
    assert not queue.is_waiting(SAVE, A)
    assert queue.done(SAVE, A) is None
    work = queue.done(OFFLOAD, A)
    assert work is not None
    assert (work.payload, work.size_bytes, work.owners) == ("old", 10, {"one", "two"})
    assert queue.done(OFFLOAD, A) is None
    assert not queue.busy


def test_a_full_class_rejects_and_nothing_changes(clock: FakeClock) -> None:
    queue = queue_of(clock, max_waiting=1)
    assert offer(queue, SAVE, A) is Offer.ACCEPTED
    assert offer(queue, SAVE, B, owner="you") is Offer.REJECTED
    assert not queue.is_waiting(SAVE, B)
    assert queue.cancel("you") == []
    assert offer(queue, SAVE, A) is Offer.COALESCED
    assert offer(queue, OFFLOAD, C) is Offer.ACCEPTED
    assert offer(queue, SAVE, C) is Offer.COALESCED, "it waits where there is room"
    assert queue.promote([C], SAVE) == 0
    queue.check_integrity()
    assert names(queue.take()) == [(SAVE, A), (OFFLOAD, C)]


def test_a_request_takes_over_what_was_to_be_prefetched(queue: Queue) -> None:
    queue.offer(PREFETCH, A, 10, "prefetch", "operation", 200.0)
    work = queue.start(LOAD, A, 12, "load", "request")
    assert (work.work_class, work.payload, work.owners) == (LOAD, "load", {"operation", "request"})
    assert not queue.is_waiting(PREFETCH, A)
    assert queue.is_in_flight(PREFETCH, A)
    assert queue.inflight_bytes(LOAD) == 12
    assert queue.inflight_bytes(PREFETCH) == 0
    assert queue.take() == []
    assert queue.done(LOAD, A) is work
    assert queue.inflight_bytes(LOAD) == 0


def test_two_loads_of_one_key_are_two_transfers(queue: Queue) -> None:
    queue.start(LOAD, A, 10, "", "first")
    work = queue.start(LOAD, A, 10, "", "second")
    assert (queue.num_inflight(LOAD), queue.inflight_bytes(LOAD)) == (2, 20)
    assert queue.done(LOAD, A) is None
    assert (queue.num_inflight(LOAD), queue.inflight_bytes(LOAD)) == (1, 10)
    assert queue.done(LOAD, A) is work
    assert not queue.busy


def test_a_load_beside_a_prefetch_in_flight_does_not_end_it(queue: Queue) -> None:
    queue.offer(PREFETCH, A, 10, "prefetch", "operation")
    (prefetch,) = queue.take()
    load = queue.start(LOAD, A, 10, "load", "request")
    assert queue.done(LOAD, A) is load
    assert load.owners == {"request"}
    assert queue.is_in_flight(PREFETCH, A)
    assert queue.done(PREFETCH, A) is prefetch


def test_cancelling_drops_what_waits_for_nobody_else(queue: Queue) -> None:
    offer(queue, PREFETCH, A, owner="one")
    offer(queue, PREFETCH, B, owner="one")
    offer(queue, PREFETCH, B, owner="two")
    offer(queue, SAVE, C, owner="one")
    assert names(queue.cancel("one")) == [(PREFETCH, A), (SAVE, C)]
    assert queue.cancel("one") == []
    queue.check_integrity()
    assert names(queue.take()) == [(PREFETCH, B)]


def test_what_is_in_flight_outlives_its_owners(queue: Queue) -> None:
    offer(queue, SAVE, A, owner="one")
    (work,) = queue.take()
    assert queue.cancel("one") == []
    assert queue.inflight_bytes(SAVE) == 10
    assert queue.done(SAVE, A) is work
    assert work.owners == set()


def test_promoting_moves_weaker_work_to_the_end_of_the_class(queue: Queue) -> None:
    offer(queue, OFFLOAD, A)
    offer(queue, OFFLOAD, B)
    offer(queue, SAVE, C)
    offer(queue, PREFETCH, D)
    assert queue.promote([B, C, D, KEYS[5]], SAVE) == 1
    assert queue.promote([B], OFFLOAD) == 0
    assert names(queue.take()) == [(PREFETCH, D), (SAVE, C), (SAVE, B), (OFFLOAD, A)]


def test_a_class_at_its_own_bound_does_not_hold_back_others(clock: FakeClock) -> None:
    queue = queue_of(clock, max_inflight_bytes=20)
    for key in (A, B, C):
        offer(queue, PREFETCH, key)
    offer(queue, OFFLOAD, D)
    assert names(queue.take()) == [(PREFETCH, A), (PREFETCH, B), (OFFLOAD, D)]
    queue.done(PREFETCH, A)
    assert names(queue.take()) == [(PREFETCH, C)]


def test_an_entry_above_its_class_bound_goes_alone(clock: FakeClock) -> None:
    queue = queue_of(clock, max_inflight_bytes=25)
    offer(queue, SAVE, A)
    offer(queue, SAVE, B, size_bytes=1000)
    offer(queue, SAVE, C)
    assert names(queue.take()) == [(SAVE, A)], "a small one does not overtake it either"
    queue.done(SAVE, A)
    assert names(queue.take()) == [(SAVE, B)]
    queue.done(SAVE, B)
    assert names(queue.take()) == [(SAVE, C)]


def test_beside_a_load_the_others_share_what_is_left(queue: Queue) -> None:
    queue.start(LOAD, KEYS[8], 30, "", "request")
    for key in (A, B):
        offer(queue, PREFETCH, key)
    for key in (C, D):
        offer(queue, SAVE, key)
    assert names(queue.take()) == [(PREFETCH, A), (PREFETCH, B), (SAVE, C)], "30 of 60 bytes"
    queue.done(PREFETCH, A)
    assert names(queue.take()) == [(SAVE, D)]


def test_beside_a_load_one_entry_may_always_go(clock: FakeClock) -> None:
    queue = queue_of(clock, share=0.0)
    queue.start(LOAD, KEYS[8], 1, "", "request")
    offer(queue, OFFLOAD, A, size_bytes=1000)
    offer(queue, OFFLOAD, B, size_bytes=1)
    assert names(queue.take()) == [(OFFLOAD, A)]
    queue.done(OFFLOAD, A)
    assert names(queue.take()) == [(OFFLOAD, B)]


def test_what_the_share_holds_back_is_not_overtaken(queue: Queue) -> None:
    queue.start(LOAD, KEYS[8], 20, "", "request")
    offer(queue, PREFETCH, A)
    offer(queue, PREFETCH, B, size_bytes=50)
    offer(queue, SAVE, C, size_bytes=1)
    assert names(queue.take()) == [(PREFETCH, A)]
    queue.done(PREFETCH, A)
    assert names(queue.take()) == [(PREFETCH, B)]
    queue.done(LOAD, KEYS[8])
    assert names(queue.take()) == [(SAVE, C)], "without a load there is no share"


def test_loads_know_no_share(clock: FakeClock) -> None:
    queue = queue_of(clock, share=0.0)
    offer(queue, SAVE, C)
    queue.take()
    queue.start(LOAD, A, 10, "", "request")
    offer(queue, LOAD, B)
    assert names(queue.take()) == [(LOAD, B)]


def test_waiting_work_expires_within_a_second_of_its_deadline(
    queue: Queue, clock: FakeClock
) -> None:
    queue.offer(PREFETCH, A, 10, "", "one", clock.now_s + 5.0)
    queue.offer(PREFETCH, B, 10, "", "one", clock.now_s + 5.0)
    queue.offer(PREFETCH, B, 10, "", "one", clock.now_s + 9.0)
    queue.offer(PREFETCH, C, 10, "", "one", clock.now_s + 5.0)
    queue.offer(PREFETCH, C, 10, "", "one")
    queue.start(LOAD, D, 10, "", "one")
    clock.now_s += 4.0
    assert queue.expire() == []
    clock.now_s += 1.0
    (expired,) = queue.expire()
    assert (expired.key, expired.owners) == (A, {"one"})
    clock.now_s += 4.0
    assert names(queue.expire()) == [(PREFETCH, B)]
    clock.now_s += 1e6
    assert queue.expire() == []
    assert names(queue.take()) == [(PREFETCH, C)]


def test_what_started_does_not_expire(queue: Queue, clock: FakeClock) -> None:
    queue.offer(PREFETCH, A, 10, "", "one", clock.now_s + 5.0)
    queue.offer(PREFETCH, B, 10, "", "one", clock.now_s + 5.0)
    queue.start(LOAD, B, 10, "", "two")
    queue.take()
    clock.now_s += 10.0
    assert queue.expire() == []
    assert queue.num_inflight(PREFETCH) == queue.num_inflight(LOAD) == 1


def test_a_deadline_already_passed_is_an_answer_at_the_next_look(
    queue: Queue, clock: FakeClock
) -> None:
    assert queue.offer(SAVE, A, 10, "", "one", clock.now_s - 50.0) is Offer.ACCEPTED
    assert names(queue.expire()) == [(SAVE, A)]


def test_clearing_a_class_leaves_the_others_and_what_is_in_flight(queue: Queue) -> None:
    offer(queue, SAVE, A)
    queue.take()
    offer(queue, SAVE, B)
    offer(queue, SAVE, C)
    offer(queue, OFFLOAD, D)
    assert names(queue.clear_waiting(SAVE)) == [(SAVE, B), (SAVE, C)]
    queue.check_integrity()
    assert queue.num_waiting(OFFLOAD) == queue.num_inflight(SAVE) == 1


def test_busy_says_whether_anything_is_left(queue: Queue) -> None:
    assert not queue.busy
    offer(queue, DELETE, A)
    assert queue.busy
    queue.take()
    assert queue.busy
    queue.done(DELETE, A)
    assert not queue.busy


def test_a_class_without_limits_is_a_mistake(clock: FakeClock) -> None:
    queue: Queue = WorkQueue({SAVE: ClassLimits(1, 1)}, 0.5, clock)
    with pytest.raises(KeyError):
        offer(queue, DELETE, A)
    assert not queue.busy


@pytest.mark.parametrize("bad", [0, -1])
def test_limits_and_sizes_are_positive(queue: Queue, bad: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        ClassLimits(bad, 1)
    with pytest.raises(ValueError, match="positive"):
        ClassLimits(1, bad)
    with pytest.raises(ValueError, match="positive"):
        offer(queue, SAVE, A, size_bytes=bad)
    with pytest.raises(ValueError, match="positive"):
        queue.start(LOAD, A, bad, "", "me")
    assert not queue.busy


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan")])
def test_a_share_is_a_share(clock: FakeClock, bad: float) -> None:
    with pytest.raises(ValueError, match="background_share"):
        queue_of(clock, share=bad)


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_a_deadline_is_a_time(queue: Queue, bad: float) -> None:
    with pytest.raises(ValueError, match="deadline_s"):
        queue.offer(SAVE, A, 1, "", "me", bad)
    assert not queue.busy


def test_check_integrity_sees_work_that_changed_behind_its_back(queue: Queue) -> None:
    offer(queue, SAVE, A)
    (work,) = queue.take()
    work.size_bytes += 1
    with pytest.raises(IntegrityError):
        queue.check_integrity()
    work.size_bytes -= 1
    work.owners.add("stranger")
    with pytest.raises(IntegrityError):
        queue.check_integrity()
