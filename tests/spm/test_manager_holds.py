"""What the keep-alive learns from the manager: keys to hold, to let go of and to delete."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from spm.agent_hint import BlockRange
from spm.config import SpmConfig
from spm.errors import IntegrityError
from spm.events import (
    BlocksAssociated,
    RequestEnded,
    RequestStarted,
    SessionEnded,
    SessionEvicted,
    SessionOpened,
    SessionRefreshed,
)
from spm.hints import DEFAULT_TENANT
from spm.manager import SessionAwarePoolingManager
from spm.metrics import Counters
from tests.clock import FakeClock
from tracker.ids import BlockHash, BlockKey, GroupId, SessionId, SessionRef, make_block_key

G0, G1 = GroupId(0), GroupId(1)
TTL_S = 30
A, B, C = REFS = [SessionRef(DEFAULT_TENANT, SessionId(name)) for name in "abc"]
KEYS = [make_block_key(BlockHash(bytes([i]) * 4), G0) for i in range(10)]
REMOTE = {"url": "redis://127.0.0.1:1"}


class Bench:
    """A manager with a remote store and a clock."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401
        self.clock = FakeClock()
        config = SpmConfig.from_extra_config(
            {"session_ttl_s": TTL_S, "max_sessions": 3, "remote": REMOTE, **settings}
        )
        self.manager = SessionAwarePoolingManager(config, 1, Counters(), self.clock)

    def handle(self, *events: Any) -> None:  # noqa: ANN401
        for event in events:
            self.manager.handle(event)
            self.manager.check_integrity()

    def tick_after(self, elapsed_s: float) -> None:
        self.clock.now_s += elapsed_s
        self.manager.tick()
        self.manager.check_integrity()


def many_keys(count: int) -> list[BlockKey]:
    return [make_block_key(BlockHash(i.to_bytes(4, "big")), G0) for i in range(count)]


def test_a_turn_says_once_which_keys_to_hold_and_until_when() -> None:
    bench = Bench()
    bench.handle(SessionOpened(A), RequestStarted(A))
    bench.clock.now_s += 5
    bench.handle(BlocksAssociated(A, {G0: KEYS[:3], G1: KEYS[3:4]}), RequestEnded(A, keep_s=600))
    assert bench.manager.take_holds() == [(KEYS[:4], 105 + 600)]
    assert bench.manager.holding(A) == 705
    assert bench.manager.take_holds() == []


def test_speaking_of_a_session_moves_its_hold_and_a_promise_stands() -> None:
    bench = Bench()
    bench.handle(BlocksAssociated(A, {G0: KEYS[:1]}))
    assert bench.manager.take_holds() == [(KEYS[:1], 130)]
    bench.handle(SessionRefreshed(A, keep_s=300))
    bench.clock.now_s += 100
    bench.handle(SessionRefreshed(A), SessionRefreshed(B))
    assert bench.manager.take_holds() == [(KEYS[:1], 400)]
    assert bench.manager.holding(B) == 0


def test_the_hold_of_a_busy_session_and_its_parent_goes_on() -> None:
    bench = Bench()
    bench.handle(BlocksAssociated(B, {G0: KEYS[:2]}), BlocksAssociated(A, {G0: KEYS[2:3]}))
    bench.handle(SessionOpened(A, parent=B), RequestStarted(A))
    assert len(bench.manager.take_holds()) == 2
    bench.tick_after(31)
    assert sorted(bench.manager.take_holds()) == [(KEYS[:2], 161), (KEYS[2:3], 161)]


def test_an_expired_session_releases_what_no_other_holds_and_deletes_nothing() -> None:
    bench = Bench()
    bench.handle(BlocksAssociated(A, {G0: KEYS[:3]}))
    bench.clock.now_s += 20
    bench.handle(BlocksAssociated(B, {G0: KEYS[:1]}))
    bench.tick_after(11)
    assert bench.manager.take_released() == [KEYS[2], KEYS[1]]
    assert bench.manager.take_released() == []
    assert bench.manager.take_deletable() == []
    assert bench.manager.take_holds() == [(KEYS[:1], 150)], "no word of the one that expired"


def test_an_ended_session_gives_up_its_unshared_keys_at_once() -> None:
    bench = Bench()
    bench.handle(BlocksAssociated(A, {G0: KEYS[:3]}), BlocksAssociated(B, {G0: KEYS[:1]}))
    bench.handle(SessionEnded(A))
    assert bench.manager.take_deletable() == KEYS[1:3]
    assert bench.manager.take_released() == []
    bench.tick_after(0)
    assert bench.manager.take_released() == [KEYS[2], KEYS[1]]
    bench.handle(SessionEnded(A))
    assert bench.manager.take_deletable() == []


