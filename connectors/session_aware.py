"""``SessionAwareConnector``: vLLM's connector hooks, each handed to one of two halves.

If its settings wrap another connector, another class is built in its place
(:mod:`connectors.wrapping.connector`); what vLLM asks the class itself goes to the wrapped
connector's class then. Nothing is decided here. Scheduler-side hooks run on the scheduler's
thread, worker-side hooks on the worker's main thread; the halves share nothing but metadata.
"""

import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from connectors.assembly import build_scheduler_half, build_worker_half
from connectors.metadata import LayoutHandshake, LoadResult, StepCommands, WorkerReport
from connectors.stats import SpmPromMetrics, SpmStats
from connectors.wrapping.inner import inner_class, inner_config, wrap_in, wrap_of
from connectors.wrapping.stats import WrappedPromMetrics, rebuilt
from spm.config import SpmConfig
from spm.metrics import Counters
from spm.residency import Tier

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent, KVConnectorKVEvents
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_HIT_SOURCES = {
    Tier.HOST: CacheHitSource.HOST,
    Tier.REMOTE: CacheHitSource.EXTERNAL_UNSPECIFIED,
}


class SessionAwareConnector(KVConnectorBase_V1, SupportsHMA):
    """Session-aware pooling for an unmodified vLLM. See README.md for its settings."""

    def __new__(
        cls, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> "SessionAwareConnector":
        """The class vLLM knows by name builds the one that the settings need."""
        if cls is SessionAwareConnector and wrap_of(vllm_config) is not None:
            from connectors.wrapping.connector import WrappingConnector  # it is a subclass

            cls = WrappingConnector
        return super().__new__(cls)

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = SpmConfig.from_extra_config(self._kv_transfer_config.kv_connector_extra_config)
        self._counters = Counters()
        self._results: list[LoadResult] = []
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler_half = build_scheduler_half(
                config, vllm_config, kv_cache_config, self._counters
            )
        else:
            self.worker_half = build_worker_half(
                config, vllm_config, kv_cache_config, self._counters
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save is a future miss, nothing a request has to wait for."""
        return False

    # --- scheduler side ----------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler_half.bind(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        layouts = [m for m in metadata.values() if isinstance(m, LayoutHandshake)]
        self.scheduler_half.set_handshakes(layouts)

    def on_new_request(self, request: "Request") -> None:
        self.scheduler_half.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler_half.get_num_new_matched_tokens(request, num_computed_tokens)

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        planned = self.scheduler_half.planned_tokens(request.request_id)
        return {_HIT_SOURCES[tier]: tokens for tier, tokens in planned.items() if tokens}

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        self.scheduler_half.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self.scheduler_half.build_commands(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self.scheduler_half.take_report(report)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self.scheduler_half.request_finished(request)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_push_work(self) -> bool:
        return self.scheduler_half.has_pending_work()

    def manage(
        self, request: Mapping[str, Any], *, asleep: bool = False
    ) -> "dict[str, Any] | Future[dict[str, Any]]":
        """A management request, on the scheduler's thread between steps; what only the store
        can answer is promised. ``asleep``: vLLM sleeps or is paused. Never raises."""
        return self.scheduler_half.manage(request, asleep=asleep)

    def reset_cache(self) -> bool | None:
        return self.scheduler_half.reset()

    # --- worker side -------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker_half.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker_half.handshake()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepCommands):
            self.worker_half.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:  # noqa: ANN401
        self.worker_half.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: vLLM schedules a request only when its load is done."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Blocks are copied across all layers at once, after the last layer."""

    def wait_for_save(self) -> None:
        self.worker_half.save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Every load is reported as received; those that failed also as failed: by block
        if recomputing can begin at the first of them, else by request. vLLM is told
        nothing of loads that none of its requests waits for."""
        ended = [
            (result.request_id, result)
            for result in self.worker_half.collect_loads()
            if result.request_id is not None
        ]
        self._results.extend(result for _, result in ended)
        failed = {request_id for request_id, result in ended if result.failed}
        return KVConnectorTransferResults(
            finished_recving={request_id for request_id, _ in ended},
            failed_recving=set() if self._fails_by_block else failed,
        )

    @property
    def _fails_by_block(self) -> bool:
        return self.worker_half.keeps_prefix_of_failed_load

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self.get_transfer_results(finished_req_ids).finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        results, self._results = self._results, []
        if not self._fails_by_block:
            return set()
        return {block_id for result in results for block_id in result.failed_block_ids}

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker_half.report()

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self.worker_half.end_step()

    # --- both --------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        """Asked once a step: counters that moved, and gauges if one has changed."""
        gauges: dict[str, float] = {}
        if self.role is KVConnectorRole.SCHEDULER:
            gauges = self.scheduler_half.changed_gauges()
        counters = self._counters.drain()
        return SpmStats.of(counters, gauges) if counters or gauges else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> "KVConnectorStats | None":
        return rebuilt(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> "KVConnectorPromMetrics | None":
        wrap, how = wrap_of(vllm_config), (metric_types, labelnames, per_engine_labelvalues)
        if wrap is not None:
            return WrappedPromMetrics(vllm_config, *how, wrap)
        return SpmPromMetrics(vllm_config, *how)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        wrap = wrap_of(vllm_config)
        if wrap is None:
            return None
        return inner_class(wrap).get_required_kvcache_layout(inner_config(vllm_config, wrap))

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        wrap = wrap_in(extra_config)
        if wrap is None:
            return False
        return inner_class(wrap).requires_piecewise_for_cudagraph(
            dict(wrap.kv_connector_extra_config)
        )

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.SCHEDULER:
            self.scheduler_half.shutdown()
        else:
            self.worker_half.shutdown()

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raise :class:`spm.errors.IntegrityError` if this side's bookkeeping is off;
        with ``idle`` also if a request, load, save, buffer or thread is left over."""
        if self.role is KVConnectorRole.SCHEDULER:
            self.scheduler_half.check_integrity(idle=idle)
        else:
            self.worker_half.check_integrity(idle=idle)

    def get_kv_connector_kv_cache_events(self) -> "KVConnectorKVEvents | None":
        return None

    def take_events(self) -> "Iterable[KVCacheEvent]":
        """Once a step, scheduler side: what came to the tiers behind the GPU pool, and went."""
        return self.scheduler_half.take_events()
