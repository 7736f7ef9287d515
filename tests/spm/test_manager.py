"""The manager by example: sessions open, expire, end and give way, on an injected clock."""

from itertools import pairwise
from typing import Any

import pytest

from spm.config import SpmConfig
from spm.errors import IntegrityError
from spm.events import (
    BlocksAssociated,
    BlocksConfirmed,
    BlocksDoubted,
    BlocksMissing,
    BlocksStored,
    CacheReset,
    HostChanged,
    RequestEnded,
    RequestStarted,
    SessionEnded,
    SessionOpened,
    SessionRefreshed,
)
from spm.hints import DEFAULT_TENANT
from spm.keys import Rank
from spm.manager import SessionAwarePoolingManager
from spm.metrics import Counters, Metric, metric_key
from spm.residency import Tier
from tests.clock import FakeClock
from tracker.ids import BlockHash, GroupId, SessionId, SessionRef, TenantId, make_block_key

G0, G1 = GroupId(0), GroupId(1)
KEYS = [make_block_key(BlockHash(bytes([i]) * 4), G0) for i in range(8)]
A, B, C = (SessionRef(DEFAULT_TENANT, SessionId(name)) for name in "abc")
EXPIRED = metric_key(Metric.FORGOTTEN, "expired")
BOUND = metric_key(Metric.FORGOTTEN, "bound")