def test_a_tree_gives_up_what_only_its_members_share() -> None:
    bench = Bench()
    bench.handle(SessionOpened(B, parent=A), BlocksAssociated(C, {G0: KEYS[:1]}))
    bench.handle(BlocksAssociated(A, {G0: KEYS[:3]}), BlocksAssociated(B, {G0: KEYS[:4]}))
    bench.handle(SessionEnded(A, tree=True))
    assert sorted(bench.manager.take_deletable()) == KEYS[1:4]


def test_a_key_held_again_is_neither_released_nor_deleted() -> None:
    bench = Bench()
    bench.handle(BlocksAssociated(A, {G0: KEYS[:3]}), SessionEnded(A))
    bench.handle(BlocksAssociated(B, {G0: KEYS[1:2]}))
    bench.tick_after(0)
    bench.handle(BlocksAssociated(B, {G0: KEYS[1:3]}))
    assert bench.manager.take_deletable() == KEYS[:1]
    assert bench.manager.take_released() == KEYS[:1]
    bench.tick_after(31)
    assert bench.manager.take_deletable() == [], "the second time nobody gave it up"
    assert bench.manager.take_released() == [KEYS[2], KEYS[1]]


def test_an_evicted_range_is_given_up_by_group_and_the_rest_held() -> None:
    bench = Bench()
    small, large = KEYS[:6], KEYS[6:9]
    bench.handle(BlocksAssociated(A, {G0: small, G1: large}), BlocksAssociated(B, {G0: small[:3]}))
    bench.handle(SessionEvicted(A, BlockRange(1, 2), scales=(2, 1)))
    tracker = bench.manager.tracker
    assert list(tracker.blocks(A, G0)) == [*small[:2], None, None, *small[4:]]
    assert list(tracker.blocks(A, G1)) == [large[0], None, large[2]]
    assert bench.manager.take_deletable() == [small[3], large[1]]
    bench.handle(SessionEvicted(A, None, scales=(2, 1)))
    assert tracker.keys_of(A) == []
    assert tracker.idle_since_s(A) is not None
    assert sorted(bench.manager.take_deletable()) == sorted([*small[4:], large[0], large[2]])
    bench.handle(SessionEvicted(C, None, scales=(2, 1)))
    assert bench.manager.take_deletable() == []


def test_keys_dropped_for_the_bound_are_released() -> None:
    bench = Bench(max_keys=4)
    bench.handle(BlocksAssociated(A, {G0: KEYS[:3]}), BlocksAssociated(B, {G0: KEYS[3:6]}))
    assert bench.manager.take_released() == KEYS[1:3][::-1]
    assert bench.manager.take_deletable() == []
    bench.tick_after(0)
    assert bench.manager.take_released() == KEYS[:1]


def test_much_is_handed_out_in_parts() -> None:
    bench = Bench(max_keys=20_000)
    many = many_keys(10_000)
    bench.handle(BlocksAssociated(A, {G0: many}), BlocksAssociated(B, {G0: many[:1]}))
    assert [len(keys) for keys, _ in bench.manager.take_holds()] == [10_000]
    assert [len(keys) for keys, _ in bench.manager.take_holds()] == [1]
    bench.handle(SessionEnded(A), SessionEnded(B))
    deletable = [bench.manager.take_deletable() for _ in range(4)]
    assert [len(part) for part in deletable] == [4096, 4096, 10_000 - 8192, 0]
    bench.tick_after(0)
    assert bench.manager.has_backlog
    bench.tick_after(0)
    bench.tick_after(0)
    assert not bench.manager.has_backlog
    released = [bench.manager.take_released() for _ in range(4)]
    assert [len(part) for part in released] == [4096, 4096, 10_000 - 8192, 0]
    assert {key for part in released for key in part} == set(many)


def test_what_nobody_takes_is_bounded() -> None:
    bench = Bench(max_keys=4)
    for start in range(0, 8, 2):
        bench.handle(BlocksAssociated(A, {G0: KEYS[start : start + 2]}), SessionEnded(A))
        bench.tick_after(0)
    assert sorted(bench.manager.take_deletable()) == KEYS[4:8]
    assert sorted(bench.manager.take_released()) == KEYS[4:8]


