"""Sessions with hints on vLLM's real pool, against plain dictionaries."""

import math
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spm.agent_hint import AgentHint, BlockRange, CacheControl, Edit, EditType, SessionState
from spm.metrics import Metric, metric_key
from spm.sam import block_table
from spm.sam.policy import EXPECTED, decide
from spm.sam.restoring import RestoredBlock
from spm.sam.zones import FIRST_PROTECTED, PROTECTED, Zone
from tests.spm.sam.kit import Rig, Running, ref_of
from tests.spm.sam.naive import ORDINARY, NaivePool, Place
from tracker.ids import SessionRef

NUM_BLOCKS = 10
REFS = [ref_of("a"), ref_of("b"), ref_of("c", "other")]
SESSIONS = st.sampled_from(REFS)
PATHS = st.lists(st.integers(1, 2), min_size=1, max_size=4)
CONTROLS = st.builds(
    CacheControl,
    st.sampled_from([0.0, 0.5, 1.0, 3.0, 3.75, 40.0]),
    st.sampled_from([None, None, 0, 1, 3]),
)
HINTS = st.builds(
    AgentHint,
    cache_control=st.none() | CONTROLS,
    expected_resume_s=st.sampled_from([None, 0.5, 30.0, 4000.0]),
    state=st.sampled_from([None, None, *SessionState]),
)


