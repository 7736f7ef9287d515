"""vLLM's real scheduler with our connector around :class:`MemoryConnector`, on several ranks.

Steps as vLLM's engine core does and checks after every step what must hold at any time.
"""

from collections import deque
from collections.abc import Sequence
from itertools import count
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

from connectors.assembly import build_wrapping_half
from connectors.scheduler.gpu_pool import GpuPool
from connectors.wrapping.connector import WrappingConnector
from connectors.wrapping.envelope import STAND_IN, WrappedCommands
from connectors.wrapping.half import WrappingHalf
from spm.config import SpmConfig
from spm.metrics import Counters
from tests.connectors.scheduler import vllm_parts
from tests.connectors.scheduler.simulated_engine import STEP_S, expected_output
from tests.connectors.scheduler.simulated_worker import Place, SimulatedModelRunner, Slot
from tests.connectors.wrapping.driving import config_of, settings, wrapped
from tests.connectors.wrapping.memory_connector import MEMORIES, Memory, MemoryConnector
from tracker.ids import BlockKey

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext

_NUMBERS = count()


class WatchedPool(GpuPool):
    """What is published is what its key says, on all ranks."""

    site: "Site"

    def take(self, count: int) -> list[Any]:
        low = self.site.half.sessions.sam.low_free(10_000)
        queue = self._pool.free_block_queue.get_all_free_blocks()[:low]
        blocks = super().take(count)
        assert {block.block_id for block in blocks} <= {block.block_id for block in queue}
        self.site.taken_after.update((b.block_id, self.site.num_resets) for b in blocks)
        return blocks

    def publish(self, key: BlockKey, block_id: int, end_tokens: int) -> Any:  # noqa: ANN401
        assert self.site.taken_after[block_id] == self.site.num_resets, "filled before a reset"
        self.site.check_content(key, block_id)
        return super().publish(key, block_id, end_tokens)


