"""vLLM's real scheduler around any connector, alone or wrapped, with a model without weights.

The hooks of both sides are called as vLLM's engine core and model runner call them. What the
model reads must be what its tokens say, so a wrong block is seen at once.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator, copy_kv_blocks
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from connectors.session_aware import SessionAwareConnector
from tests.connectors.scheduler import vllm_parts
from tests.connectors.scheduler.simulated_engine import expected_output
from tests.connectors.scheduler.simulated_worker import Place, SimulatedModelRunner, Slot

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig

Settings = dict[str, Any]
"""``kv_connector``, ``kv_connector_module_path`` and ``kv_connector_extra_config``."""
PrepareWorker = Callable[[KVConnectorBase_V1, dict[Place, Slot]], None]
OURS = ("SessionAwareConnector", "connectors.session_aware")
_numbers = count()
RECORDING = "tests.connectors.wrapping.recording_connector"


def settings(name: str, module_path: str | None = None, **extra: Any) -> Settings:  # noqa: ANN401
    return {
        "kv_connector": name,
        "kv_connector_module_path": module_path,
        "kv_connector_extra_config": extra,
    }


def wrapped(
    inner: Settings,
    *,
    sessions: bool = True,
    wrap: Settings | None = None,
    **extra: Any,  # noqa: ANN401
) -> Settings:
    """The same connector inside ours; ``sessions=False``: with session features off."""
    named = {name: value for name, value in inner.items() if value is not None}
    sam = {"enabled": sessions}
    return settings(*OURS, **{"wrap": {**named, **(wrap or {})}, "sam": sam, **extra})


def recording(store: str, *, hma: bool = True) -> Settings:
    name = "RecordingHMAConnector" if hma else "RecordingConnector"
    return settings(name, RECORDING, store=store)


def multi(*children: Settings) -> Settings:
    return settings("MultiConnector", connectors=[{**c, "kv_role": "kv_both"} for c in children])


def config_of(
    directory: Path,
    connector: Settings,
    model: Sequence[vllm_parts.Attention],
    *,
    asynchronous: bool = False,
    num_blocks: int = 64,
    **how: Any,  # noqa: ANN401
) -> "tuple[VllmConfig, KVCacheConfig]":
    """vLLM's, as its own start would have made them."""
    kv_cache = vllm_parts.kv_cache_config(model, num_blocks)
    config = vllm_parts.vllm_config(
        directory, model, asynchronous=asynchronous, num_blocks=num_blocks, extra={}, **how
    )
    config.kv_transfer_config = KVTransferConfig(
        engine_id=f"test-{os.getpid()}-{next(_numbers)}",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        **connector,
    )
    hma = KVConnectorFactory.supports_hma_config(config.kv_transfer_config)
    config.scheduler_config.disable_hybrid_kv_cache_manager = not hma
    _, hash_tokens = resolve_kv_cache_block_sizes(kv_cache, config)
    kv_cache.hash_block_size = hash_tokens
    return config, kv_cache


