"""``SessionAwareConnector`` around another connector.

The wrapped connector gets every hook vLLM calls, with the same arguments and in the same
order. Beside it, on the scheduler's thread, a half that knows sessions; on the worker's main
thread the bookkeeping of loads that no request of vLLM's waits for. Both are None where
session features are off: then only isolation (:mod:`connectors.wrapping.gate`) is left.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from connectors.assembly import build_wrapping_half
from connectors.session_aware import SessionAwareConnector
from connectors.wrapping.envelope import WrappedCommands, WrappedReport
from connectors.wrapping.gate import RequestGate
from connectors.wrapping.inner import create_inner
from connectors.wrapping.stats import WrappedStats
from connectors.wrapping.traits import traits_of
from connectors.wrapping.worker_fills import WorkerFills
from connectors.wrapping.worker_side import WorkerSide
from spm.config import SpmConfig
from spm.metrics import Counters

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from connectors.wrapping.half import WrappingHalf

_Finish = tuple[bool, dict[str, Any] | None]


class WrappingConnector(WorkerSide):
    """Built in place of :class:`SessionAwareConnector` if its settings wrap something."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        config = SpmConfig.from_extra_config(self._kv_transfer_config.kv_connector_extra_config)
        assert config.wrapped is not None
        self._wrap = config.wrapped
        self.inner = create_inner(vllm_config, role, kv_cache_config, self._wrap)
        self._counters = Counters()
        self.gate = RequestGate(traits_of(self._wrap), self._wrap.kv_connector, self._counters)
        self.half: WrappingHalf | None = None
        if not config.sam.enabled:
            return
        if role is KVConnectorRole.SCHEDULER:
            self.half = build_wrapping_half(
                config, vllm_config, kv_cache_config, self.inner, self.gate, self._counters
            )
        else:
            self.fills = WorkerFills()

    # --- scheduler side ----------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """Ours first: it replaces the pool's queue of free blocks, which the wrapped connector
        may keep a reference to."""
        self._kv_cache_manager = kv_cache_manager
        if self.half is not None:
            self.half.bind(kv_cache_manager)
        self.inner.bind_kv_cache_manager(kv_cache_manager)

    def on_new_request(self, request: "Request") -> None:
        if not self.gate.kept_out(request):
            self.inner.on_new_request(request)
        if self.half is not None:
            self.half.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        answer: tuple[int | None, bool] = 0, False
        half = self.half
        if not self.gate.kept_out(request):
            if half is not None and half.must_wait(request, num_computed_tokens):
                return None, False
            answer = self.inner.get_num_new_matched_tokens(request, num_computed_tokens)
        if half is not None:
            half.asked(request, num_computed_tokens, answer)
        return answer

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        if self.gate.kept_out(request):
            return ()
        return self.inner.get_loaded_kv_cache_group_ids(request)

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        if self.gate.kept_out(request):
            return {}
        return self.inner.get_external_cache_hit_sources(request, num_external_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        if not self.gate.kept_out(request):
            self.inner.update_state_after_alloc(request, blocks, num_external_tokens)
        if self.half is not None:
            self.half.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        commands = WrappedCommands(None)
        if self.half is not None:
            commands.fills, commands.ended = self.half.step(scheduler_output)
        seen = self.gate.filtered(scheduler_output, commands.ended)
        commands.inner = self.inner.build_connector_meta(seen)
        if seen is not scheduler_output:
            # The one thing that a connector may change here, by vLLM's leave.
            scheduler_output.new_block_ids_to_zero = seen.new_block_ids_to_zero
            commands.hidden = list(scheduler_output.finished_req_ids - seen.finished_req_ids)
        return commands

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """The wrapped connector gets vLLM's own object, as it may change it, and in it its own
        report and numbers, and news of stand-ins, which vLLM must not see."""
        out = connector_output
        report, stats = out.kv_connector_worker_meta, out.kv_connector_stats
        received: set[str] = set()
        sent: set[str] = set()
        if self.half is not None:
            received, sent = self.half.take_output(out)
        if isinstance(report, WrappedReport):
            out.kv_connector_worker_meta = report.inner
        if isinstance(stats, WrappedStats):
            out.kv_connector_stats = stats.inner
        if received:
            out.finished_recving = received | (out.finished_recving or set())
        if sent:
            out.finished_sending = sent | (out.finished_sending or set())
        try:
            self.inner.update_connector_output(out)
        finally:
            out.kv_connector_worker_meta, out.kv_connector_stats = report, stats
            if received and out.finished_recving:
                out.finished_recving = out.finished_recving - received or None
            if sent and out.finished_sending:
                out.finished_sending = out.finished_sending - sent or None

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> _Finish:
        """vLLM calls this one, as our class says that it takes several groups; the wrapped
        connector is called as it would be alone."""
        answer: _Finish = False, None
        if not self.gate.kept_out(request):
            if isinstance(self.inner, SupportsHMA):
                answer = self.inner.request_finished_all_groups(request, block_ids)
            else:
                answer = self.inner.request_finished(request, block_ids[0])
        return self._finished(request, answer)

    def request_finished(self, request: "Request", block_ids: list[int]) -> _Finish:
        answer: _Finish = False, None
        if not self.gate.kept_out(request):
            answer = self.inner.request_finished(request, block_ids)
        return self._finished(request, answer)

    def _finished(self, request: "Request", answer: _Finish) -> _Finish:
        ours = self.half.request_finished(request) if self.half is not None else None
        self.gate.forget(request.request_id)
        delay_free, params = answer
        return delay_free, params if ours is None else {**(params or {}), **ours}

    def register_finished_partial_tail(
        self,
        request: "Request",
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        if self.gate.kept_out(request):
            return False
        return self.inner.register_finished_partial_tail(request, block_ids, partial_tail_offloads)

    def has_pending_push_work(self) -> bool:
        ours = self.half is not None and self.half.has_pending_work()
        return self.inner.has_pending_push_work() or ours

    def manage(
        self, request: Mapping[str, Any], *, asleep: bool = False
    ) -> "dict[str, Any] | Future[dict[str, Any]]":
        """As :meth:`SessionAwareConnector.manage`."""
        if self.half is None:
            return {"status": "unsupported", "detail": "session features are off: sam.enabled"}
        return self.half.manage(request, asleep=asleep)

    def take_events(self) -> "Iterable[KVCacheEvent]":
        theirs = self.inner.take_events()
        ours = self.half.take_events() if self.half is not None else ()
        return [*theirs, *ours] if ours else theirs

    def reset_cache(self) -> bool | None:
        done = self.inner.reset_cache()
        if self.half is not None and not self.half.reset():
            return False
        return done

    # --- both --------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> WrappedStats | None:
        """Asked once a step."""
        gauges = self.half.changed_gauges() if self.half is not None else {}
        counters = self._counters.drain()
        return WrappedStats.joined(
            self._wrap, self.inner.get_kv_connector_stats(), counters, gauges
        )

    def shutdown(self) -> None:
        """The wrapped connector is shut down even if ours could not be."""
        try:
            if self.half is not None:
                self.half.shutdown()
        finally:
            self.inner.shutdown()  # type: ignore[no-untyped-call]

    def check_integrity(self, *, idle: bool = False) -> None:
        """As :meth:`SessionAwareConnector.check_integrity`; the wrapped connector has none."""
        if self.half is not None:
            self.half.check_integrity(idle=idle)


# vLLM's MultiConnector files stats and metrics under the name of the class, and asks its
# registry for the class by that name.
WrappingConnector.__name__ = SessionAwareConnector.__name__
