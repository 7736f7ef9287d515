"""SchedulerHalf driven through its hooks in every order vLLM could, on vLLM's real cache
manager: answers late, twice, failed or of an older epoch, hooks called twice, resets."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from connectors.metadata import (
    BlockMove,
    LayoutHandshake,
    LoadCommand,
    LoadFailure,
    LoadResult,
    RankReport,
    StepCommands,
    WorkerReport,
)
from connectors.scheduler.half import SchedulerHalf
from spm.config import SpmConfig
from spm.keys import Fingerprint, Rank
from spm.metrics import Counters
from tests.clock import FakeClock
from tests.connectors.scheduler.kit import geometry_of, keys_of
from tests.connectors.scheduler.vllm_parts import (
    FULL,
    HYBRID,
    MAX_MODEL_LEN,
    Attention,
    kv_cache_config,
    make_request,
)
from tracker.ids import BlockKey

NUM_BLOCKS = 40
VALUE_BYTES = 1 << 14
FAILURES = [LoadFailure.MISSING, LoadFailure.STORE, LoadFailure.CANCELLED]

GONE = {LoadFailure.MISSING}


@dataclass
class Load:
    """A command and the ranks that have not answered it."""

    command: LoadCommand
    epoch: bytes
    ranks: list[Rank]
    failed: bool = False


def prompt_of(number: int, length: int) -> list[int]:
    return [3 + number] * 8 + list(range(3, 3 + length))


class HalfMachine(RuleBasedStateMachine):
    @initialize(model=st.sampled_from([FULL, HYBRID]), world_size=st.integers(1, 2))
    def start(self, model: tuple[Attention, ...], world_size: int) -> None:
        self.geometry = geometry_of(model)
        self.ranks = [Rank(rank) for rank in range(world_size)]
        self.manager = KVCacheManager(kv_cache_config(model, NUM_BLOCKS), MAX_MODEL_LEN, 4, 4)
        config = SpmConfig(save_inflight_bytes=3 * VALUE_BYTES)
        self.half = SchedulerHalf(
            config,
            self.geometry,
            world_size,
            lambda layouts: Fingerprint(bytes(16)),
            None,
            None,
            "engine",
            Counters(),
            FakeClock(),
        )
        assert self.half.pooling is not None
        self.pooling = self.half.pooling
        self.half.bind(self.manager)
        sizes = (VALUE_BYTES,) * len(model)
        self.half.set_handshakes([LayoutHandshake(rank, "layout", sizes) for rank in self.ranks])
        self.num_requests = 0
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.loading: dict[str, Request] = {}
        self.ending: dict[str, Request] = {}
        """Aborted while loading: vLLM frees their blocks with the last answer."""
        self.loads: list[Load] = []
        self.saves: list[tuple[Rank, BlockMove, bytes]] = []
        self.answered: list[WorkerReport] = []
        self.on_host: set[tuple[Rank, BlockKey]] = set()
        for prompt in range(3):
            self._find_on_host(prompt)

    def _find_on_host(self, prompt: int) -> None:
        """What an earlier turn left there: most requests begin with a load."""
        request = make_request("earlier", prompt_of(prompt, 12))
        keys = [
            k for g in range(len(self.geometry.groups)) for k in keys_of(self.geometry, request, g)
        ]
        for rank in self.ranks:
            self._report(RankReport(rank, b"", host_changes=dict.fromkeys(keys, True)))

    # --- vLLM's side --------------------------------------------------------------------

    @rule(prompt=st.integers(0, 2), length=st.integers(1, 40), session=st.booleans())
    def arrive(self, prompt: int, length: int, session: bool) -> None:
        self.num_requests += 1
        name = f"r{self.num_requests}"
        request = make_request(
            name, prompt_of(prompt, length), session=f"s{prompt}" if session else None
        )
        self.waiting[name] = request
        self.half.on_new_request(request)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Preempt, schedule what runs, admit what waits, tell the workers."""
        scheduled: dict[str, int] = {}
        for name, request in list(self.running.items()):
            choice = data.draw(st.integers(0, 9), label=f"{name}: 0 preempts, else tokens")
            count = min(choice * 3, request.num_tokens - request.num_computed_tokens)
            if choice == 0 or (count and self.manager.allocate_slots(request, count) is None):
                self._preempt(name)
            elif count:
                scheduled[name] = count
        for name in list(self.waiting):
            if data.draw(st.booleans(), label=f"admit {name}"):
                self._admit(name, scheduled, data.draw(st.integers(0, 3), label="hook order"))
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = scheduled
        output.total_num_scheduled_tokens = sum(scheduled.values())
        self._command(output)
        for name, count in scheduled.items():
            request = self.running[name]
            request.num_computed_tokens += count
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids(3 + request.num_tokens % 7)

    def _admit(self, name: str, scheduled: dict[str, int], order: int) -> None:
        request = self.waiting[name]
        local, external, blocks = 0, 0, self.manager.empty_kv_cache_blocks
        if request.num_computed_tokens == 0:
            blocks, local, _ = self.manager.get_computed_blocks(request)
            found, loads = self.half.get_num_new_matched_tokens(request, local)
            assert found is not None, "without a remote store nothing has to be waited for"
            assert loads == (found > 0)
            external = found
        start = request.num_computed_tokens + local + external
        count = 0 if external else min(16, request.num_tokens - start)
        new = self.manager.allocate_slots(
            request,
            count,
            num_new_computed_tokens=local,
            new_computed_blocks=blocks,
            num_external_computed_tokens=external,
            delay_cache_blocks=external > 0,
        )
        if new is None:
            return  # asked, answered, and no room: asked again later
        self._tell_allocated(request, self.manager.get_blocks(name), external, order)
        request.num_computed_tokens = start
        del self.waiting[name]
        if external:
            self.loading[name] = request
        else:
            self.running[name] = request
            scheduled[name] = count

    def _tell_allocated(
        self, request: Request, blocks: KVCacheBlocks, external: int, order: int
    ) -> None:
        for tokens in ([external], [0, external], [external, 0], [external, external])[order]:
            self.half.update_state_after_alloc(request, blocks, tokens)

    def _command(self, output: SchedulerOutput) -> None:
        commands = self.half.build_commands(output)
        assert isinstance(commands, StepCommands)
        epoch = commands.key_space.epoch
        for command in commands.loads:
            assert command.request_id in self.loading
            owned = {i for ids in self.manager.get_block_ids(command.request_id) for i in ids}
            targets = {move.block_id for move in command.moves}
            assert targets
            assert targets <= owned
            self.loads.append(Load(command, epoch, list(self.ranks)))
        assert {load.command.request_id for load in self.loads} == {*self.loading, *self.ending}
        for move in commands.saves:
            published = self.manager.block_pool.blocks[move.block_id].block_hash
            assert published is not None
            assert bytes(published) == move.key
            assert move.key not in [saved.key for _, saved, _ in self.saves]
        self.saves += [(rank, move, epoch) for move in commands.saves for rank in self.ranks]

    def _preempt(self, name: str) -> None:
        request = self.waiting[name] = self.running.pop(name)
        self.manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1

    @rule(data=st.data())
    def finish_or_abort(self, data: st.DataObject) -> None:
        alive = [*self.waiting, *self.running, *self.loading]
        if alive:
            self._end(data.draw(st.sampled_from(alive)))

    def _end(self, name: str) -> None:
        if name in self.loading:
            request = self.ending[name] = self.loading.pop(name)
            self.half.request_finished(request)
        else:
            where = self.waiting if name in self.waiting else self.running
            request = where.pop(name)
            self.half.request_finished(request)
            self.manager.free(request)
        assert self.half.request_finished(request) is None, "a second time nothing is left"

    @rule()
    def other_work_takes_the_free_blocks(self) -> None:
        """The GPU forgets what nobody uses, so that it has to be loaded."""
        pool = self.manager.block_pool
        pool.evict_blocks({block.block_id for block in pool.blocks if block.ref_cnt == 0})

    @rule()
    def workers_catch_up_with_saving(self) -> None:
        while self.saves:
            self._answer_save(self.saves[0], True)

    @rule(everything=st.booleans())
    def reset(self, everything: bool) -> None:
        emptied = self.manager.reset_prefix_cache()
        if everything:
            published = len(self.manager.block_pool.cached_block_hash_to_block)
            assert self.half.reset() == (not published)
            assert not (emptied and published)
            self.on_host.clear()

    # --- the workers' side --------------------------------------------------------------

    @rule(data=st.data())
    def answer_load(self, data: st.DataObject) -> None:
        if not self.loads:
            return
        load = data.draw(st.sampled_from(self.loads))
        keys = [move.key for move in load.command.moves]
        failed_from = data.draw(st.none() | st.integers(0, len(keys) - 1), label="failed from")
        self._answer_load(load, failed_from, data.draw(st.sampled_from(FAILURES)))

    def _answer_load(self, load: Load, failed_from: int | None, why: LoadFailure) -> None:
        rank, command = load.ranks.pop(), load.command
        result = LoadResult(command.job_id, command.request_id)
        if failed_from is not None:
            moves = command.moves[failed_from:]
            result.failed = {move.key: why for move in moves}
            load.failed = True
        self._report(RankReport(rank, load.epoch, loads=[result]))
        if not load.ranks:
            self.loads.remove(load)
            assert command.request_id is not None
            self._loaded(command.request_id, failed=load.failed)

    def _loaded(self, name: str, *, failed: bool) -> None:
        """As vLLM goes on after the last rank's answer."""
        if name in self.ending:
            self.manager.free(self.ending.pop(name))
            return
        request = self.waiting[name] = self.loading.pop(name)
        if failed:
            request.num_computed_tokens = 0  # vLLM may keep a part; the storms cover that
        if request.num_computed_tokens:
            self.manager.cache_blocks(request, request.num_computed_tokens)
        else:
            self.manager.free(request)

    @rule(data=st.data(), stored=st.booleans())
    def answer_save(self, data: st.DataObject, stored: bool) -> None:
        if self.saves:
            self._answer_save(data.draw(st.sampled_from(self.saves)), stored)

    def _answer_save(self, save: tuple[Rank, BlockMove, bytes], stored: bool) -> None:
        self.saves.remove(save)
        rank, move, epoch = save
        changes = {move.key: True} if stored else {}
        self._report(RankReport(rank, epoch, host_changes=changes, saves_done=[move.key]))

    @rule(data=st.data())
    def evict_from_host(self, data: st.DataObject) -> None:
        known = sorted(self.half.manager.residency._host)
        if known:
            key, rank = data.draw(st.sampled_from(known)), data.draw(st.sampled_from(self.ranks))
            epoch = self.pooling.key_space().epoch
            self._report(RankReport(rank, epoch, host_changes={key: False}))

    @rule(data=st.data())
    def repeat_an_old_load_answer(self, data: st.DataObject) -> None:
        open_jobs = {load.command.job_id for load in self.loads}
        old = [r for r in self.answered if r.ranks[0].loads[0].job_id not in open_jobs]
        if old:
            self.half.take_report(data.draw(st.sampled_from(old)))

    def _report(self, report: RankReport) -> None:
        message = WorkerReport([report])
        self.half.take_report(message)
        if report.loads:
            self.answered.append(message)
        if report.epoch != self.pooling.key_space().epoch:
            return  # says nothing any more
        for key, held in report.host_changes.items():
            (self.on_host.add if held else self.on_host.discard)((report.rank, key))
        gone = {k for r in report.loads for k, why in r.failed.items() if why in GONE}
        self.on_host = {entry for entry in self.on_host if entry[1] not in gone}

    # --- what always holds --------------------------------------------------------------

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "half"):
            return
        self.half.check_integrity()
        gauges = self.half.gauges()
        alive = len(self.waiting) + len(self.running) + len(self.loading)
        assert gauges["spm:requests|"] == alive
        assert gauges["spm:host_blocks|"] == len({key for _, key in self.on_host})
        assert gauges["spm:loads_in_flight|"] == len(self.loads)
        assert self.half.has_pending_work() or not (self.loads or self.saves)

    def teardown(self) -> None:
        """Once all is finished and answered, nothing is left."""
        if not hasattr(self, "half"):
            return
        for name in [*self.waiting, *self.running, *self.loading]:
            self._end(name)
        while self.half.has_pending_work():
            self._command(SchedulerOutput.make_empty())
            while self.loads:
                self._answer_load(self.loads[0], 0, LoadFailure.CANCELLED)
            while self.saves:
                self._answer_save(self.saves[0], True)
        self.half.check_integrity(idle=True)
        pool = self.manager.block_pool
        assert pool.get_num_free_blocks() == NUM_BLOCKS - 1


TestHalfMachine = HalfMachine.TestCase
TestHalfMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
