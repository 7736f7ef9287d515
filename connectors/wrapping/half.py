"""The scheduler half of a wrapping connector: sessions beside a connector that is not ours.

Runs on vLLM's scheduler thread and never waits. Hooks of the wrapped connector are called
for stand-ins in :meth:`WrappingHalf.step` only, which is where vLLM has just called them for
requests; everything else here is bookkeeping.
"""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from connectors.groups import CacheGeometry
from connectors.kv_events import TierEvents
from connectors.metadata import LayoutHandshake
from connectors.scheduler.gpu_pool import GpuPool
from connectors.scheduler.half import SchedulerHalf
from connectors.scheduler.pool_room import PoolRoom
from connectors.wrapping.chains import SessionChains
from connectors.wrapping.envelope import FillCommand, WrappedReport
from connectors.wrapping.fill_state import StandInNews
from connectors.wrapping.fills import PoolFills
from connectors.wrapping.gate import RequestGate
from connectors.wrapping.lookups import PrefixLookups
from connectors.wrapping.pooling import PoolingParts, WrappedPooling
from connectors.wrapping.prefetches import WrappedPrefetches
from connectors.wrapping.request_loads import RequestLoads
from connectors.wrapping.stand_in import StandIns
from connectors.wrapping.traits import traits_of
from spm.config import SpmConfig
from spm.errors import IntegrityError
from spm.keys import Fingerprint
from spm.metrics import Counters, Metric, metric_key
from spm.residency import Tier
from tracker.ids import SessionRef

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)
_REQUESTS = metric_key(Metric.REQUESTS)
_FILLABLE = (FullAttentionSpec, MLAAttentionSpec)


class StepOrders(NamedTuple):
    """What the workers are to be told of stand-ins in one step."""

    fills: list[FillCommand]
    """That begin."""
    ended: list[str]
    """That vLLM would report as finished requests."""


_NO_ORDERS = StepOrders([], [])
_NO_NEWS = StandInNews(set(), set())


def create_pooling(parts: PoolingParts) -> WrappedPooling:
    """With what is known of LMCache, if that is what is wrapped."""
    config = parts.config
    if config.store is not None or (config.wrap is not None and config.wrap.remote_url):
        from connectors.lmcache.assembly import create_lmcache_pooling

        return create_lmcache_pooling(parts)
    return WrappedPooling(parts)


