"""The scheduler half: one object a connector hook can call.

Sessions are always there; pooling only if there is a tier behind the GPU pool. Everything
runs on vLLM's scheduler thread and never waits.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from connectors.groups import CacheGeometry
from connectors.kv_events import TierEvents
from connectors.metadata import LayoutHandshake, NoCommands, StepCommands, WorkerReport
from connectors.scheduler.admission import AdmissionGate
from connectors.scheduler.auto_mode import AutoMode
from connectors.scheduler.lookup import LookupService
from connectors.scheduler.pooling import PoolingHalf
from connectors.scheduler.sessions import SessionHooks
from connectors.scheduler.store_keeper import StoreKeeper
from spm.capability import NoPooling
from spm.config import SpmConfig
from spm.keys import Fingerprint
from spm.lifecycle import encode_event
from spm.metrics import Counters
from spm.residency import Tier
from tracker.ids import SessionRef

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_NOTHING_TO_MOVE = NoCommands()


class SchedulerHalf:
    """State of one engine's connector on the scheduler's side."""

    def __init__(
        self,
        config: SpmConfig,
        geometry: CacheGeometry,
        world_size: int,
        fingerprint: Callable[[list[LayoutHandshake]], Fingerprint],
        lookups: LookupService | None,
        keeper: StoreKeeper | None,
        engine_id: str,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        """``lookups`` and ``keeper``: None without a remote store. ``engine_id`` is unique
        among engines and starts."""
        self.sessions = SessionHooks(config, geometry, world_size, engine_id, counters, clock)
        self.manager = self.sessions.manager
        self.pooling: PoolingHalf | None = None
        """None: there is no tier behind the GPU pool."""
        self._last_sizes: tuple[int, ...] = ()
        self._auto: AutoMode | None = None
        """None: what is not asked for is not decided."""
        self._admission: AdmissionGate | None = None
        """None: requests are admitted in vLLM's order."""
        if config.sam.enabled and config.sam.resume_first_s > 0:
            sam = self.sessions.sam
            self._admission = AdmissionGate(config.sam, geometry, sam, clock)
            sam.when_said = self._said
        self._kv_events: TierEvents | None = None
        if config.pools:
            self.pooling = PoolingHalf(
                config,
                geometry,
                world_size,
                fingerprint,
                lookups,
                keeper,
                self.manager,
                self.sessions.sam,
                self.sessions.session_of,
                engine_id,
                counters,
                clock,
            )
            self.sessions.set_pooling(self.pooling.sessions, self._closed)
            if config.auto:
                self._auto = AutoMode(
                    self.pooling.sessions,
                    self.sessions.sam,
                    self.pooling.speeds,
                    self.pooling.rate,
                    config.max_sessions,
                    counters,
                    clock,
                )
                self.sessions.management.auto_state = self._auto.state
        self.sessions.management.engine_status = self._status
        if keeper is not None and config.events_stream:
            self.sessions.bus.subscribe(lambda event: keeper.publish((encode_event(event),)))

    def publish_kv_events(self) -> None:
        """vLLM publishes KV events: what is in the tiers is to be among them. Before the first
        step."""
        if self.pooling is not None:
            self._kv_events = TierEvents(enabled=True)
            self.pooling.publish_to(self._kv_events)

    def take_events(self) -> "Sequence[KVCacheEvent]":
        """When a step has ended: what has changed in the tiers, for vLLM's publisher."""
        if self.pooling is not None:
            self.pooling.rate.note_end()
        return self._kv_events.take() if self._kv_events is not None else ()

    def bind(self, kv_cache_manager: "KVCacheManager") -> None:
        """vLLM's cache manager: its block tables are read; the order in which its free
        blocks are taken becomes ours."""
        self._bind_sessions(kv_cache_manager)
        if self.pooling is not None:
            self.pooling.bind(kv_cache_manager)

    def _bind_sessions(self, kv_cache_manager: "KVCacheManager") -> None:
        self.sessions.bind(kv_cache_manager)
        if self._admission is not None and self.sessions.sam.claims is not None:
            self._admission.pool = kv_cache_manager.block_pool

    def set_handshakes(self, handshakes: Iterable[LayoutHandshake]) -> None:
        """All ranks' layouts, after their KV caches were registered."""
        if self.pooling is not None:
            self.pooling.set_handshakes(handshakes)

    # --- a request's life --------------------------------------------------------------

    def on_new_request(self, request: "Request") -> None:
        """Open the session if the request names one."""
        ref = self.sessions.session_of(request)
        if self._auto is not None and ref is not None:
            self._auto.request_arrived(ref)
        self._note_arrival(ref)
        if self.pooling is not None:
            self.pooling.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: "Request", local_tokens: int
    ) -> tuple[int | None, bool]:
        """vLLM's question; ``(None, False)`` means "ask again next step"."""
        if self.is_held(request, local_tokens):
            return None, False
        self.sessions.admitted(request.request_id, local_tokens)
        if self.pooling is None:
            return 0, False
        if request.skip_reading_prefix_cache:
            self.pooling.note_asked(request)
            return 0, False
        return self.pooling.get_num_new_matched_tokens(request, local_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int
    ) -> None:
        """Blocks exist now. Called again, without external tokens, before or after."""
        self.note_admitted(request)
        if self.pooling is not None:
            self.pooling.update_state_after_alloc(request, blocks, external_tokens)

    def planned_tokens(self, request_id: str) -> Mapping[Tier, int]:
        """Tokens of the load just planned, by the tier expected to supply them."""
        return self.pooling.planned_tokens(request_id) if self.pooling is not None else {}

    def request_finished(self, request: "Request") -> dict[str, Any] | None:
        """Before vLLM frees the blocks. Returns what to tell the client of a session."""
        loading, sources = False, None
        if self.pooling is not None:
            loading = self.pooling.is_loading(request.request_id)
            sources = self.pooling.request_finished(request)
        ended = self.sessions.request_of(request.request_id)
        outcome = self.sessions.request_finished(request, loading=loading)
        if ended is not None:
            self._said(ended[0])
        if self._auto is not None and ended is not None and not loading:
            ref, hint = ended
            if not self.manager.active_requests(ref):
                self._auto.request_finished(ref, hint)
        return {"spm": {**outcome, **(sources or {})}} if outcome is not None else None

    # --- who goes first ----------------------------------------------------------------

    def is_held(self, request: "Request", local_tokens: int) -> bool:
        """Whether a session's request is to be asked about again, so that others resume."""
        if self._admission is None or request.num_preemptions:
            return False
        whose = self.sessions.arrival(request.request_id)
        if whose is None or not self._admission.holds(request, *whose, local_tokens):
            return False
        self.sessions.note_held(request.request_id)
        return True

    def _note_arrival(self, ref: SessionRef | None) -> None:
        if self._admission is not None and ref is not None:
            self._admission.arrived(ref)

    def note_admitted(self, request: "Request") -> None:
        """vLLM has given a request blocks."""
        if self._admission is not None:
            whose = self.sessions.arrival(request.request_id)
            if whose is not None:
                self._admission.admitted(whose[0])

    def _said(self, ref: SessionRef) -> None:
        """Something was said of a session, or a request of it has ended; what counts is what is
        said of it while it has none."""
        if self._admission is not None and not self.manager.active_requests(ref):
            self._admission.said(ref)

    # --- a step ------------------------------------------------------------------------

    def build_commands(self, scheduler_output: "SchedulerOutput") -> StepCommands | NoCommands:
        """Once a step, after vLLM has scheduled it: the tick."""
        self._step_sessions(scheduler_output)
        if self.pooling is None:
            return _NOTHING_TO_MOVE
        self.pooling.rate.note_step(scheduler_output.total_num_scheduled_tokens)
        return self.pooling.build_commands(scheduler_output)

    def _step_sessions(self, scheduler_output: "SchedulerOutput") -> None:
        self.sessions.step(scheduler_output.preempted_req_ids or ())
        if self._admission is not None:
            self._admission.end_step(scheduler_output.total_num_scheduled_tokens)

    def take_report(self, report: WorkerReport) -> None:
        """Workers' news of one step."""
        if self.pooling is not None:
            self.pooling.take_report(report)

    def has_pending_work(self) -> bool:
        """Keeps an idle engine stepping until saves and loads are answered."""
        return self.pooling is not None and self.pooling.has_pending_work()

    # --- the rest ----------------------------------------------------------------------

    def manage(
        self, request: Mapping[str, Any], *, asleep: bool = False
    ) -> "dict[str, Any] | Future[dict[str, Any]]":
        """Answer a management request, or promise to. Never raises."""
        self.sessions.tick()
        self.sessions.changed = True
        if self.pooling is None:
            return self.sessions.management.handle(request)
        pooling = self.pooling.sessions
        pooling.operations.asleep = asleep
        answer = self.sessions.management.handle(request)
        pooling.tick()  # an idle engine takes no step
        pooling.operations.asleep = False
        return answer

    def _closed(self, ref: SessionRef) -> None:
        """A session was ended or forgotten."""
        if self.pooling is not None:
            self.pooling.sessions.closed(ref)
        if self._auto is not None:
            self._auto.closed(ref)

    def _status(self) -> dict[str, Any]:
        pooling = self.pooling.status() if self.pooling is not None else self._gpu_only_status()
        return {**self._sessions_status(), **pooling}

    def _sessions_status(self) -> dict[str, Any]:
        tracker = self.manager.tracker
        return {
            "sessions": tracker.num_sessions,
            "active_requests": self.manager.num_active_requests,
            "session_keys": tracker.num_keys,
        }

    def _gpu_only_status(self) -> dict[str, Any]:
        gpu = self.sessions.sam.gpu_status()
        return {
            "tiers": {"gpu": gpu, "host": None, "remote": None},
            "capabilities": NoPooling.capabilities.to_wire(),
            "queues": {},
            "keep_alive": None,
            "speeds": {},
            "operations": 0,
        }

    def reset(self) -> bool:
        """Nothing stored so far may be read again (new weights)."""
        return self.pooling is None or self.pooling.reset()

    def changed_gauges(self) -> dict[str, float]:
        """The gauges if one of them has changed since the last call, else nothing. Every step
        asks, so the usual answer has to be cheap."""
        sessions, pooling = self.sessions, self._pooling_sizes()
        if not pooling and not sessions.changed:
            return {}
        sessions.changed = False
        sizes = (*sessions.sizes(), *pooling)
        if sizes == self._last_sizes:
            return {}
        self._last_sizes = sizes
        return self.gauges()

    def gauges(self) -> dict[str, float]:
        """Current sizes, by metric key."""
        return {**self.sessions.gauges(), **self._pooling_gauges()}

    def _pooling_sizes(self) -> tuple[int, ...]:
        if self.pooling is None:
            return ()
        return (*self.pooling.sizes(), *self.pooling.health_sizes())

    def _pooling_gauges(self) -> dict[str, float]:
        return self.pooling.gauges() if self.pooling is not None else {}

    def shutdown(self) -> None:
        """Stop the lookup thread."""
        if self.pooling is not None:
            self.pooling.shutdown()

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raise :class:`spm.errors.IntegrityError`; with ``idle`` also if anything is left."""
        self._check_sessions(idle=idle)
        if self.pooling is not None:
            self.pooling.check_integrity(idle=idle)

    def _check_sessions(self, *, idle: bool) -> None:
        self.sessions.check_integrity(idle=idle)
        if self._admission is not None:
            self._admission.check_integrity()