class Bench:
    """A manager with its clock and counters."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401
        self.clock = FakeClock()
        self.counters = Counters()
        config = SpmConfig.from_extra_config({"session_ttl_s": 30, "max_sessions": 3, **settings})
        self.closed: list[SessionRef] = []
        self.manager = SessionAwarePoolingManager(
            config, 2, self.counters, self.clock, self.closed.append
        )

    def handle(self, *events: Any) -> None:  # noqa: ANN401
        for event in events:
            self.manager.handle(event)
            self.manager.check_integrity()

    def tick_after(self, elapsed_s: float) -> None:
        self.clock.now_s += elapsed_s
        self.manager.tick()
        self.manager.check_integrity()

    @property
    def open(self) -> list[SessionRef]:
        return [ref for ref in (A, B, C) if self.manager.tracker.idle_since_s(ref) is not None]


def test_nothing_is_tracked_without_a_session() -> None:
    bench = Bench()
    bench.handle(
        HostChanged(Rank(0), {KEYS[0]: True}),
        BlocksStored(Rank(0), KEYS[:2]),
        BlocksConfirmed(KEYS[2:4]),
        BlocksMissing(KEYS[:1]),
        BlocksDoubted(KEYS[:2]),
        SessionEnded(A),
        SessionEnded(A, tree=True),
        CacheReset(),
    )
    bench.tick_after(1000)
    assert bench.manager.tracker.num_sessions == 0
    assert bench.manager.tracker.num_keys == 0
    assert bench.counters.drain() == {}


def test_an_idle_session_expires_once_and_its_keys_go() -> None:
    bench = Bench()
    bench.handle(SessionOpened(A), BlocksAssociated(A, {G0: KEYS[:3]}))
    bench.tick_after(29.9)
    assert bench.open == [A]
    bench.tick_after(1.1)
    assert bench.open == []
    assert bench.manager.tracker.num_keys == 0
    bench.tick_after(100)
    assert bench.counters.drain() == {EXPIRED: 1}


def test_a_mass_expiry_is_spread_over_steps() -> None:
    bench = Bench(max_sessions=5000, max_keys=100_000)
    refs = [SessionRef(TenantId("t"), SessionId(f"s{n}")) for n in range(500)]
    for number, ref in enumerate(refs):
        keys = [make_block_key(BlockHash(b"%d/%d" % (number, n)), G0) for n in range(50)]
        bench.manager.handle(BlocksAssociated(ref, {G0: keys}))
    bench.clock.now_s += 31
    left = [bench.manager.tracker.num_sessions]
    while left[-1]:
        bench.manager.tick()
        left.append(bench.manager.tracker.num_sessions)
        assert bench.manager.has_backlog or not left[-1]
        bench.manager.check_integrity()
    assert max(before - after for before, after in pairwise(left)) < 120
    assert bench.counters.drain() == {EXPIRED: 500}


def test_a_busy_session_with_no_ttl_is_looked_at_once_a_tick() -> None:
    bench = Bench(session_ttl_s=0)
    bench.handle(SessionOpened(A), RequestStarted(A))
    for _ in range(3):
        bench.tick_after(1)
        assert not bench.manager.has_backlog
    assert bench.open == [A]


def test_every_request_of_a_session_refreshes_it() -> None:
    bench = Bench()
    for event in (SessionOpened(A), BlocksAssociated(A, {G0: KEYS[:1]}), SessionOpened(A)):
        bench.handle(event)
        bench.tick_after(25)
        assert bench.open == [A]


def test_a_key_two_sessions_share_dies_with_the_second() -> None:
    bench = Bench()
    bench.handle(BlocksAssociated(A, {G0: KEYS[:2]}))
    bench.tick_after(20)
    bench.handle(BlocksAssociated(B, {G0: KEYS[:1]}))
    bench.tick_after(15)
    assert bench.open == [B]
    assert bench.manager.tracker.sessions_of(KEYS[0]) == {B}
    assert bench.manager.tracker.num_keys == 1
    bench.handle(SessionEnded(B))
    bench.tick_after(0)
    assert bench.manager.tracker.num_keys == 0


def test_a_parent_named_only_by_its_child_expires_too() -> None:
    bench = Bench()
    bench.handle(SessionOpened(A, parent=B))
    assert bench.open == [A, B]
    bench.tick_after(31)
    assert bench.open == []


def test_a_child_keeps_its_parent_alive() -> None:
    bench = Bench()
    bench.handle(SessionOpened(B))
    bench.tick_after(25)
    bench.handle(SessionOpened(A, parent=B))
    bench.tick_after(25)
    assert bench.open == [A, B]


@pytest.mark.parametrize("parent", [A, SessionRef(TenantId("other"), SessionId("x"))])
def test_a_refused_parent_is_not_opened(parent: SessionRef) -> None:
    bench = Bench()
    bench.handle(SessionOpened(A, parent=parent))
    assert bench.manager.tracker.num_sessions == 1
    assert bench.manager.tracker.parent_of(A) is None


def test_over_the_bound_the_session_idle_longest_is_forgotten() -> None:
    bench = Bench(max_sessions=2)
    bench.handle(SessionOpened(A), SessionOpened(B), SessionOpened(A), SessionOpened(C))
    assert bench.open == [A, C]
    assert bench.closed == [B]
    assert bench.counters.drain() == {BOUND: 1}
    bench.tick_after(31)
    assert bench.counters.drain() == {EXPIRED: 2}, "the forgotten one has no deadline left"


def test_over_the_key_bound_other_sessions_give_way_then_the_tail() -> None:
    bench = Bench(max_keys=4)
    bench.handle(BlocksAssociated(A, {G0: KEYS[:3]}), BlocksAssociated(B, {G0: KEYS[3:8]}))
    assert bench.open == [B]
    assert bench.manager.tracker.keys_of(B) == KEYS[3:7]
    assert bench.counters.drain() == {BOUND: 1}


def test_a_session_without_blocks_yet_is_still_a_session() -> None:
    bench = Bench()
    bench.handle(BlocksAssociated(A, {G0: []}), BlocksAssociated(B, {}))
    assert bench.open == [A, B]
    bench.tick_after(31)
    assert bench.open == []


def test_each_group_has_its_own_blocks() -> None:
    bench = Bench()
    bench.handle(BlocksAssociated(A, {G0: KEYS[:2], G1: KEYS[2:3]}))
    assert bench.manager.tracker.keys_of(A, G0) == KEYS[:2]
    assert bench.manager.tracker.keys_of(A, G1) == KEYS[2:3]


def test_ending_a_tree_ends_descendants_only() -> None:
    bench = Bench()
    bench.handle(SessionOpened(A), SessionOpened(B, parent=A), SessionOpened(C, parent=B))
    bench.handle(SessionEnded(B, tree=True))
    assert bench.open == [A]
    bench.handle(SessionOpened(B, parent=A), SessionEnded(A))
    assert bench.open == [B]
    assert bench.counters.drain() == {}, "an end the application asked for is not a loss"


def test_block_events_reach_the_residency() -> None:
    bench = Bench()
    residency = bench.manager.residency
    bench.handle(*(HostChanged(Rank(rank), {KEYS[0]: True}) for rank in (0, 1)))
    bench.handle(*(BlocksStored(Rank(rank), KEYS[1:2]) for rank in (0, 1)))
    bench.handle(BlocksConfirmed(KEYS[2:5]))
    assert [residency.tier_of(key) for key in KEYS[:3]] == [Tier.HOST, Tier.REMOTE, Tier.REMOTE]
    bench.handle(BlocksMissing([KEYS[0], KEYS[1]]), BlocksDoubted([KEYS[2]]))
    assert [residency.tier_of(key) for key in KEYS[:4]] == [None, None, None, Tier.REMOTE]
    bench.handle(CacheReset())
    assert residency.tier_of(KEYS[3]) is None
    assert residency.num_host_keys == residency.num_remote_keys == 0


def test_a_mass_expiry_is_spread_over_ticks() -> None:
    bench = Bench(max_keys=20_000)
    many = [make_block_key(BlockHash(i.to_bytes(4, "big")), G0) for i in range(10_000)]
    bench.handle(BlocksAssociated(A, {G0: many}))
    bench.tick_after(31)
    assert bench.manager.tracker.num_keys == 10_000 - 4096
    bench.tick_after(0)
    bench.tick_after(0)
    assert bench.manager.tracker.num_keys == 0


def test_check_integrity_sees_a_session_without_a_deadline() -> None:
    bench = Bench()
    bench.manager.tracker.open(A)
    with pytest.raises(IntegrityError, match="1 sessions, 0 deadlines"):
        bench.manager.check_integrity()


def test_a_session_is_not_idle_while_a_request_runs() -> None:
    bench = Bench()
    bench.handle(SessionOpened(A, parent=B), RequestStarted(A), RequestStarted(A), RequestEnded(A))
    bench.tick_after(31)
    assert bench.open == [A, B], "however long the request takes, nor is its parent"
    assert bench.manager.active_requests(A) == 1
    bench.handle(RequestEnded(A))
    assert bench.manager.active_requests(A) == 0
    bench.tick_after(29)
    assert bench.open == [A, B], "its time starts when the request ends"
    bench.tick_after(3)
    assert bench.open == []
    assert sorted(bench.closed, key=lambda ref: ref.session_id) == [A, B]


def test_a_session_is_kept_as_long_as_its_hint_asks() -> None:
    bench = Bench()
    bench.handle(SessionOpened(A), RequestEnded(A, keep_s=60), SessionRefreshed(B, keep_s=60))
    bench.tick_after(59)
    assert bench.open == [A], "speaking of a session does not open it"
    bench.handle(SessionRefreshed(A))
    bench.tick_after(29)
    assert bench.open == [A]
    bench.tick_after(2)
    assert bench.open == []


def test_a_promise_is_not_cut_short_by_what_comes_later() -> None:
    bench = Bench()
    bench.handle(SessionOpened(A), RequestStarted(A), RequestEnded(A, keep_s=600))
    bench.tick_after(1)
    bench.handle(SessionOpened(B, parent=A), RequestStarted(B), RequestEnded(B))
    bench.handle(SessionOpened(A), RequestStarted(A), RequestEnded(A))
    bench.tick_after(590)
    assert bench.open == [A]
    bench.tick_after(12)
    assert bench.open == []
