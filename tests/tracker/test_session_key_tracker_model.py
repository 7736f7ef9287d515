"""SessionKeyTracker against a naive model that recomputes everything by scanning."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

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

MAX_SESSIONS = 4
MAX_KEYS = 9
GROUPS = [GroupId(0), GroupId(1)]
REFS = [
    SessionRef(TenantId(tenant), SessionId(name)) for tenant, name in ("ta", "tb", "tc", "td", "te")
] + [SessionRef(TenantId("other"), SessionId(name)) for name in "ab"]
KEYS = [make_block_key(BlockHash(bytes([n])), GroupId(0)) for n in range(14)]


class Model:
    """Sessions oldest activity first; each a dict from group and index to a key."""

    def __init__(self) -> None:
        self.blocks: dict[SessionRef, dict[tuple[GroupId, int], BlockKey]] = {}
        self.active_s: dict[SessionRef, float] = {}
        self.parents: dict[SessionRef, SessionRef] = {}
        self.orphans: list[BlockKey] = []
        self.forgotten: list[SessionRef] = []
        self.payers: dict[BlockKey, TenantId] = {}
        self.recent: list[TenantId] = []
        """Tenants by when one of their sessions last came, was used or went."""

    def note(self, tenant: TenantId) -> None:
        self.recent = [one for one in self.recent if one != tenant] + [tenant]

    def oldest(self, tenant: TenantId) -> SessionRef:
        return next(ref for ref in self.blocks if ref.tenant == tenant)

    def largest(self, wants: TenantId) -> TenantId:
        """Who has the most sessions: spared is who wants more, then who came last."""
        order = [one for one in self.recent if one != wants] + [wants]
        counts = Counter(ref.tenant for ref in self.blocks)
        return max(order, key=lambda tenant: counts[tenant])

    def pay(self) -> None:
        """After each change: every held key is counted for the tenant that took it first, or,
        when that holds it no more, for the first by name that does."""
        for key in KEYS:
            tenants = {ref.tenant for ref in self.holders(key)}
            if not tenants:
                self.payers.pop(key, None)
            elif self.payers.get(key) not in tenants:
                self.payers[key] = min(tenants)

    def heaviest(self, own: TenantId) -> TenantId:
        """Whose sessions hold the most keys."""
        counts = Counter(self.payers.values())
        return max(counts, key=lambda tenant: (counts[tenant], tenant != own, tenant))

    def holders(self, key: BlockKey) -> set[SessionRef]:
        return {ref for ref, blocks in self.blocks.items() if key in blocks.values()}

    def held(self) -> set[BlockKey]:
        return {key for blocks in self.blocks.values() for key in blocks.values()}

    def num_keys(self) -> int:
        return len(self.held()) + len(self.orphans)

    def ancestors(self, ref: SessionRef) -> list[SessionRef]:
        found = [ref]
        while found[-1] in self.parents:
            found.append(self.parents[found[-1]])
        return found

    def touch(self, ref: SessionRef, now_s: float) -> None:
        if ref in self.blocks:
            self.blocks[ref] = self.blocks.pop(ref)
            self.active_s[ref] = now_s
            self.note(ref.tenant)

    def activate(self, ref: SessionRef, now_s: float) -> None:
        if ref not in self.blocks:
            if len(self.blocks) == MAX_SESSIONS:
                self.forget(self.oldest(self.largest(ref.tenant)))
            self.blocks[ref] = {}
        self.touch(ref, now_s)

    def forget(self, ref: SessionRef) -> None:
        self.forgotten.append(ref)
        self.free(ref)

    def free(self, ref: SessionRef) -> None:
        for group in GROUPS:
            self.cut(ref, group, 0)
        del self.blocks[ref]
        self.note(ref.tenant)
        self.parents = {c: p for c, p in self.parents.items() if ref not in (c, p)}

    def cut(self, ref: SessionRef, group: GroupId, length: int) -> int:
        places = sorted(place for place in self.blocks[ref] if place[0] == group)
        doomed = [place for place in places if place[1] >= length]
        for place in reversed(doomed):
            key = self.blocks[ref].pop(place)
            if not self.holders(key):
                self.orphans.append(key)
            self.pay()
        return len(doomed)

    def give_up(self, ref: SessionRef, group: GroupId, start: int, stop: int) -> list[BlockKey]:
        places = [p for p in self.blocks[ref] if p[0] == group and start <= p[1] < stop]
        lost = []
        for place in sorted(places, reverse=True):
            key = self.blocks[ref].pop(place)
            if key not in self.blocks[ref].values():
                lost.append(key)
            if not self.holders(key):
                self.orphans.append(key)
            self.pay()
        return lost

    def place(self, ref: SessionRef, group: GroupId, start: int, keys: list[BlockKey]) -> None:
        blocks = self.blocks[ref]
        new = {(group, index): key for index, key in enumerate(keys, start)}
        old = {place: blocks[place] for place in new if place in blocks}
        blocks.update(new)
        self.orphans = [key for key in self.orphans if key not in new.values()]
        # What lost its last place, by the first place it had: tail first.
        lost = [key for _, key in sorted(old.items()) if not self.holders(key)]
        self.orphans += reversed(list(dict.fromkeys(lost)))
        self.pay()

    def enforce(self, ref: SessionRef) -> list[BlockKey]:
        dropped = []
        while self.num_keys() > MAX_KEYS:
            if self.orphans:
                dropped.append(self.orphans.pop(0))
            elif (oldest := self.oldest(self.heaviest(ref.tenant))) != ref:
                self.forget(oldest)
            else:
                group, index = max(self.blocks[ref], key=lambda place: (place[1], place[0]))
                self.cut(ref, group, index)
        return dropped


class TrackerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.tracker = SessionKeyTracker(MAX_SESSIONS, MAX_KEYS, lambda: self.now_s)
        self.model = Model()

    def settle(self, outcome: TrackOutcome) -> None:
        assert outcome.forgotten == tuple(self.model.forgotten)
        self.model.forgotten.clear()

    @rule(elapsed_s=st.sampled_from([0.0, 0.5, 10.0]))
    def sleep(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s

    @rule(ref=st.sampled_from(REFS), parent=st.sampled_from([None, *REFS]))
    def open(self, ref: SessionRef, parent: SessionRef | None) -> None:
        model = self.model
        refused = None
        if parent is not None and parent.tenant != ref.tenant:
            refused = Refusal.OTHER_TENANT
        elif parent is not None and ref in model.ancestors(parent):
            refused = Refusal.CYCLE
        outcome = self.tracker.open(ref, parent)
        assert outcome.refused is refused
        assert outcome.dropped_keys == 0
        model.touch(ref, self.now_s)
        if parent is not None and refused is None:
            model.activate(parent, self.now_s)
        model.activate(ref, self.now_s)
        if parent is not None and refused is None:
            model.parents[ref] = parent
        self.settle(outcome)

    @rule(
        ref=st.sampled_from(REFS),
        group=st.sampled_from(GROUPS),
        start=st.integers(0, MAX_KEYS + 2),
        keys=st.lists(st.sampled_from(KEYS), max_size=MAX_KEYS + 2),
    )
    def associate(self, ref: SessionRef, group: GroupId, start: int, keys: list[BlockKey]) -> None:
        outcome = self.tracker.associate(ref, group, start, keys)
        self.model.activate(ref, self.now_s)
        fitting = [key for index, key in enumerate(keys, start) if index < MAX_KEYS]
        self.model.place(ref, group, start, fitting)
        orphans = self.model.enforce(ref)
        assert outcome.orphans == tuple(orphans)
        assert outcome.dropped_keys == len(keys) - len(fitting) + len(orphans)
        assert outcome.refused is None
        self.settle(outcome)

    @rule(ref=st.sampled_from(REFS), start=st.integers(0, 3), first=st.integers(0, len(KEYS) - 3))
    def associate_a_run(self, ref: SessionRef, start: int, first: int) -> None:
        """Few keys in order, as in use: sessions share prefixes and rarely fill the bound."""
        self.associate(ref, GROUPS[0], start, KEYS[first : first + 3])

    @rule(ref=st.sampled_from(REFS), group=st.sampled_from(GROUPS), length=st.integers(-1, 9))
    def truncate(self, ref: SessionRef, group: GroupId, length: int) -> None:
        lost = self.tracker.truncate(ref, group, length)
        assert lost == (self.model.cut(ref, group, length) if ref in self.model.blocks else 0)

    @rule(
        ref=st.sampled_from(REFS),
        group=st.sampled_from(GROUPS),
        start=st.integers(-1, 9),
        stop=st.integers(-1, 11),
    )
    def give_up(self, ref: SessionRef, group: GroupId, start: int, stop: int) -> None:
        lost = self.tracker.give_up(ref, group, start, stop)
        known = ref in self.model.blocks
        assert lost == (self.model.give_up(ref, group, start, stop) if known else [])

    @rule(ref=st.sampled_from(REFS))
    def touch(self, ref: SessionRef) -> None:
        assert self.tracker.touch(ref) is (ref in self.model.blocks)
        self.model.touch(ref, self.now_s)

    @rule(ref=st.sampled_from(REFS))
    def free_session(self, ref: SessionRef) -> None:
        known = ref in self.model.blocks
        assert self.tracker.free_session(ref) is known
        if known:
            self.model.free(ref)

    @rule(ref=st.sampled_from(REFS))
    def free_session_tree(self, ref: SessionRef) -> None:
        model = self.model
        family = {node for node in model.blocks if ref in model.ancestors(node)}
        freed = self.tracker.free_session_tree(ref)
        assert len(freed) == len(family)
        assert set(freed) == family
        for node in freed:
            assert node not in model.parents.values(), "a parent was freed before its child"
            model.free(node)

    @rule(limit=st.integers(0, 4))
    def take_orphans(self, limit: int) -> None:
        assert self.tracker.take_orphans(limit) == self.model.orphans[:limit]
        del self.model.orphans[:limit]

    @invariant()
    def sessions_agree(self) -> None:
        self.tracker.check_integrity()
        assert self.tracker.num_sessions == len(self.model.blocks)
        for ref in REFS:
            blocks = self.model.blocks.get(ref, {})
            for group in GROUPS:
                length = max((index + 1 for g, index in blocks if g == group), default=0)
                expected = [blocks.get((group, index)) for index in range(length)]
                assert list(self.tracker.blocks(ref, group)) == expected
                listed = dict.fromkeys(key for key in expected if key is not None)
                assert self.tracker.keys_of(ref, group) == list(listed)
            assert set(self.tracker.keys_of(ref)) == set(blocks.values())
            assert self.tracker.parent_of(ref) == self.model.parents.get(ref)
            children = {child for child, parent in self.model.parents.items() if parent == ref}
            assert set(self.tracker.children_of(ref)) == children
            active_s = self.model.active_s[ref] if ref in self.model.blocks else None
            assert self.tracker.idle_since_s(ref) == active_s

    @invariant()
    def keys_agree(self) -> None:
        assert self.tracker.num_keys == self.model.num_keys() <= MAX_KEYS
        references = 0
        for key in KEYS:
            holders = self.model.holders(key)
            references += len(holders)
            assert self.tracker.sessions_of(key) == holders
            assert self.tracker.is_held(key) == bool(holders)
            assert self.tracker.state_of(key) is self.expected_state(key)
        assert self.tracker.num_references == references

    def expected_state(self, key: BlockKey) -> KeyState | None:
        holders = len(self.model.holders(key))
        if holders == 0:
            return KeyState.ORPHANED if key in self.model.orphans else None
        return KeyState.TRACKED if holders == 1 else KeyState.SHARED

    def teardown(self) -> None:
        """Everything that was ever counted can be given back: no record stays behind."""
        for ref in REFS:
            self.tracker.free_session(ref)
        self.tracker.take_orphans(MAX_KEYS)
        assert self.tracker.num_sessions == 0
        assert self.tracker.num_keys == 0
        assert self.tracker.num_references == 0
        assert not self.tracker._tree.linked()
        self.tracker.check_integrity()


TestTrackerMachine = TrackerMachine.TestCase
TestTrackerMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
