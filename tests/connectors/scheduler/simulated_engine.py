"""vLLM's real scheduler and our real connector around simulated workers.

Steps as vLLM's engine core does, with and without asynchronous scheduling, and checks
after every step what must hold at any time.
"""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from connectors.groups import cache_geometry
from connectors.metadata import (
    NO_BLOCK_ID,
    LayoutHandshake,
    LoadCommand,
    NoCommands,
    StepCommands,
)
from connectors.scheduler.half import SchedulerHalf
from connectors.scheduler.lookup import LookupAnswer, LookupQuery, LookupService
from connectors.session_aware import SessionAwareConnector
from spm.config import SpmConfig
from spm.keys import Fingerprint, Rank
from spm.metrics import Counters
from spm.residency import Tier
from tests.connectors.scheduler import vllm_parts
from tests.connectors.scheduler.simulated_keeper import SimulatedKeeper
from tests.connectors.scheduler.simulated_worker import (
    Conditions,
    SimulatedModelRunner,
    SimulatedWorkerHalf,
    next_token,
)

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext

STEP_S = 0.01


class SimulatedLookups(LookupService):
    """Answers a query a given number of steps later; ``None``: never."""

    def __init__(self, conditions: Conditions) -> None:
        self.steps: int | None = 0
        self.queries: list[LookupQuery] = []
        self._conditions = conditions
        self._waiting: list[tuple[int, LookupQuery]] = []
        self._now = 0

    def tick(self) -> None:
        self._now += 1

    def submit(self, query: LookupQuery) -> bool:
        self.queries.append(query)
        if self.steps is not None:
            self._waiting.append((self._now + self.steps, query))
        return True

    def poll(self) -> Sequence[LookupAnswer]:
        due = [query for when, query in self._waiting if when <= self._now]
        self._waiting = [(when, query) for when, query in self._waiting if when > self._now]
        return [LookupAnswer(query, self._present(query)) for query in due]

    def _present(self, query: LookupQuery) -> tuple[bool, ...]:
        values = self._conditions.values
        return tuple(all(name in values for name in names) for names in query.names)

    def close(self) -> None:
        """Nothing runs."""