class Driven:
    """One engine: scheduler, connector on both sides, model runner."""

    def __init__(
        self,
        directory: Path,
        connector: Settings,
        *,
        model: Sequence[vllm_parts.Attention] = vllm_parts.FULL,
        asynchronous: bool = False,
        prepare_worker: PrepareWorker | None = None,
        kv_cache: "Callable[[KVCacheConfig], None]" = lambda kv_cache: None,
        **how: Any,  # noqa: ANN401
    ) -> None:
        config, cache = config_of(directory, connector, model, asynchronous=asynchronous, **how)
        kv_cache(cache)
        self.outputs: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.params: dict[str, dict[str, Any] | None] = {}
        self.hits: dict[str, tuple[int, int]] = {}
        """Prompt tokens from vLLM's own pool and from the connector, at first admission."""
        self.steps: list[SchedulerOutput] = []
        slots: dict[Place, Slot] = {}
        self.worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
        if prepare_worker is None:
            self.worker.register_kv_caches(cast("dict[str, torch.Tensor]", {"slots": slots}))
            self.worker.set_host_xfer_buffer_ops(copy_kv_blocks)
        else:
            prepare_worker(inner_of(self.worker), slots)
        block_size, self.hash_tokens = resolve_kv_cache_block_sizes(cache, config)
        self.scheduler = (AsyncScheduler if asynchronous else Scheduler)(
            config,
            cache,
            StructuredOutputManager(config),
            block_size,
            self.hash_tokens,
            log_stats=True,
        )
        assert isinstance(self.scheduler.connector, KVConnectorBase_V1)
        self.connector = self.scheduler.connector
        if (handshake := self.worker.get_handshake_metadata()) is not None:
            self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})
        self.stats: list[dict[str, Any]] = []
        self._queue: deque[SchedulerOutput] = deque()
        self._depth = config.max_concurrent_batches
        self._aggregator = KVOutputAggregator.from_connector(self.connector, 1)
        self._runner = SimulatedModelRunner(model, slots)

    # --- driving -----------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 4,
        cache_salt: str | None = None,
        adapter: str | None = None,
        **how: Any,  # noqa: ANN401
    ) -> Request:
        request = vllm_parts.make_request(
            request_id, prompt, hash_tokens=self.hash_tokens, max_tokens=max_tokens, **how
        )
        if cache_salt or adapter:  # then what its constructor has hashed is not right any more
            request.cache_salt = cache_salt
            request.lora_request = LoRARequest(adapter, 1, "/nowhere") if adapter else None
            request.block_hashes.clear()
            request.update_block_hashes()
        self.outputs[request_id], self.prompts[request_id] = [], list(prompt)
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        if self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED):
            self.ended[request_id] = "abort"

    def step(self) -> None:
        """One turn of vLLM's engine loop."""
        if self.scheduler.has_requests():
            step = self.scheduler.schedule()
            self.steps.append(step)
            self._queue.append(step)
            room = len(self._queue) < self._depth
            if room and (step.total_num_scheduled_tokens or self.scheduler.has_requests()):
                return
        if self._queue:
            step = self._queue.popleft()
            self._update(step, self._execute(step))

    def run(self, limit: int = 600) -> None:
        """Until nothing is left to do; then nothing may be left over, and all is right."""
        for _ in range(limit):
            if not (self.scheduler.has_requests() or self._queue):
                break
            self.step()
        else:
            raise AssertionError(f"still busy after {limit} steps")
        pool = self.scheduler.kv_cache_manager.block_pool
        assert not self.scheduler.requests
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks leaked"
        if isinstance(self.connector, SessionAwareConnector):
            self.connector.check_integrity(idle=True)
        for name, prompt in self.prompts.items():
            assert self.outputs[name] == expected_output(prompt, len(self.outputs[name]))

    def forget_gpu(self) -> None:
        """What comes next must come from the connector."""
        assert self.scheduler.reset_prefix_cache()

    def shutdown(self) -> None:
        self.connector.shutdown()  # type: ignore[no-untyped-call]
        self.worker.shutdown()  # type: ignore[no-untyped-call]

    # --- as vLLM's model runner does ------------------------------------------------------

    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        meta, worker = step.kv_connector_metadata, self.worker
        context = cast("ForwardContext", None)
        assert meta is not None
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        if step.has_sync_kv_loads:
            worker.start_load_kv(context, scheduler_output=step)
        if step.total_num_scheduled_tokens and worker.has_connector_metadata():
            worker.wait_for_layer_load("layer0")
        sampled = self._runner.execute(step)
        if step.total_num_scheduled_tokens and worker.has_connector_metadata():
            worker.save_kv_layer("layer0", torch.zeros(1), cast("AttentionMetadata", None))
        worker.finish_forward()
        if not step.has_sync_kv_loads:
            worker.start_load_kv(context, scheduler_output=step)
        worker.wait_for_save()  # type: ignore[no-untyped-call]
        results = worker.get_transfer_results(step.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_cache_events=worker.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        ran = ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={name: index for index, name in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=output,
        )
        joined: ModelRunnerOutput | None = self._aggregator.aggregate([ran])
        assert joined is not None
        return joined

    def _update(self, step: SchedulerOutput, result: ModelRunnerOutput) -> None:
        for outputs in self.scheduler.update_from_output(step, result).values():
            told = outputs.scheduler_stats
            if told is not None and told.kv_connector_stats:
                self.stats.append(told.kv_connector_stats)
            for output in outputs.outputs:
                self.outputs[output.request_id] += output.new_token_ids
                if output.prefill_stats is not None:
                    hits = output.prefill_stats
                    counts = hits.num_local_cached_tokens, hits.num_external_cached_tokens
                    self.hits.setdefault(output.request_id, counts)
                if output.finish_reason is not None:
                    self.ended[output.request_id] = str(output.finish_reason)
                    self.params[output.request_id] = output.kv_transfer_params


def inner_of(connector: Any) -> Any:  # noqa: ANN401
    """The connector itself, or the one that it wraps."""
    return connector.__dict__.get("inner", connector)
