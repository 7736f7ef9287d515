"""Lifecycle records by what the manager is told: what the outside gets to know, and what not."""

from typing import Any

from spm.agent_hint import EditType
from spm.config import SpmConfig
from spm.events import (
    BlocksAssociated,
    BlocksConfirmed,
    BlocksDoubted,
    BlocksLoaded,
    BlocksMissing,
    BlocksStored,
    CacheReset,
    EditAsked,
    EditDone,
    HostChanged,
    KeysGone,
    KeysSeen,
    RequestEnded,
    RequestStarted,
    SessionEnded,
    SessionOpened,
    SessionRefreshed,
)
from spm.hints import DEFAULT_TENANT
from spm.keys import Rank
from spm.lifecycle import LifecycleKind, LifecycleRecord, decode_event, encode_event
from spm.lifecycle_bus import LifecycleBus
from spm.manager import SessionAwarePoolingManager
from spm.metrics import Counters
from spm.operation import Status
from spm.residency import Tier
from tests.clock import FakeClock
from tracker.ids import BlockHash, GroupId, SessionId, SessionRef, TenantId, make_block_key

G0 = GroupId(0)
A, B, C, D = (SessionRef(DEFAULT_TENANT, SessionId(name)) for name in "abcd")
KEYS = [make_block_key(BlockHash(bytes([i]) * 4), G0) for i in range(6)]
R0, R1 = Rank(0), Rank(1)
OPENED, REFRESHED = LifecycleKind.SESSION_OPENED, LifecycleKind.SESSION_REFRESHED
EXPIRED, FREED = LifecycleKind.SESSION_EXPIRED, LifecycleKind.SESSION_FREED
SAVED, EVICTED = LifecycleKind.BLOCKS_SAVED, LifecycleKind.BLOCKS_EVICTED