class HintedMachine(RuleBasedStateMachine):
    share = tenant_share = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(NUM_BLOCKS, share=self.share, tenant_share=self.tenant_share)
        self.naive = NaivePool(self.rig.pool.blocks)
        self.naive.now_s = self.rig.clock.now_s
        self.running: list[Running] = []
        self.waiting: list[Running] = []
        self.loose: list[int] = []
        self.noticed = math.floor(self.rig.clock.now_s)
        """The last second at which expiry may have been noticed."""

    # --- vLLM ---------------------------------------------------------------------------

    def key(self, block_id: int) -> Place:
        return self.naive.blocks[block_id].place(self.naive.now_s)

    def allocated(self, ids: list[int]) -> None:
        """What was taken goes before what was left, by the clock and not by the last tick."""
        self.noticed = math.floor(self.naive.now_s)
        left = [i for i in self.rig.order() if not self.naive.blocks[i].vague]
        taken = [i for i in ids if not self.naive.blocks[i].vague]
        if left and taken and self.share == 1.0:
            assert max(map(self.key, taken)) <= min(map(self.key, left))
        for block_id in ids:
            self.naive.allocated(block_id)

    def serve(self, running: Running) -> bool:
        hits = self.rig.hits(running.request)
        missing = len(running.request.block_hashes) - len(hits)
        free = self.rig.pool.get_num_free_blocks() - sum(block.ref_cnt == 0 for block in hits)
        if missing > free:
            return False
        self.rig.serve(running)
        assert running.blocks[: len(hits)] == hits
        for block in hits:
            self.naive.touched(block.block_id)
        self.allocated(running.ids[len(hits) :])
        return True

    def free(self, running: Running) -> None:
        self.rig.free(running)
        for block_id in reversed(running.ids):
            self.naive.released(block_id)

    @rule(path=PATHS)
    def start(self, path: list[int]) -> None:
        if len(self.running) < 5:
            running = self.rig.request(*path)
            if self.serve(running):
                self.running.append(running)

    @rule(n=st.integers(1, 4))
    def take(self, n: int) -> None:
        if n <= self.rig.pool.get_num_free_blocks():
            ids = [block.block_id for block in self.rig.pool.get_new_blocks(n)]
            self.allocated(ids)
            self.loose += ids

    @precondition(lambda self: self.loose)
    @rule()
    def give_back(self) -> None:
        self.rig.pool.free_blocks([self.rig.pool.blocks[i] for i in self.loose])
        for block_id in self.loose:
            self.naive.released(block_id)
        self.loose = []

    @rule(ids=st.sets(st.integers(1, NUM_BLOCKS - 1), max_size=3))
    def evict_blocks(self, ids: set[int]) -> None:
        self.rig.pool.evict_blocks(ids)

    @rule()
    def reset(self) -> None:
        if self.rig.pool.reset_prefix_cache():
            self.rig.sam.tick(int(self.rig.clock.now_s))
            self.noticed = math.floor(self.naive.now_s)
            self.naive.reset()

    # --- sessions -----------------------------------------------------------------------

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ref=SESSIONS, hint=st.none() | HINTS)
    def end(self, data: st.DataObject, ref: SessionRef, hint: AgentHint | None) -> None:
        running = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        said = decide(hint, 10.0) if hint else self.naive.standing(ref)
        before = [block.ref_cnt for block in self.rig.pool.blocks]
        retention, _ = self.rig.sam.finished(ref, hint, running.arrived_s, [running.blocks])
        assert retention == said
        assert [block.ref_cnt for block in self.rig.pool.blocks] == before
        self.naive.associate(ref, running.arrived_s, running.blocks, said, ended=True)
        if said.zone is Zone.FINISHED:
            self.naive.finish(ref, own_refs=1)
        self.free(running)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Before anything was loaded: its blocks are nobody's."""
        self.free(self.running.pop(data.draw(st.integers(0, len(self.running) - 1))))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ref=SESSIONS, hint=HINTS)
    def preempt(self, data: st.DataObject, ref: SessionRef, hint: AgentHint) -> None:
        running = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.free(running)
        cached = self.rig.hits(running.request)
        self.rig.sam.preempted(ref, hint, running.arrived_s, [cached])
        retention = decide(hint, 10.0)
        if retention.zone is not Zone.FINISHED:
            self.naive.associate(ref, running.arrived_s, cached, retention, ended=False)
        self.waiting.append(running)

    @precondition(lambda self: self.waiting)
    @rule()
    def resume(self) -> None:
        if self.serve(self.waiting[0]):
            self.running.append(self.waiting.pop(0))

    @rule(ref=SESSIONS, hint=HINTS)
    def retain(self, ref: SessionRef, hint: AgentHint) -> None:
        retention, _ = self.rig.sam.retain(ref, hint)
        if retention.zone is Zone.FINISHED:
            self.naive.finish(ref)
        self.naive.retain(ref, retention)

    @rule(ref=SESSIONS, path=PATHS, skip=st.integers(0, 2), renew=st.booleans())
    def restore(self, ref: SessionRef, path: list[int], skip: int, renew: bool) -> None:
        """What is there of a chain, from some block on, is claimed without a request."""
        hits = list(enumerate(self.rig.hits(self.rig.request(*path).request)))[skip:]
        places = [RestoredBlock(0, index, block) for index, block in hits]
        standing = self.naive.standing(ref)
        retention = standing if standing.zone in PROTECTED else EXPECTED
        assert self.rig.sam.restored(ref, places, renew=renew) == len(places)
        self.naive.restore(ref, retention, hits, renew)

    @rule(ref=SESSIONS, start=st.integers(0, 4), length=st.integers(1, 4))
    def demote(self, ref: SessionRef, start: int, length: int) -> None:
        self.rig.sam.demoted(ref, BlockRange(start, start + length))
        self.naive.evict(ref, range(start, start + length), Zone.DEMOTED)

    @rule(ref=SESSIONS, start=st.integers(0, 4), length=st.integers(1, 4))
    def evict(self, ref: SessionRef, start: int, length: int) -> None:
        self.rig.sam.edit(ref, Edit(EditType.EVICT, BlockRange(start, start + length)))
        self.naive.evict(ref, range(start, start + length))

    @rule(ref=SESSIONS, told=st.booleans())
    def close(self, ref: SessionRef, told: bool) -> None:
        self.rig.sam.closed(ref, told=told)
        self.naive.forget(ref, Zone.FINISHED if told else Zone.ORDINARY)

    # --- time ---------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.25, 0.5, 1.0, 2.5, 30.0]))
    def pass_time(self, seconds: float) -> None:
        """No tick: it is late, or was skipped."""
        self.rig.clock.now_s += seconds
        self.naive.now_s = self.rig.clock.now_s

    @rule()
    def tick(self) -> None:
        self.rig.sam.tick(int(self.rig.clock.now_s))
        now = math.floor(self.naive.now_s)
        if now > self.noticed and block_table._RELIEF_BLOCKS > NUM_BLOCKS:
            for zone, second, ids in self.rig.segments():
                assert zone not in PROTECTED or second > now or not ids
        self.noticed = now

    # --- what must hold -----------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        self.rig.claims.check_integrity()
        assert self.rig.claims.num_records == self.naive.records()
        counts = [block.ref_cnt for block in self.rig.pool.blocks if not block.is_null]
        assert counts == [block.refs for block in self.naive.blocks[1:]]

    @invariant()
    def segments_are_in_order(self) -> None:
        segments = self.rig.segments()
        assert [s[:2] for s in segments] == sorted(s[:2] for s in segments)
        order = [i for _, _, ids in segments for i in ids]
        assert order == self.rig.order()
        held = Counter(i for r in self.running for i in r.ids) + Counter(self.loose)
        assert sorted(order) == [i for i in range(1, NUM_BLOCKS) if not held[i]]

    @invariant()
    def blocks_are_where_their_claims_put_them(self) -> None:
        for zone, second, ids in self.rig.segments():
            for block_id in ids:
                self.check_place(block_id, (zone, second))

    def check_place(self, block_id: int, place: Place) -> None:
        block = self.naive.blocks[block_id]
        now_s = self.naive.now_s
        unnoticed = place in block.expired(now_s) and place > block.place(now_s)
        assert block.vague or unnoticed or place == block.place(now_s)

    @invariant()
    def protection_is_counted(self) -> None:
        live, maybe = self.naive.protected()
        gauges = self.rig.sam.gauges()
        counted = gauges[metric_key(Metric.SAM_PROTECTED_BLOCKS)]
        assert counted <= int(self.share * NUM_BLOCKS)
        if self.share == 1.0 and not any(block.vague for block in self.naive.blocks):
            assert live <= counted <= maybe