class Engine:
    """One engine core. ``conditions`` may be shared with another engine: same store."""

    def __init__(
        self,
        directory: Path,
        model: Sequence[vllm_parts.Attention],
        *,
        asynchronous: bool,
        conditions: Conditions,
        num_blocks: int = 64,
        world_size: int = 1,
        save_inflight_bytes: int = 1 << 17,
        value_bytes: int = 1 << 13,
        extra: dict[str, Any] | None = None,
        sparse: bool = False,
        **settings: Any,  # noqa: ANN401
    ) -> None:
        self.conditions = conditions
        self.now_s = 1000.0
        self.counters = Counters()
        self.outputs: dict[str, list[int]] = {}
        self.added_s: dict[str, float] = {}
        self.ended: dict[str, str] = {}
        self.params: dict[str, dict[str, Any]] = {}
        self.commanded: list[LoadCommand] = []
        self.promoted: list[int] = []
        self.local_hits: dict[str, int] = {}
        """Prompt tokens that the GPU pool had, by vLLM's own count."""
        extra = {
            "host_bytes": 1 << 20,
            "staging_bytes": 1 << 20,
            "save_inflight_bytes": save_inflight_bytes,
            **(extra or {}),
        }
        kv_cache = vllm_parts.kv_cache_config(model, num_blocks, sparse=sparse)
        config = vllm_parts.vllm_config(
            directory,
            model,
            asynchronous=asynchronous,
            num_blocks=num_blocks,
            world_size=world_size,
            extra=extra,
            **settings,
        )
        block_size, self._hash_tokens = resolve_kv_cache_block_sizes(kv_cache, config)
        kv_cache.hash_block_size = self._hash_tokens
        self._queue: deque[SchedulerOutput] = deque()
        self._depth = config.max_concurrent_batches
        self.scheduler = (AsyncScheduler if asynchronous else Scheduler)(
            config, kv_cache, StructuredOutputManager(config), block_size, self._hash_tokens
        )
        connector = self.scheduler.connector
        assert isinstance(connector, SessionAwareConnector)
        self.connector = connector
        if conditions.tier is Tier.REMOTE and extra["host_bytes"]:
            host_bytes = extra["host_bytes"] if conditions.keeps_host else 0
            extra |= {"remote": {"url": "redis://nowhere"}, "host_bytes": host_bytes}
        self.lookups = SimulatedLookups(conditions)
        self.keeper = SimulatedKeeper(conditions, world_size)
        remote = conditions.tier is Tier.REMOTE
        self.half = SchedulerHalf(
            SpmConfig.from_extra_config(extra),
            cache_geometry(config, kv_cache),
            world_size,
            lambda layouts: Fingerprint(bytes(16)),
            self.lookups if remote else None,
            self.keeper if remote else None,
            f"engine-{id(self)}",
            self.counters,
            lambda: self.now_s,
        )
        connector.scheduler_half = self.half
        pool = self.scheduler.kv_cache_manager.block_pool  # back to vLLM's own, then ours again
        pool.free_block_queue = FreeKVCacheBlockQueue(pool.free_block_queue.get_all_free_blocks())
        connector.bind_kv_cache_manager(self.scheduler.kv_cache_manager)
        sizes = (value_bytes,) * len(model)
        ranks = [Rank(rank) for rank in range(world_size)]
        connector.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): LayoutHandshake(rank, "layout", sizes) for rank in ranks}
        )
        self._aggregator = KVOutputAggregator(world_size)
        self.workers = [SimulatedWorkerHalf(r, model, self._hash_tokens, conditions) for r in ranks]
        self._runners = [SimulatedModelRunner(model, worker.slots) for worker in self.workers]
        self._connectors = []
        for worker in self.workers:
            worker_side = SessionAwareConnector(config, KVConnectorRole.WORKER, kv_cache)
            worker.geometry = cache_geometry(config, kv_cache)
            if self.half.pooling is not None:
                worker_side.worker_half = worker
            self._connectors.append(worker_side)

    # --- driving ------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 4,
        session: str | None = None,
        **how: Any,  # noqa: ANN401
    ) -> Request:
        request = vllm_parts.make_request(
            request_id,
            prompt,
            hash_tokens=self._hash_tokens,
            max_tokens=max_tokens,
            session=session,
            **how,
        )
        self.outputs[request_id] = []
        self.added_s[request_id] = self.now_s
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        if self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED):
            self.ended[request_id] = "abort"
        self.check()

    def step(self) -> None:
        """One turn of vLLM's engine loop."""
        self.now_s += STEP_S
        self.lookups.tick()
        self.keeper.tick()
        if self.scheduler.has_requests():
            step = self.scheduler.schedule()
            self._check_commands(step)
            self._queue.append(step)
            room = len(self._queue) < self._depth
            if room and (step.total_num_scheduled_tokens or self.scheduler.has_requests()):
                self.check()
                return
        if self._queue:
            step = self._queue.popleft()
            self._update(step, self._execute(step))
        self.check()

    def run(self, limit: int = 400) -> None:
        """Step until nothing is left to do; then nothing may be left over."""
        for _ in range(limit):
            if not (self.scheduler.has_requests() or self._queue):
                self.check(idle=True)
                return
            self.step()
        raise AssertionError(f"still busy after {limit} steps: {self.half.gauges()}")

    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        by_rank = []
        for runner, connector in zip(self._runners, self._connectors, strict=True):
            assert step.kv_connector_metadata is not None
            connector.bind_connector_metadata(step.kv_connector_metadata)
            sampled = runner.execute(step)
            connector.start_load_kv(cast("ForwardContext", None))
            connector.wait_for_save()
            results = connector.get_transfer_results(step.finished_req_ids)
            transfers = KVConnectorOutput(
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                invalid_block_ids=connector.get_block_ids_with_load_errors(),
                kv_connector_worker_meta=connector.build_connector_worker_meta(),
            )
            connector.clear_connector_metadata()
            by_rank.append(
                ModelRunnerOutput(
                    req_ids=list(sampled),
                    req_id_to_index={name: index for index, name in enumerate(sampled)},
                    sampled_token_ids=list(sampled.values()),
                    kv_connector_output=transfers,
                )
            )
        joined = self._aggregator.aggregate(list(by_rank))
        assert joined is not None
        return joined

    def _update(self, step: SchedulerOutput, result: ModelRunnerOutput) -> None:
        for outputs in self.scheduler.update_from_output(step, result).values():
            for output in outputs.outputs:
                self.outputs[output.request_id] += output.new_token_ids
                if output.prefill_stats is not None:
                    hit = output.prefill_stats.num_local_cached_tokens
                    self.local_hits.setdefault(output.request_id, hit)
                if output.finish_reason is not None:
                    self.ended[output.request_id] = str(output.finish_reason)
                    self.params[output.request_id] = output.kv_transfer_params or {}

    # --- checking -----------------------------------------------------------------------

    def _check_commands(self, step: SchedulerOutput) -> None:
        commands, manager = step.kv_connector_metadata, self.scheduler.kv_cache_manager
        if self.half.pooling is None:
            assert isinstance(commands, NoCommands)
            return
        assert isinstance(commands, StepCommands)
        assert commands.has_forward == (step.total_num_scheduled_tokens > 0)
        self.commanded += commands.loads
        self.promoted += commands.promoted_jobs
        for load in commands.loads:
            targets = [move.block_id for move in load.moves]
            assert targets
            if load.request_id is None:
                self._check_prefetch(targets)
                continue
            owned = {i for ids in manager.get_block_ids(load.request_id) for i in ids}
            assert len(set(targets)) == len(targets)
            assert set(targets) <= owned
        for move in commands.saves:
            if move.block_id == NO_BLOCK_ID:
                continue
            published = manager.block_pool.blocks[move.block_id].block_hash
            assert published is not None
            assert bytes(published) == move.key
        keys = [move.key for move in commands.saves]
        assert len(set(keys)) == len(keys)

    def _check_prefetch(self, targets: list[int]) -> None:
        """Blocks that are filled ahead are nobody else's, and hold nothing."""
        pool = self.scheduler.kv_cache_manager.block_pool
        blocks = [pool.blocks[i] for i in targets if i != NO_BLOCK_ID]
        assert len({block.block_id for block in blocks}) == len(blocks)
        assert all(block.ref_cnt == 1 and block.block_hash is None for block in blocks)

    def manage(self, op: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
        """A management request that is answered at once."""
        answer = self.half.manage({"v": 1, "op": op, "tenant": "default", **fields})
        assert isinstance(answer, dict)
        self.check()
        return answer

    def edit(self, session: str, *edits: dict[str, Any], operation: str = "op") -> dict[str, Any]:
        """Edits of a session, as an API server sends them."""
        hint = {"session_id": session, "context_management": {"edits": list(edits)}}
        return self.manage("apply", hint=hint, operation_id=operation)

    def operation(self, operation: str = "op") -> dict[str, Any]:
        """What has become of it."""
        found = self.manage("get_operation", operation_id=operation)["operation"]
        assert isinstance(found, dict)
        return found

    def check(self, *, idle: bool = False) -> None:
        self.connector.check_integrity(idle=idle)
        if not idle:
            return
        pool = self.scheduler.kv_cache_manager.block_pool
        assert not self.connector.has_pending_push_work()
        assert not self.scheduler.requests
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks leaked"
        assert [b.block_id for b in pool.blocks if b.ref_cnt and not b.is_null] == []

    def forget_gpu(self) -> None:
        """Empty the GPU's own prefix cache: what comes next must come from the store."""
        assert self.scheduler.reset_prefix_cache()


def expected_output(prompt: Sequence[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]
