"""The manager under events in any order, against a list of deadlines."""

import math
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from spm.agent_hint import BlockRange
from spm.config import SpmConfig
from spm.events import (
    BlocksAssociated,
    BlocksConfirmed,
    BlocksDoubted,
    BlocksMissing,
    BlocksStored,
    CacheReset,
    HostChanged,
    KeysGone,
    KeysSeen,
    SessionEnded,
    SessionEvicted,
    SessionOpened,
)
from spm.hints import DEFAULT_TENANT
from spm.keys import Rank
from spm.manager import SessionAwarePoolingManager
from spm.metrics import Counters, Metric, metric_key
from tests.clock import FakeClock
from tracker.ids import BlockHash, GroupId, SessionId, SessionRef, make_block_key

TTL_S, MAX_SESSIONS, MAX_KEYS = 30, 4, 6
KEYS = [make_block_key(BlockHash(bytes([i]) * 4), GroupId(0)) for i in range(9)]
REFS = [SessionRef(DEFAULT_TENANT, SessionId(str(i))) for i in range(6)]
SESSIONS = st.sampled_from(REFS)
BLOCKS = st.lists(st.sampled_from(KEYS), max_size=8)
GROUPS = st.sampled_from([GroupId(0), GroupId(1)])
BLOCK_EVENTS = st.one_of(
    st.builds(
        HostChanged,
        st.integers(0, 1).map(Rank),
        st.dictionaries(st.sampled_from(KEYS), st.booleans(), max_size=4),
    ),
    st.builds(BlocksStored, st.integers(0, 1).map(Rank), BLOCKS),
    st.builds(BlocksConfirmed, BLOCKS),
    st.builds(BlocksMissing, BLOCKS),
    st.builds(BlocksDoubted, BLOCKS),
    st.builds(KeysSeen, BLOCKS, st.sampled_from([99.0, 120.0])),
    st.builds(KeysGone, BLOCKS, st.sampled_from([99.0, 120.0])),
    st.just(CacheReset()),
)


class ManagerMachine(RuleBasedStateMachine):
    """The model knows when each session was last active; the tracker's own model test
    covers which keys it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.counters = Counters()
        config = SpmConfig.from_extra_config(
            {"session_ttl_s": TTL_S, "max_sessions": MAX_SESSIONS, "max_keys": MAX_KEYS}
        )
        self.manager = SessionAwarePoolingManager(config, 2, self.counters, self.clock)
        self.deadlines_s: dict[SessionRef, float] = {}  # in the order of activity
        self.forgotten: dict[str, float] = {"expired": 0, "bound": 0}

    def is_open(self, ref: SessionRef) -> bool:
        return self.manager.tracker.idle_since_s(ref) is not None

    def snapshot(self) -> Any:  # noqa: ANN401
        tracker = self.manager.tracker
        return [(tracker.parent_of(ref), tracker.keys_of(ref), self.is_open(ref)) for ref in REFS]

    def apply(self, event: Any) -> None:  # noqa: ANN401
        """Handle it twice: the second time changes nothing, except that a bound may bite."""
        self.manager.handle(event)
        before = self.snapshot()
        self.manager.handle(event)
        assert self.snapshot() == before

    def now_active(self, *refs: SessionRef) -> None:
        for ref in refs:
            self.deadlines_s.pop(ref, None)
            self.deadlines_s[ref] = self.clock.now_s + TTL_S
        self.give_way(refs)

    def give_way(self, active: tuple[SessionRef, ...]) -> None:
        """Sessions may go for a bound, the one idle longest first, never an active one."""
        gone = [ref for ref in self.deadlines_s if not self.is_open(ref)]
        assert gone == list(self.deadlines_s)[: len(gone)]
        assert not set(gone) & set(active)
        for ref in gone:
            del self.deadlines_s[ref]
        self.forgotten["bound"] += len(gone)

    @rule(ref=SESSIONS)
    def open_session(self, ref: SessionRef) -> None:
        self.apply(SessionOpened(ref))
        self.now_active(ref)

    @rule(ref=SESSIONS, parent=SESSIONS)
    def open_child(self, ref: SessionRef, parent: SessionRef) -> None:
        self.apply(SessionOpened(ref, parent))
        if self.manager.tracker.parent_of(ref) == parent:
            self.now_active(parent, ref)
        else:
            self.now_active(ref)

    @rule(ref=SESSIONS, group=GROUPS, keys=BLOCKS)
    def associate(self, ref: SessionRef, group: GroupId, keys: list[Any]) -> None:
        self.apply(BlocksAssociated(ref, {group: keys}))
        self.now_active(ref)
        assert set(self.manager.tracker.keys_of(ref, group)) >= set(keys[:1])

    @rule(ref=SESSIONS, tree=st.booleans())
    def end(self, ref: SessionRef, tree: bool) -> None:
        children = self.manager.tracker.children_of(ref)
        self.apply(SessionEnded(ref, tree))
        assert not self.is_open(ref)
        assert all(self.is_open(child) != tree for child in children)
        self.deadlines_s = {r: at for r, at in self.deadlines_s.items() if self.is_open(r)}

    @rule(ref=SESSIONS, start=st.integers(0, 3), blocks=st.integers(1, 3))
    def evict(self, ref: SessionRef, start: int, blocks: int) -> None:
        span = BlockRange(start, start + blocks)
        self.apply(SessionEvicted(ref, span, (2, 1)))
        first, second = (self.manager.tracker.blocks(ref, GroupId(group)) for group in (0, 1))
        assert not any(first[2 * span.start : 2 * span.stop])
        assert not any(second[span.start : span.stop])

    @rule(event=BLOCK_EVENTS)
    def blocks(self, event: Any) -> None:  # noqa: ANN401
        before = self.snapshot()
        self.manager.handle(event)
        assert self.snapshot() == before, "what is stored where is nothing to do with sessions"

    @rule(elapsed_s=st.sampled_from([0.0, 0.5, 7.25, 29.0, 31.0, 10_000.0]))
    def sleep_and_tick(self, elapsed_s: float) -> None:
        self.clock.now_s += elapsed_s
        self.manager.tick()
        due = [ref for ref, at in self.deadlines_s.items() if math.ceil(at) <= self.clock.now_s]
        for ref in due:
            del self.deadlines_s[ref]
        self.forgotten["expired"] += len(due)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.manager.check_integrity()
        assert {ref for ref in REFS if self.is_open(ref)} == self.deadlines_s.keys()
        assert self.manager.tracker.num_sessions == len(self.deadlines_s) <= MAX_SESSIONS
        assert self.manager.tracker.num_keys <= MAX_KEYS
        assert self.manager.residency.num_remote_keys <= MAX_KEYS
        counted = self.counters.drain()
        for reason, count in self.forgotten.items():
            assert counted.get(metric_key(Metric.FORGOTTEN, reason), 0) == count
            self.forgotten[reason] = 0


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