class CappedMachine(HintedMachine):
    """The caps bite: protection is lost, never more than that, and never to the wrong zone."""

    share, tenant_share = 0.5, 0.3

    def check_place(self, block_id: int, place: Place) -> None:
        block = self.naive.blocks[block_id]
        possible = {block.place(self.naive.now_s), *block.expired(self.naive.now_s)}
        possible |= set(block.claims.values())
        if any(zone in PROTECTED for zone, _ in possible):
            possible |= {(Zone.ASSOCIATED, 0), ORDINARY}
        assert block.vague or place in possible

    @invariant()
    def tenants_keep_to_their_caps(self) -> None:
        charged: Counter[int] = Counter()
        for holder in self.rig.table.holders:
            if holder is not None and holder.target >= FIRST_PROTECTED:
                charged[holder.tenant] += 1
        assert max(charged.values(), default=0) <= int(self.tenant_share * NUM_BLOCKS)


class BackloggedMachine(HintedMachine):
    """Expired blocks are moved two at a time, so that some are always left for later."""

    def __init__(self) -> None:
        super().__init__()
        self.relief, block_table._RELIEF_BLOCKS = block_table._RELIEF_BLOCKS, 2

    def teardown(self) -> None:
        block_table._RELIEF_BLOCKS = self.relief


TestHintedMachine = HintedMachine.TestCase
TestCappedMachine = CappedMachine.TestCase
TestBackloggedMachine = BackloggedMachine.TestCase
for case in (TestHintedMachine, TestCappedMachine, TestBackloggedMachine):
    case.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
