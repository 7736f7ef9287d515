"""The scheduler's part of pooling: what to load, what to save, what the workers did.

Everything here runs on vLLM's scheduler thread and never waits. News comes from two
places: workers' reports (with each step's output) and the lookup service's queue.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from connectors.groups import CacheGeometry, GroupGeometry
from connectors.kv_events import TierEvents
from connectors.metadata import LayoutHandshake, LoadResult, StepCommands, WorkerReport
from connectors.scheduler.block_pressure import BlockPressure
from connectors.scheduler.compute_rate import ComputeRate
from connectors.scheduler.gpu_pool import GpuPool
from connectors.scheduler.hit_planner import plan_hit
from connectors.scheduler.key_spaces import KeySpaces
from connectors.scheduler.load_tracker import LoadTracker, tell_residency
from connectors.scheduler.lookup import LookupService
from connectors.scheduler.manifests import Manifests
from connectors.scheduler.matcher import HitMatcher
from connectors.scheduler.offloader import Offloader
from connectors.scheduler.prefetcher import Prefetcher
from connectors.scheduler.records import RequestRecord
from connectors.scheduler.reload_choice import ReloadChoice
from connectors.scheduler.save_planner import SavePlanner
from connectors.scheduler.session_pooling import SessionPooling
from connectors.scheduler.store_health import StoreHealth
from connectors.scheduler.store_keeper import StoreKeeper
from connectors.scheduler.transfer_queue import Transfer, TransferQueue
from spm.config import SpmConfig
from spm.errors import IntegrityError
from spm.events import BlocksStored, CacheReset, HostChanged
from spm.keys import Fingerprint, KeySpace, Rank
from spm.manager import SessionAwarePoolingManager
from spm.metrics import Counters, Metric, metric_key
from spm.residency import Tier
from spm.sam.manager import SessionAwareManager
from spm.speeds import Speeds
from spm.value_auth import Purpose, authenticator
from spm.work import WorkClass
from tracker.ids import BlockKey, SessionRef

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)
_GAUGES = tuple(
    metric_key(metric)
    for metric in (
        Metric.HOST_BLOCKS,
        Metric.REMOTE_BLOCKS,
        Metric.REQUESTS,
        Metric.LOADS_IN_FLIGHT,
        Metric.OPERATIONS,
    )
)


class PoolingHalf:
    """Loads and saves of one engine, between the GPU pool and the tiers behind it."""

    def __init__(
        self,
        config: SpmConfig,
        geometry: CacheGeometry,
        world_size: int,
        fingerprint: Callable[[list[LayoutHandshake]], Fingerprint],
        lookups: LookupService | None,
        keeper: StoreKeeper | None,
        manager: SessionAwarePoolingManager,
        sam: SessionAwareManager,
        session_of: Callable[["Request"], SessionRef | None],
        engine_id: str,
        counters: Counters,
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """``keeper``: None without a remote store. ``engine_id`` names this engine to others."""
        self._config = config
        self._geometry = geometry
        self.manager = manager
        self._session_of = session_of
        self.rate = ComputeRate(clock)
        self.queue = TransferQueue(config, clock)
        self._health: StoreHealth | None = None
        self._choice: ReloadChoice | None = None
        self._was_usable = True
        if keeper is not None and config.remote is not None:
            believed_s = config.remote.breaker.backoff_cap_s
            self._health = StoreHealth(lambda: keeper.breaker_state, believed_s, clock)
            self._choice = ReloadChoice(config, self.rate.seconds_until, clock)
        self._matcher = HitMatcher(
            geometry,
            self.manager,
            lookups,
            config.lookup_deadline_s,
            world_size,
            counters,
            clock,
            self._health,
            self._choice,
            self.queue.size_bytes,
        )
        self._keeper = keeper
        self._records: dict[str, RequestRecord] = {}
        self._pressure = BlockPressure(geometry, self._records)
        self._spaces = KeySpaces(
            config.namespace, geometry, world_size, fingerprint, self._use_names
        )
        job_ids = itertools.count(1)
        self._prefetcher = Prefetcher(
            config, self.queue, sam, manager, world_size, job_ids, counters, clock
        )
        self._offloader = Offloader(
            config, self.queue, sam, manager, geometry.scales, self._check, clock
        )
        self._loads = LoadTracker(
            geometry,
            manager,
            self.queue,
            world_size,
            counters,
            job_ids,
            self._prefetcher.loaded,
            self._choice,
        )
        self._saves = SavePlanner(
            geometry, self._is_saved, self.queue, world_size, counters, self._save_ended
        )
        manifests = None
        if keeper is not None and config.manifests and keeper.capabilities.documents:
            auth = authenticator(config.remote, Purpose.MANIFESTS)
            manifests = Manifests(
                keeper, manager, self._spaces.current, engine_id, auth, clock, wall_clock
            )
        self.sessions = SessionPooling(
            config,
            geometry,
            manager,
            sam,
            self._prefetcher,
            self._offloader,
            keeper,
            manifests,
            clock,
            wall_clock,
        )
        self.speeds = Speeds()
        self._kv_cache_manager: KVCacheManager | None = None
        self._clock = clock
        self._refused_until_s = 0.0
        """Until then the remote store is taken not to accept writes."""

    # --- start -------------------------------------------------------------------------

    def bind(self, kv_cache_manager: "KVCacheManager") -> None:
        """vLLM's cache manager: its block tables are read, and what was prefetched is put into
        its prefix cache."""
        self._kv_cache_manager = kv_cache_manager
        self._pressure.pool = kv_cache_manager.block_pool
        self.sessions.bind(GpuPool.of(kv_cache_manager))

    def _use_names(self, key_space: KeySpace) -> None:
        if self._keeper is not None:
            self._keeper.use(key_space)

    def set_handshakes(self, handshakes: Iterable[LayoutHandshake]) -> None:
        """All ranks' layouts, after their KV caches were registered."""
        self._spaces.set_handshakes(handshakes)
        sizes = self._spaces.value_bytes()
        self.queue.set_value_bytes({group: max(by_rank) for group, by_rank in sizes.items()})
        self.sessions.set_block_bytes({group: sum(by_rank) for group, by_rank in sizes.items()})

    def key_space(self) -> KeySpace:
        """Names of this engine's values now."""
        return self._spaces.current()

    # --- a request's life --------------------------------------------------------------

    def on_new_request(self, request: "Request") -> None:
        """Open a record."""
        record = self._record_of(request)
        if record.session is not None:
            self.sessions.request_arrived(record.session)

    def _record_of(self, request: "Request") -> RequestRecord:
        record = self._records.get(request.request_id)
        if record is None:
            session = self._session_of(request)
            record = RequestRecord(request, session, [0] * len(self._geometry.groups))
            self._records[request.request_id] = record
        return record

    def get_num_new_matched_tokens(
        self, request: "Request", local_tokens: int
    ) -> tuple[int | None, bool]:
        """vLLM's question; ``(None, False)`` means "ask again next step"."""
        self._look_at_store()
        self._matcher.take_answers(self._records)
        record = self._record_of(request)
        if self._prefetcher.jobs.is_filling and self._awaits_prefetch(record, local_tokens):
            return None, False
        if record.external_refused and self._pressure.lets_others_pass(request):
            return None, False
        answer = self._matcher.match(record, local_tokens, self._spaces.current())
        if answer[0] is not None:
            self._pressure.asked(request)
        return answer

    def _look_at_store(self) -> None:
        """When it is used again it gets a new start."""
        usable = self._health is None or self._health.usable
        if usable and not self._was_usable and self._choice is not None:
            self._choice.forget()
            self._refused_until_s = 0.0
        self._was_usable = usable

    def _awaits_prefetch(self, record: RequestRecord, local_tokens: int) -> bool:
        """Whether what is on its way into the pool makes the local hit longer: in a moment, at
        most one batch from now."""
        if record.external_refused:
            return False
        limit = self._matcher.loadable_tokens(record.request)
        alignment, windows = self._geometry.alignment_tokens, self._geometry.has_windows
        if not windows:  # one more block is a longer hit, and all there is to look at
            limit = min(limit, local_tokens + alignment)
        if limit <= local_tokens:
            return False
        groups = self._matcher.group_keys(record.request, local_tokens, limit)
        plan = plan_hit(groups, local_tokens, alignment, self._prefetcher.jobs.presence)
        if plan.hit.external_tokens <= 0:
            return False
        by_index = plan.hit.keys.values()
        return self._prefetcher.jobs.promote(k for keys in by_index for k in keys.values())

    def note_asked(self, request: "Request") -> None:
        """vLLM looks for blocks for a request that it does not ask about."""
        self._pressure.asked(request)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int
    ) -> None:
        """Blocks exist now. Called again, without external tokens, before or after."""
        record = self._record_of(request)
        self._pressure.served(request.request_id)
        if external_tokens > 0 and record.hit is not None and record.job_id is None:
            hit, record.hit = record.hit, None
            self._loads.start(record, hit, external_tokens, blocks.blocks)

    def planned_tokens(self, request_id: str) -> Mapping[Tier, int]:
        """Tokens of the load just planned, by the tier expected to supply them."""
        record = self._records.get(request_id)
        return record.loaded_tokens if record is not None else {}

    def request_finished(self, request: "Request") -> dict[str, Any] | None:
        """Before vLLM frees the blocks: tie the session to what it computed.

        Returns where a session's prompt came from.
        """
        record = self._records.pop(request.request_id, None)
        self._pressure.served(request.request_id)
        if record is None:
            return None
        if record.job_id is not None:
            self._loads.cancel(record.job_id)
        else:  # with asynchronous scheduling the last step's blocks were published just now
            self._consider_saves(record, 0)
        if record.session is None:
            return None
        if record.job_id is None:
            keys = {group.group: self._chain(record, group) for group in self._geometry.groups}
            salted = request.lora_request is not None
            self.sessions.register_cache(record.session, keys, salted=salted)
        return _outcome(record)

    def _chain(self, record: RequestRecord, group: GroupGeometry) -> list[BlockKey | None]:
        """What a session can resume from: of a sliding window only what vLLM has published,
        which by default is what a hit at the end of the prompt needs."""
        stop = record.request.num_computed_tokens // group.block_tokens
        keys = self._geometry.keys_of(record.request, group, 0, stop)
        if group.window_tokens is None:
            return [*keys]
        known = record.published.get(group.group, set())
        length = max(known, default=-1) + 1
        return [key if index in known else None for index, key in enumerate(keys[:length])]

    def is_loading(self, request_id: str) -> bool:
        """Whether a load is still writing into the request's blocks."""
        record = self._records.get(request_id)
        return record is not None and record.job_id is not None

    # --- a step ------------------------------------------------------------------------

    def build_commands(self, scheduler_output: "SchedulerOutput") -> StepCommands:
        """Once a step, after vLLM has scheduled it."""
        self._look_at_store()
        backlog_tokens = 0
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            record = self._records.get(request_id)
            if record is not None:
                self._consider_saves(record, num_tokens)
                done = record.request.num_computed_tokens + num_tokens
                backlog_tokens += max(0, record.request.num_tokens - done)
        self.rate.backlog_tokens = backlog_tokens
        self.sessions.tick()
        pressed = self._pressure.end_step(
            scheduler_output.preempted_req_ids, matters=self._prefetcher.jobs.is_filling
        )
        self._prefetcher.relieve(pressed=pressed)
        loads, cancelled = self._loads.take_commands()
        taken: Mapping[WorkClass, list[Transfer]] = {}
        if self.queue.has_waiting:
            self._dropped(self.queue.expire())
            taken = self.queue.take()
        prefetches = self._prefetcher.hand_out(taken.get(WorkClass.PREFETCH, ()))
        return StepCommands(
            self._spaces.current(),
            has_forward=scheduler_output.total_num_scheduled_tokens > 0,
            loads=[*loads, *prefetches],
            cancelled_jobs=[*cancelled, *self._prefetcher.jobs.take_cancelled()],
            promoted_jobs=self._prefetcher.jobs.take_promoted(),
            saves=self._saves.hand_out(
                [*taken.get(WorkClass.SAVE, ()), *taken.get(WorkClass.OFFLOAD, ())]
            ),
            linger=self.sessions.is_waiting,
        )

    def _dropped(self, works: Sequence[Transfer]) -> None:
        """These have waited too long in the queue."""
        for work in works:
            if work.work_class is WorkClass.PREFETCH:
                self._prefetcher.expire((work,))
            else:
                self._save_ended(work)

    def _save_ended(self, work: Transfer) -> None:
        self._offloader.transfer_ended(work)

    def _check(self, number: int, keys: Sequence[BlockKey]) -> bool:
        """Ask the remote store about keys, for an offload: as patiently as for a load."""
        deadline_s = self._clock() + self._config.load_deadline_s
        return self._keeper is not None and self._keeper.check(number, keys, deadline_s)

    def _consider_saves(self, record: RequestRecord, num_tokens: int) -> None:
        if record.session is None and self._config.save == "sessions":
            return
        request, manager = record.request, self._kv_cache_manager
        assert manager is not None
        computed = min(request.num_computed_tokens + num_tokens, request.num_tokens)
        self._saves.consider(
            record, computed, lambda: manager.get_blocks(request.request_id).blocks
        )

    def _is_saved(self, key: BlockKey) -> bool:
        """While the remote store takes nothing, the host tier is all there is to fill; to
        copy the same blocks out again and again would only cost."""
        stored = self.manager.residency.is_stored
        if self._config.remote is None:
            return stored(key, Tier.HOST)
        if self._clock() >= self._refused_until_s:
            return stored(key, Tier.REMOTE)
        return not self._config.host_bytes or stored(key, Tier.HOST)

    def _note_finished(self, finished: Sequence[BlockKey]) -> None:
        """Saves ended on all ranks: did the remote store take any of them?"""
        remote = self._config.remote
        if remote is None or not finished:
            return
        taken = any(self.manager.residency.is_stored(key, Tier.REMOTE) for key in finished)
        self._refused_until_s = 0.0 if taken else self._clock() + remote.breaker.backoff_cap_s
        if not taken:
            self._saves.drop_waiting()

    def take_report(self, report: WorkerReport) -> None:
        """Workers' news of one step. What belongs to an older epoch only ends waiting."""
        for rank in report.ranks:
            if rank.breaker is not None and self._health is not None:
                self._health.heard(rank.rank, rank.breaker)
            stale = rank.epoch != self._spaces.epoch
            if not stale:
                self.manager.handle(HostChanged(rank.rank, rank.host_changes))
                self.manager.handle(BlocksStored(rank.rank, rank.remote_stored))
            finished = self._saves.done(rank.saves_done)
            if not stale:
                self._note_finished(finished)
                self.sessions.stored(finished)
            for result in rank.loads:
                self._take_result(rank.rank, result, stale=stale)

    def _take_result(self, rank: Rank, result: LoadResult, *, stale: bool) -> None:
        if self._choice is not None:
            self._choice.heard(rank, result)
        for tier, (size_bytes, seconds) in result.speeds.items():
            self.speeds.note(tier, size_bytes, seconds)
        if result.job_id not in self._prefetcher.jobs:
            self._loads.take_result(result, self._records, stale=stale)
            return
        if not stale:
            tell_residency(self.manager, result)
        self._prefetcher.take_result(result, stale=stale)

    def has_pending_work(self) -> bool:
        """Keeps an idle engine stepping until saves, loads and operations are answered;
        workers and the keeper bound the time that takes."""
        return (
            self._saves.busy
            or self._loads.num_jobs > 0
            or self._prefetcher.busy
            or self.sessions.is_waiting
        )

    # --- the rest ----------------------------------------------------------------------

    def reset(self) -> bool:
        """Nothing stored so far may be read again (new weights): a fresh key space.

        False while vLLM still holds blocks that could be saved into it: reset again.
        """
        self.manager.handle(CacheReset())
        self._saves.drop_waiting()
        self._loads.cancel_all()
        self._prefetcher.cancel_all()
        self._offloader.cancel_all()
        self._spaces.renew()
        for record in self._records.values():
            record.hit = None
            record.lookup = None  # its answer is about keys of the old space
        logger.warning(
            "KV cache reset: values stored earlier will not be used again, and until it is "
            "restarted this engine shares none with others"
        )
        return not self._published_blocks()

    def _published_blocks(self) -> int:
        manager = self._kv_cache_manager
        return len(manager.block_pool.cached_block_hash_to_block) if manager is not None else 0

    def publish_to(self, kv_events: TierEvents) -> None:
        """Before the first step: tell routers of what is where."""
        self.manager.residency.listen(kv_events)
        self._prefetcher.on_published = kv_events.prefetched

    def status(self) -> dict[str, Any]:
        """Of the whole engine, for the operation ``status``."""
        remote, keeper, residency = self._config.remote, self._keeper, self.manager.residency
        host = {"blocks": residency.num_host_keys, "capacity_bytes": self._config.host_bytes}
        kept = keeper.status() if keeper is not None else {}
        fullness = {name: kept.pop(name, None) for name in ("used_bytes", "limit_bytes")}
        return {
            "tiers": {
                "gpu": self.sessions.gpu_status(),
                "host": host if self._config.host_bytes else None,
                "remote": None
                if remote is None or self._health is None or self._choice is None
                else {
                    "kind": remote.kind,
                    "url": remote.redacted_url,
                    **self._health.status(),
                    "slow": self._choice.skips,
                    "known_blocks": residency.num_remote_keys,
                    **fullness,
                },
            },
            "capabilities": self.sessions.capabilities.to_wire(),
            "queues": self.queue.status(),
            "keep_alive": kept or None,
            "speeds": {f"{tier.value}_bytes_per_s": self.speeds.bytes_per_s(tier) for tier in Tier},
            "operations": len(self.sessions.operations),
        }

    def sizes(self) -> tuple[int, ...]:
        """The gauges' values, in their order."""
        residency = self.manager.residency
        return (
            residency.num_host_keys,
            residency.num_remote_keys,
            len(self._records),
            self._loads.num_jobs + len(self._prefetcher.jobs),
            len(self.sessions.operations),
        )

    def health_sizes(self) -> tuple[int, ...]:
        """Changes when a gauge of the store's health does."""
        return self._health.sizes() if self._health is not None else ()

    def gauges(self) -> dict[str, float]:
        """Current sizes, by metric key."""
        kept = self._keeper.gauges() if self._keeper is not None else {}
        health = self._health.gauges() if self._health is not None else {}
        return {**dict(zip(_GAUGES, self.sizes(), strict=True)), **kept, **health}

    def shutdown(self) -> None:
        """Stop the threads that ask the store."""
        self._matcher.close()
        if self._keeper is not None:
            self._keeper.close()

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raise :class:`IntegrityError`; with ``idle`` also if anything is left over."""
        self.queue.check_integrity()
        self._saves.check_integrity()
        self._loads.check_integrity(self._records)
        self._prefetcher.check_integrity(idle=idle)
        self._offloader.check_integrity(idle=idle)
        if idle and (self._records or self.has_pending_work() or self.queue.busy):
            raise IntegrityError(
                f"idle, but {len(self._records)} requests, {self._loads.num_jobs} loads, "
                f"saves busy: {self._saves.busy}, queue busy: {self.queue.busy}"
            )


def _outcome(record: RequestRecord) -> dict[str, Any]:
    """Where a turn's prompt came from, for the response's ``kv_transfer_params``."""
    assert record.session is not None
    prompt = record.request.num_prompt_tokens
    host = record.loaded_tokens.get(Tier.HOST, 0)
    remote = record.loaded_tokens.get(Tier.REMOTE, 0)
    return {
        "session_id": record.session.session_id,
        "prompt_tokens": prompt,
        "gpu_tokens": record.gpu_tokens,
        "host_tokens": host,
        "remote_tokens": remote,
        "computed_tokens": max(0, prompt - record.gpu_tokens - host - remote),
    }