class WrappingHalf(SchedulerHalf):
    """State of one engine's wrapping connector on the scheduler's side."""

    def __init__(
        self,
        config: SpmConfig,
        geometry: CacheGeometry,
        inner: "KVConnectorBase_V1",
        gate: RequestGate,
        vllm_config: "VllmConfig",
        world_size: int,
        engine_id: str,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        """``config.pools`` is false. ``engine_id`` is unique among engines and starts."""
        super().__init__(
            config, geometry, world_size, _no_names, None, None, engine_id, counters, clock
        )
        wrap = config.wrapped
        assert wrap is not None
        self._gate = gate
        self._counters = counters
        self._geometry = geometry
        self._loads = RequestLoads(geometry.alignment_tokens)
        self._chains = SessionChains(config.max_chain_tokens, geometry)
        traits = traits_of(wrap)
        self._stand_ins = StandIns(
            inner, vllm_config, geometry, counters, ends_free_offers=traits.ends_free_offers
        )
        patience_s = _patience_s(config)
        self._lookups = PrefixLookups(self._stand_ins, patience_s, clock)
        room = PoolRoom(config.prefetch_reserve_share, self.sessions.sam)
        self._fills = PoolFills(
            self._stand_ins,
            room,
            lambda: inner.get_finished_count() or world_size,  # vLLM asks it later than now
            patience_s,
            clock,
        )
        self._prefetches = WrappedPrefetches(
            config, self._fills, self._stand_ins, self.sessions.sam, self.manager, counters, clock
        )
        self.wrapped = create_pooling(
            PoolingParts(
                config=config,
                geometry=geometry,
                manager=self.manager,
                sam=self.sessions.sam,
                chains=self._chains,
                lookups=self._lookups,
                prefetches=self._prefetches,
                stand_ins=self._stand_ins,
                lookup_refreshes=traits.lookup_refreshes,
                lookups_pin=traits.lookups_pin,
                vllm_config=vllm_config,
                world_size=world_size,
                engine_id=engine_id,
                counters=counters,
                clock=clock,
            )
        )
        self._one_block_a_key = not _splits_blocks(vllm_config)
        self.sessions.set_pooling(self.wrapped, self._closed)

    def publish_kv_events(self) -> None:
        """As the base class; of what a wrapped connector stores it tells itself."""
        self._kv_events = TierEvents(enabled=True)
        self._prefetches.on_published = self._kv_events.prefetched

    def bind(self, kv_cache_manager: "KVCacheManager") -> None:
        self._bind_sessions(kv_cache_manager)
        groups = kv_cache_manager.kv_cache_config.kv_cache_groups
        block_bytes = sum(
            group.kv_cache_spec.page_size_bytes * len(group.layer_names) * scale
            for group, scale in zip(groups, self._geometry.scales, strict=True)
        )
        pool = None
        kinds = [type(group.kv_cache_spec) for group in groups]
        if self._one_block_a_key and len(kinds) == 1 and kinds[0] in _FILLABLE:
            pool = GpuPool.of(kv_cache_manager)
        else:
            logger.info("prefetch into the GPU pool needs one group of full attention layers")
        self.wrapped.bind(pool, block_bytes)

    # --- a request's life --------------------------------------------------------------

    def on_new_request(self, request: "Request") -> None:
        ref = self.sessions.session_of(request)
        self._note_arrival(ref)
        if ref is not None:
            self.wrapped.request_arrived(ref)

    def must_wait(self, request: "Request", local_tokens: int) -> bool:
        """Whether others are to resume first, or a fill that is on its way makes the request's hit
        in the GPU pool longer: in a moment, at most ``load_deadline_s`` from now. O(1)."""
        if self.is_held(request, local_tokens):
            return True
        if not self._fills.is_loading or request.skip_reading_prefix_cache:
            return False
        block_tokens = self._geometry.alignment_tokens
        at = local_tokens // block_tokens
        if (at + 1) * block_tokens >= request.num_tokens:  # the last token is always computed
            return False
        names = self._geometry.published_keys(request, self._geometry.groups[0], at, at + 1)
        return bool(names) and self._fills.awaits(names[0])

    def asked(self, request: "Request", local_tokens: int, answer: tuple[int | None, bool]) -> None:
        """What the wrapped connector said to vLLM's question."""
        tokens, beside_steps = answer
        if tokens is None:
            return
        request_id = request.request_id
        self.sessions.admitted(request_id, local_tokens)
        if request.skip_reading_prefix_cache:
            tokens = 0
        self._loads.asked(request_id, local_tokens, tokens, beside_steps)

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """Blocks exist now. Called again, without external tokens, before or after."""
        self.note_admitted(request)
        if external_tokens:
            self._loads.allocated(request.request_id, blocks, external_tokens)

    def request_finished(self, request: "Request") -> dict[str, Any] | None:
        """Before vLLM frees the blocks, and before the gate forgets the request. Returns what
        to tell the client of a session."""
        request_id = request.request_id
        loading = self._loads.is_loading(request_id)
        loaded_tokens = self._loads.finished(request_id)
        if loaded_tokens:
            self._counters.add(Metric.LOADED_TOKENS, loaded_tokens, Tier.REMOTE.value)
        known = self.sessions.request_of(request_id)
        if known is None:
            return None
        if not loading and not self._gate.kept_out(request):
            self.wrapped.register(known[0], request, request.num_computed_tokens)
        gpu_tokens = self.sessions.hit_tokens(request_id)
        outcome = self.sessions.request_finished(request, loading=loading)
        assert outcome is not None
        self._said(known[0])
        prompt = request.num_prompt_tokens
        sources = {
            "prompt_tokens": prompt,
            "gpu_tokens": gpu_tokens,
            "host_tokens": 0,
            "remote_tokens": loaded_tokens,
            "computed_tokens": max(0, prompt - gpu_tokens - loaded_tokens),
        }
        return {"spm": {**outcome, **sources}}

    # --- a step ------------------------------------------------------------------------

    def step(self, scheduler_output: "SchedulerOutput") -> StepOrders:
        """Once a step, after vLLM has scheduled it and directly before the wrapped connector
        builds its metadata: the tick."""
        self._step_sessions(scheduler_output)
        self.wrapped.tick()
        if not (self._lookups.busy or self._prefetches.busy):
            return _NO_ORDERS
        self._lookups.step()
        self._prefetches.step(requests_load=self._loads.going_on)
        return StepOrders(self._fills.step(), self._stand_ins.take_ended())

    def take_output(self, output: "KVConnectorOutput") -> StandInNews:
        """Once a step, before the wrapped connector sees the workers' news: stand-ins that all
        ranks have answered, whom it may look for among them."""
        self._loads.ended(
            output.finished_recving or (), output.failed_recving or (), output.invalid_block_ids
        )
        report = output.kv_connector_worker_meta
        if isinstance(report, WrappedReport) and report.fills:
            return self._fills.take_results(report.fills)
        return _NO_NEWS

    def has_pending_work(self) -> bool:
        """Keeps an idle engine stepping until what was asked is answered; deadlines bound it."""
        return self.wrapped.has_pending_work

    # --- the rest ----------------------------------------------------------------------

    def manage(
        self, request: Mapping[str, Any], *, asleep: bool = False
    ) -> "dict[str, Any] | Future[dict[str, Any]]":
        """Answer a management request, or promise to. Never raises."""
        self.sessions.tick()
        self.sessions.changed = True
        self.wrapped.operations.asleep = asleep
        answer = self.sessions.management.handle(request)
        self.wrapped.tick()  # an idle engine takes no step
        self.wrapped.operations.asleep = False
        return answer

    def _closed(self, ref: SessionRef) -> None:
        self.wrapped.closed(ref)

    def _status(self) -> dict[str, Any]:
        return {**self._sessions_status(), **self.wrapped.status()}

    def reset(self) -> bool:
        """Nothing stored so far may be read again (new weights), by a session at least: the
        wrapped connector sees to the rest."""
        self.wrapped.was_reset()
        return True

    def _pooling_sizes(self) -> tuple[int, ...]:
        return self.wrapped.sizes()

    def _pooling_gauges(self) -> dict[str, float]:
        return {**self.wrapped.gauges(), _REQUESTS: len(self._loads)}

    def shutdown(self) -> None:
        """End all stand-ins; before the wrapped connector is shut down."""
        self._stand_ins.finish_all()
        self.wrapped.close()

    def check_integrity(self, *, idle: bool = False) -> None:
        self._check_sessions(idle=idle)
        self.wrapped.check_integrity(idle=idle)
        if idle and (len(self._loads) or self.has_pending_work()):
            raise IntegrityError(f"idle, but {len(self._loads)} requests with a load, or more")


def _patience_s(config: SpmConfig) -> float:
    """How long a connector is waited for. LMCache's ends a lookup that its server does not answer
    by itself, and would wait for the answer if somebody else ended it before."""
    queue_s = config.store.queue_deadline_s + 1.0 if config.store is not None else 0.0
    return max(config.load_deadline_s, queue_s)


def _splits_blocks(vllm_config: "VllmConfig") -> bool:
    """Whether one of vLLM's block hashes stands for more than a block on each rank."""
    parallel = vllm_config.parallel_config
    return parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1


def _no_names(layouts: list[LayoutHandshake]) -> Fingerprint:
    raise AssertionError("a wrapped connector names what it stores")