def test_without_a_remote_store_nothing_is_gathered() -> None:
    bench = Bench(remote=None)
    bench.handle(BlocksAssociated(A, {G0: KEYS[:3]}), RequestEnded(A))
    assert bench.manager.take_holds() == []
    bench.handle(SessionEnded(A))
    bench.tick_after(0)
    assert bench.manager.take_released() == bench.manager.take_deletable() == []


def test_check_integrity_sees_a_held_key_among_the_released() -> None:
    bench = Bench()
    bench.handle(BlocksAssociated(A, {G0: KEYS[:1]}))
    bench.manager._holds.released(KEYS[:1])
    with pytest.raises(IntegrityError, match="a session holds a key in it"):
        bench.manager.check_integrity()


class HoldsMachine(RuleBasedStateMachine):
    """A keep-alive that takes its news late, and a model of who holds what: one group, two
    blocks in a logical one."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.manager = self.bench.manager
        self.blocks: dict[SessionRef, list[BlockKey | None]] = {}
        self.orphaned: set[BlockKey] = set()
        self.released: set[BlockKey] = set()
        self.deletable: set[BlockKey] = set()
        self.kept: dict[BlockKey, float] = {}

    def held(self) -> set[BlockKey]:
        return {key for keys in self.blocks.values() for key in keys if key is not None}

    def lose(self, before: set[BlockKey], *, asked: bool) -> None:
        gone = before - self.held()
        self.orphaned |= gone
        if asked:
            self.deletable |= gone

    def settle(self) -> None:
        """Sessions forgotten for a bound are known from the tracker; other tests say which."""
        before = self.held()
        for ref in list(self.blocks):
            if self.manager.tracker.idle_since_s(ref) is None:
                del self.blocks[ref]
        self.lose(before, asked=False)

    @rule(ref=st.sampled_from(REFS), keys=st.lists(st.sampled_from(KEYS), max_size=6))
    def associate(self, ref: SessionRef, keys: list[BlockKey]) -> None:
        self.bench.handle(BlocksAssociated(ref, {G0: keys}), RequestEnded(ref))
        self.settle()
        before = self.held()
        old = self.blocks.get(ref, [])
        both = zip(old, keys, strict=False)
        stays = all(o is None or o == new for o, new in both)  # else the old chain was left
        self.blocks[ref] = [*keys, *(old[len(keys) :] if stays else [])]
        self.lose(before, asked=False)
        for known in (self.orphaned, self.released, self.deletable):
            known.difference_update(keys)

    @rule(ref=st.sampled_from(REFS), keep_s=st.sampled_from([0.0, 100.0]))
    def refresh(self, ref: SessionRef, keep_s: float) -> None:
        self.bench.handle(SessionRefreshed(ref, keep_s))

    @rule(ref=st.sampled_from(REFS))
    def end(self, ref: SessionRef) -> None:
        before = self.held()
        self.bench.handle(SessionEnded(ref))
        self.blocks.pop(ref, None)
        self.lose(before, asked=True)

    @rule(ref=st.sampled_from(REFS), start=st.integers(0, 3), blocks=st.integers(1, 2))
    def evict(self, ref: SessionRef, start: int, blocks: int) -> None:
        before = self.held()
        self.bench.handle(SessionEvicted(ref, BlockRange(start, start + blocks), (2,)))
        keys = self.blocks.get(ref, [])
        for index in range(2 * start, min(2 * (start + blocks), len(keys))):
            keys[index] = None
        while keys and keys[-1] is None:
            keys.pop()
        self.lose(before, asked=True)

    @rule(elapsed_s=st.sampled_from([0.0, 10.0, 31.0]))
    def tick(self, elapsed_s: float) -> None:
        self.bench.tick_after(elapsed_s)
        self.settle()
        self.released |= self.orphaned
        self.orphaned.clear()

    @rule()
    def keep_alive_takes_news(self) -> None:
        for keys, until_s in self.manager.take_holds():
            self.kept.update({key: max(self.kept.get(key, 0.0), until_s) for key in keys})
        for key in self.manager.take_released():
            self.released.remove(key)
            self.kept.pop(key, None)
        assert not self.released
        assert set(self.manager.take_deletable()) == self.deletable
        self.deletable.clear()
        assert self.held() <= self.kept.keys() <= self.held() | self.orphaned
        for ref, blocks in self.blocks.items():
            until_s = self.manager.holding(ref)
            assert all(self.kept[key] >= until_s for key in blocks if key is not None)

    @invariant()
    def the_tracker_agrees(self) -> None:
        for ref in REFS:
            assert list(self.manager.tracker.blocks(ref, G0)) == self.blocks.get(ref, [])


TestHoldsMachine = HoldsMachine.TestCase
TestHoldsMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