class Bench:
    """A manager of two ranks with one subscriber."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        counters = Counters()
        config = SpmConfig.from_extra_config({"session_ttl_s": 30, "max_sessions": 3})
        self.bus = LifecycleBus("e", counters, FakeClock(5.0))
        self.manager = SessionAwarePoolingManager(config, 2, counters, self.clock, bus=self.bus)
        self.got: list[LifecycleRecord] = []
        self.stop = self.bus.subscribe(self.got.append)

    def told(self, *events: Any) -> list[LifecycleRecord]:  # noqa: ANN401
        """What these events are announced as; all of it can be sent."""
        for event in events:
            self.manager.handle(event)
        return self.take()

    def take(self) -> list[LifecycleRecord]:
        got = self.got.copy()
        self.got.clear()
        assert all(decode_event(encode_event(record)) == record for record in got)
        return got


def sessions(records: list[LifecycleRecord]) -> list[tuple[LifecycleKind, str | None]]:
    return [(record.kind, record.session_id) for record in records]


def moves(records: list[LifecycleRecord]) -> list[Any]:
    return [(record.kind, record.tier, list(record.keys)) for record in records]


def test_a_session_is_opened_once_and_refreshed_by_every_later_request() -> None:
    bench = Bench()
    first = bench.told(SessionOpened(A, parent=B), RequestStarted(A), RequestEnded(A))
    assert sessions(first) == [(OPENED, "b"), (OPENED, "a")]
    assert first[1].parent == "b"
    assert first[1].tenant == DEFAULT_TENANT
    again = bench.told(SessionOpened(A), SessionRefreshed(B), SessionRefreshed(C))
    assert sessions(again) == [(REFRESHED, "a"), (REFRESHED, "b")]
    assert again[0].parent == "b"


def test_a_refused_parent_is_not_announced() -> None:
    bench = Bench()
    stranger = SessionRef(TenantId("other"), SessionId("x"))
    told = bench.told(SessionOpened(A, parent=stranger), SessionOpened(B, parent=B))
    assert sessions(told) == [(OPENED, "a"), (OPENED, "b")]
    assert [record.parent for record in told] == [None, None]


def test_a_forgotten_session_has_a_reason_and_an_ended_one_none() -> None:
    bench = Bench()
    bench.told(SessionOpened(A), SessionOpened(B), SessionOpened(C))
    told = bench.told(SessionOpened(D))
    assert sessions(told) == [(EXPIRED, "a"), (OPENED, "d")]
    assert told[0].reason is not None
    assert told[0].reason.value == "bound"
    assert sessions(bench.told(SessionEnded(B), SessionEnded(B))) == [(FREED, "b")]
    bench.clock.now_s += 31
    bench.manager.tick()
    expired = bench.take()
    assert sorted(sessions(expired)) == [(EXPIRED, "c"), (EXPIRED, "d")]
    assert {record.reason.value for record in expired if record.reason} == {"idle"}


def test_only_keys_new_to_the_session_are_announced() -> None:
    bench = Bench()
    first = bench.told(BlocksAssociated(A, {G0: KEYS[:2]}))
    assert sessions(first) == [(OPENED, "a"), (LifecycleKind.BLOCKS_ASSOCIATED, "a")]
    assert list(first[1].keys) == KEYS[:2]
    (second,) = bench.told(BlocksAssociated(A, {G0: KEYS[:4]}))
    assert list(second.keys) == KEYS[2:4]
    assert bench.told(BlocksAssociated(A, {G0: KEYS[:4]})) == []


def test_saved_means_by_all_ranks_and_only_once() -> None:
    bench = Bench()
    assert bench.told(BlocksStored(R0, KEYS[:2]), HostChanged(R0, {KEYS[0]: True})) == []
    told = bench.told(BlocksStored(R1, KEYS[:3]), HostChanged(R1, {KEYS[0]: True}))
    assert moves(told) == [(SAVED, Tier.REMOTE, KEYS[:2]), (SAVED, Tier.HOST, KEYS[:1])]
    assert bench.told(*(BlocksStored(rank, KEYS[:1]) for rank in (R0, R1))) == []


def test_gone_is_announced_by_tier_and_doubt_is_not() -> None:
    bench = Bench()
    for rank in (R0, R1):
        bench.told(HostChanged(rank, dict.fromkeys(KEYS[:2], True)), BlocksStored(rank, KEYS))
    assert moves(bench.told(HostChanged(R0, {KEYS[0]: False}))) == [(EVICTED, Tier.HOST, KEYS[:1])]
    assert bench.told(BlocksDoubted(KEYS[5:])) == []
    assert moves(bench.told(BlocksMissing(KEYS[:2]))) == [
        (EVICTED, Tier.HOST, KEYS[1:2]),
        (EVICTED, Tier.REMOTE, KEYS[:2]),
    ]
    told = bench.told(KeysGone(KEYS, bench.clock.now_s))
    assert moves(told) == [(EVICTED, Tier.REMOTE, KEYS[2:5])]


def test_what_is_only_seen_is_known_but_not_announced() -> None:
    bench = Bench()
    assert bench.told(KeysSeen(KEYS[:2], bench.clock.now_s), BlocksConfirmed(KEYS[2:3])) == []
    stored = bench.manager.residency.is_stored
    assert [stored(key, Tier.REMOTE) for key in KEYS[:4]] == [True, True, True, False]
    assert moves(bench.told(BlocksStored(R0, KEYS[:1]), BlocksStored(R1, KEYS[:1]))) == []


def test_a_reset_takes_all_of_every_tier() -> None:
    bench = Bench()
    told = bench.told(BlocksConfirmed(KEYS), CacheReset())
    assert moves(told) == [(EVICTED, Tier.HOST, []), (EVICTED, Tier.REMOTE, [])]
    assert bench.manager.residency.num_remote_keys == 0


def test_loads_and_edits_are_passed_on() -> None:
    bench = Bench()
    loaded, plain = bench.told(
        BlocksLoaded(Tier.HOST, KEYS[:1], A),
        BlocksLoaded(Tier.REMOTE, KEYS[1:2]),
        BlocksLoaded(Tier.REMOTE, []),
    )
    assert moves([loaded, plain]) == [
        (LifecycleKind.BLOCKS_LOADED, Tier.HOST, KEYS[:1]),
        (LifecycleKind.BLOCKS_LOADED, Tier.REMOTE, KEYS[1:2]),
    ]
    assert (loaded.session_id, plain.session_id) == ("a", None)
    asked, done = bench.told(
        EditAsked(A, EditType.OFFLOAD, "op", 7),
        EditDone(A, EditType.OFFLOAD, Status.PARTIAL, blocks=6),
    )
    assert (asked.edit, asked.status, asked.operation_id, asked.blocks) == (
        EditType.OFFLOAD,
        None,
        "op",
        7,
    )
    assert (done.status, done.operation_id, done.blocks) == (Status.PARTIAL, None, 6)


def test_what_happened_while_nobody_listened_is_not_told_later() -> None:
    bench = Bench()
    bench.stop()
    assert bench.told(SessionOpened(A), *(BlocksStored(rank, KEYS[:2]) for rank in (R0, R1))) == []
    bench.bus.subscribe(bench.got.append)
    told = bench.told(*(BlocksStored(rank, KEYS[:3]) for rank in (R0, R1)))
    assert moves(told) == [(SAVED, Tier.REMOTE, KEYS[2:3])]
    assert told[0].seq == 1