class Site:
    """One engine."""

    def __init__(
        self,
        directory: Path,
        memory: Memory | None = None,
        *,
        model: Sequence[vllm_parts.Attention] = vllm_parts.FULL,
        asynchronous: bool = False,
        num_blocks: int = 64,
        world_size: int = 1,
        lookup_refreshes: bool = False,
        extra: dict[str, Any] | None = None,
        **how: Any,  # noqa: ANN401
    ) -> None:
        self.memory = memory or Memory()
        name = f"memory-{next(_NUMBERS)}"
        MEMORIES[name] = self.memory
        module = "tests.connectors.wrapping.memory_connector"
        inner = settings("MemoryConnector", module, memory=name)
        known = {"lookup_refreshes": "yes" if lookup_refreshes else "no"}
        ours = wrapped(inner, wrap=known, **(extra or {}))
        config, cache = config_of(
            directory,
            ours,
            model,
            asynchronous=asynchronous,
            num_blocks=num_blocks,
            world_size=world_size,
            **how,
        )
        self.now_s = 1000.0
        self.outputs: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.params: dict[str, dict[str, Any]] = {}
        self.hits: dict[str, tuple[int, int]] = {}
        self.orders: list[WrappedCommands] = []
        self.taken_after: dict[int, int] = {}
        self.num_resets = self.num_edits = 0
        self.next_prompt: list[int] = []
        block_size, self._hash_tokens = resolve_kv_cache_block_sizes(cache, config)
        self._queue: deque[SchedulerOutput] = deque()
        self._depth = config.max_concurrent_batches
        self.scheduler = (AsyncScheduler if asynchronous else Scheduler)(
            config, cache, StructuredOutputManager(config), block_size, self._hash_tokens
        )
        connector = self.scheduler.connector
        assert isinstance(connector, WrappingConnector)
        assert isinstance(connector.inner, MemoryConnector)
        self.connector, self.inner = connector, connector.inner
        self.counters = Counters()
        extra_config = ours["kv_connector_extra_config"]
        self.half: WrappingHalf = build_wrapping_half(
            SpmConfig.from_extra_config(extra_config),
            config,
            cache,
            connector.inner,
            connector.gate,
            self.counters,
            lambda: self.now_s,
        )
        connector.half = self.half
        pool = self.scheduler.kv_cache_manager.block_pool  # back to vLLM's own, then ours again
        pool.free_block_queue = FreeKVCacheBlockQueue(pool.free_block_queue.get_all_free_blocks())
        connector.bind_kv_cache_manager(self.scheduler.kv_cache_manager)
        self.pool = WatchedPool(pool)
        self.pool.site = self
        if self.half.wrapped.pool is not None:
            self.half.wrapped.bind(self.pool, 1 << 10)
        self._aggregator = KVOutputAggregator(world_size)
        self.slots: list[dict[Place, Slot]] = [{} for _ in range(world_size)]
        self._runners = [SimulatedModelRunner(model, slots) for slots in self.slots]
        self._workers: list[WrappingConnector] = []
        self.inner_workers: list[MemoryConnector] = []
        for rank, slots in enumerate(self.slots):
            worker = WrappingConnector(config, KVConnectorRole.WORKER, cache)
            assert isinstance(worker.inner, MemoryConnector)
            worker.inner.attach(rank, slots)
            self._workers.append(worker)
            self.inner_workers.append(worker.inner)

    # --- driving ------------------------------------------------------------------------

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 4,
        cache_salt: str | None = None,
        **how: Any,  # noqa: ANN401
    ) -> Request:
        request = vllm_parts.make_request(
            name, prompt, hash_tokens=self._hash_tokens, max_tokens=max_tokens, **how
        )
        if cache_salt is not None:  # as vLLM's own constructor does
            request.cache_salt = cache_salt
            request.block_hashes.clear()
            request.update_block_hashes()
        self.outputs[name], self.prompts[name] = [], list(prompt)
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        if self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED):
            self.ended[name] = "abort"
        self.check()

    def step(self) -> None:
        """One turn of vLLM's engine loop."""
        self.now_s += STEP_S
        if self.scheduler.has_requests():
            step = self.scheduler.schedule()
            commands = step.kv_connector_metadata
            assert isinstance(commands, WrappedCommands)
            self.orders.append(commands)
            self._check_orders(commands)
            self._queue.append(step)
            room = len(self._queue) < self._depth
            if room and (step.total_num_scheduled_tokens or self.scheduler.has_requests()):
                self.check()
                return
        if self._queue:
            step = self._queue.popleft()
            self._update(step, self._execute(step))
        self.check()

    @property
    def is_idle(self) -> bool:
        return not (self.scheduler.has_requests() or self._queue)

    def run(self, limit: int = 600) -> None:
        """Step until nothing is left to do; then nothing may be left over."""
        for _ in range(limit):
            if self.is_idle:
                self.check(idle=True)
                return
            self.step()
        raise AssertionError(f"still busy after {limit} steps")

    def turn(self, name: str, prompt: Sequence[int], **how: Any) -> list[int]:  # noqa: ANN401
        """A request from beginning to end; returns what a next turn would begin with."""
        self.add(name, prompt, **how)
        self.run()
        assert self.outputs[name] == expected_output(prompt, len(self.outputs[name]))
        return [*prompt, *self.outputs[name]]

    def manage(self, op: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
        answer = self.connector.manage({"v": 1, "op": op, "tenant": "default", **fields})
        assert isinstance(answer, dict)
        self.check()
        return answer

    def edit(self, session: str, kind: str, **fields: Any) -> str:  # noqa: ANN401
        """Ask for one edit; returns the operation's id."""
        self.num_edits += 1
        operation_id = f"op {self.num_edits}"
        edits = [{"type": kind, **fields}]
        hint = {"session_id": session, "context_management": {"edits": edits}}
        self.manage("apply", hint=hint, operation_id=operation_id)
        return operation_id

    def result(self, operation_id: str) -> dict[str, Any]:
        """What has become of an operation's one edit."""
        found = self.manage("get_operation", operation_id=operation_id)["operation"]
        edits = found.get("edits") or [found]
        assert isinstance(edits[0], dict)
        return edits[0]

    def done(self, session: str, kind: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
        """What one edit has come to when nothing goes on any more."""
        operation_id = self.edit(session, kind, **fields)
        self.run()
        return self.result(operation_id)

    def session(self, session: str) -> dict[str, Any]:
        found = self.manage("get_session", session_id=session)["session"]
        assert isinstance(found, dict)
        return found

    def forget_gpu(self) -> None:
        assert self.scheduler.reset_prefix_cache()

    def reset(self) -> None:
        """New weights: nothing from before may be used."""
        self.num_resets += 1
        self.scheduler.reset_prefix_cache(reset_connector=True)
        self.check()

    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        ran = [
            self._execute_on(worker, runner, step)
            for worker, runner in zip(self._workers, self._runners, strict=True)
        ]
        joined: ModelRunnerOutput | None = self._aggregator.aggregate([*ran])
        assert joined is not None
        return joined

    def _execute_on(
        self, worker: WrappingConnector, runner: SimulatedModelRunner, step: SchedulerOutput
    ) -> ModelRunnerOutput:
        meta = step.kv_connector_metadata
        assert meta is not None
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        if step.has_sync_kv_loads:
            worker.start_load_kv(cast("ForwardContext", None))
        sampled = runner.execute(step)
        if not step.has_sync_kv_loads:
            worker.start_load_kv(cast("ForwardContext", None))
        worker.wait_for_save()
        results = worker.get_transfer_results(step.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={name: index for index, name in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=output,
        )

    def _update(self, step: SchedulerOutput, result: ModelRunnerOutput) -> None:
        output = result.kv_connector_output
        assert output is not None
        for names in (output.finished_recving, output.finished_sending, output.failed_recving):
            assert not any(name.startswith(STAND_IN) for name in names or ())
        assert not output.invalid_block_ids & set(self.pool._taken)
        for outputs in self.scheduler.update_from_output(step, result).values():
            for one in outputs.outputs:
                self.outputs[one.request_id] += one.new_token_ids
                if one.prefill_stats is not None:
                    hit = one.prefill_stats
                    counts = hit.num_local_cached_tokens, hit.num_external_cached_tokens
                    self.hits.setdefault(one.request_id, counts)
                if one.finish_reason is not None:
                    self.ended[one.request_id] = str(one.finish_reason)
                    self.params[one.request_id] = one.kv_transfer_params or {}

    # --- checking -----------------------------------------------------------------------

    def _check_orders(self, commands: WrappedCommands) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        for fill in commands.fills:
            blocks = [pool.blocks[i] for i in fill.block_ids]
            assert blocks
            assert all(b.ref_cnt == 1 and b.block_hash is None for b in blocks)
            assert all(pool.blocks[i].ref_cnt >= 1 for i in fill.prefix_block_ids)

    def check_content(self, key: BlockKey, block_id: int) -> None:
        """A block holds what its name says, on all ranks."""
        size = self.inner.block_tokens
        for slots in self.slots:
            content = [slots[block_id, offset] for offset in range(size)]
            tokens = content[-1][1]
            assert content == [(0, tokens[: len(tokens) - size + 1 + at]) for at in range(size)]
            assert vllm_parts.block_hash_of(tokens, self._hash_tokens) == bytes(key)[:-4]

    def check(self, *, idle: bool = False) -> None:
        self.connector.check_integrity(idle=idle)
        assert not any(name.startswith(STAND_IN) for name in self.scheduler.requests)
        if not idle:
            return
        pool = self.scheduler.kv_cache_manager.block_pool
        assert not self.connector.has_pending_push_work()
        assert not self.scheduler.requests
        if not self.half._fills.busy:
            assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks leaked"
            assert not self.inner.records
            assert not self.inner.loading_after_end
        for block in pool.blocks:
            if block.block_hash is not None and len(self.half._geometry.groups) == 1:
                self.check_content(BlockKey(bytes(block.block_hash)), block.block_id)
