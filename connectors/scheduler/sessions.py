"""Sessions at vLLM's boundaries: who a request belongs to, and what its hint does.

Owned by the scheduler thread. Keeps a record only of requests that name a session or carry
a hint; every other request passes with one look at three fields.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from connectors.groups import CacheGeometry
from spm.agent_hint import AgentHint
from spm.capability import PoolingCapability
from spm.config import SpmConfig
from spm.errors import IntegrityError
from spm.events import RequestEnded, RequestStarted, SessionOpened
from spm.hints import HintOutcome, RequestHint, request_hint
from spm.lifecycle_bus import LifecycleBus
from spm.manager import SessionAwarePoolingManager
from spm.metrics import Counters, Metric, metric_key
from spm.sam.management import SessionManagement
from spm.sam.manager import SessionAwareManager
from spm.tenancy import TenantVerifier
from tracker.ids import SessionRef

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)
_SESSIONS, _SESSION_KEYS = metric_key(Metric.SESSIONS), metric_key(Metric.SESSION_KEYS)


@dataclass(slots=True)
class _SessionRequest:
    """One request of a session, from arrival to end."""

    request: "Request"
    ref: SessionRef
    hint: RequestHint
    arrived_s: float
    hit_tokens: int | None = None
    """That the GPU pool had when the request was first admitted."""
    was_held: bool = False
    """It has had to wait so that others could resume."""


class SessionHooks:
    """Sessions of one engine."""

    def __init__(
        self,
        config: SpmConfig,
        geometry: CacheGeometry,
        world_size: int,
        engine_id: str,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._geometry = geometry
        self._has_windows = geometry.has_windows
        self._clock = clock
        self._counters = counters
        self._tick = 0
        self._tenants = TenantVerifier()
        windows = [at for at, g in enumerate(geometry.groups) if g.window_tokens is not None]
        self.sam = SessionAwareManager(
            config.sam, geometry.scales, config.max_keys, counters, clock, windows
        )
        self.bus = LifecycleBus(engine_id, counters)
        self.manager = SessionAwarePoolingManager(
            config, world_size, counters, clock, self._closed, self.bus
        )
        self.management = SessionManagement(self.sam, self.manager, self._tenants, counters)
        self._when_closed: Callable[[SessionRef], None] = lambda ref: None
        self._kv_cache_manager: KVCacheManager | None = None
        self._requests: dict[str, _SessionRequest] = {}
        self.changed = True
        """Whether a gauge may have changed since somebody reset this."""

    def set_pooling(self, pooling: PoolingCapability, closed: Callable[[SessionRef], None]) -> None:
        """Before the first step: who carries out what goes beyond the GPU pool. ``closed`` is
        told of every session that is ended or forgotten."""
        self.sam.pooling = self.management.pooling = pooling
        self._when_closed = closed

    def _closed(self, ref: SessionRef) -> None:
        self.sam.closed(ref)
        self._when_closed(ref)

    def bind(self, kv_cache_manager: "KVCacheManager") -> None:
        """Before the first step: the pool whose order of free blocks hints decide."""
        self._kv_cache_manager = kv_cache_manager
        pool = kv_cache_manager.block_pool
        managers = kv_cache_manager.coordinator.single_type_managers
        if any(manager.block_pool is not pool for manager in managers):
            logger.warning("hints will not act on vLLM's block pool: this model has several pools")
            return
        self.sam.bind(pool)

    # --- a request's life --------------------------------------------------------------

    def session_of(self, request: "Request") -> SessionRef | None:
        """Open the session a new request names, once; None if it names none."""
        known = self._requests.get(request.request_id)
        if known is not None:
            return known.ref
        hint = request_hint(
            request.session_id, request.kv_transfer_params, request.kv_hints, self._tenants
        )
        if hint.outcome is not HintOutcome.NONE:
            self.sam.arrived(hint)
        if hint.ref is not None:
            self.changed = True
            self.manager.handle(SessionOpened(hint.ref, hint.parent))
            self.manager.handle(RequestStarted(hint.ref))
            self._requests[request.request_id] = _SessionRequest(
                request, hint.ref, hint, self._clock()
            )
        return hint.ref

    def request_of(self, request_id: str) -> tuple[SessionRef, AgentHint | None] | None:
        """Whose a running request is, and what it said; None if it is nobody's."""
        known = self._requests.get(request_id)
        return (known.ref, known.hint.hint) if known is not None else None

    def admitted(self, request_id: str, hit_tokens: int) -> None:
        """vLLM found so many tokens of the prompt in its own pool."""
        known = self._requests.get(request_id)
        if known is not None and known.hit_tokens is None:
            known.hit_tokens = hit_tokens

    def arrival(self, request_id: str) -> tuple[SessionRef, float] | None:
        """Whose a running request is, and when it came; None if it is nobody's."""
        known = self._requests.get(request_id)
        return (known.ref, known.arrived_s) if known is not None else None

    def note_held(self, request_id: str) -> None:
        """The request has to wait so that others can resume."""
        known = self._requests[request_id]
        if not known.was_held:
            known.was_held = True
            self._counters.add(Metric.ADMISSIONS_HELD)

    def hit_tokens(self, request_id: str) -> int:
        """That vLLM found in its own pool when it first admitted the request."""
        known = self._requests.get(request_id)
        return (known.hit_tokens or 0) if known is not None else 0

    def request_finished(self, request: "Request", *, loading: bool) -> dict[str, Any] | None:
        """Before vLLM frees the blocks, so that no hint can be late. ``loading``: the blocks
        hold nothing yet. Returns what to tell the client."""
        known = self._requests.pop(request.request_id, None)
        if known is None:
            return None
        self.changed = True
        groups: Sequence[Sequence[KVCacheBlock]] = ()
        if self._kv_cache_manager is not None and not loading:
            groups = self._resumable(
                request, self._kv_cache_manager.get_blocks(request.request_id).blocks
            )
        outcome: dict[str, Any] = {"session_id": known.ref.session_id}
        keep_s = 0.0
        if any(groups):
            hit_blocks = (known.hit_tokens or 0) // self._geometry.alignment_tokens
            retention, edits = self.sam.finished(
                known.ref, known.hint.hint, known.arrived_s, groups, hit_blocks
            )
            keep_s = retention.ttl_s
            outcome["class"] = retention.zone.name.lower()
            outcome["ttl_s"] = retention.ttl_s
            if edits:
                outcome["edits"] = [edit.to_wire() for edit in edits]
        self.manager.handle(RequestEnded(known.ref, keep_s))
        return outcome

    def _resumable(
        self, request: "Request", groups: "Sequence[Sequence[KVCacheBlock]]"
    ) -> "Sequence[Sequence[KVCacheBlock]]":
        """With what a hit needs of sliding windows and vLLM has let go of: see
        :meth:`_window`."""
        if not self._has_windows or self._kv_cache_manager is None or self.sam.claims is None:
            return groups
        pool = self._kv_cache_manager.block_pool
        return [
            blocks
            if self._geometry.groups[index].window_tokens is None
            else self._window(pool, request, index, blocks)
            for index, blocks in enumerate(groups)
        ]

    def _window(
        self, pool: "BlockPool", request: "Request", index: int, blocks: "Sequence[KVCacheBlock]"
    ) -> "Sequence[KVCacheBlock]":
        """Blocks of one group with a sliding window that the session can resume from.

        A hit at the last full block also needs the one before the first still held, let go
        while the last, unfinished block was being filled. But by default vLLM publishes only
        what a hit at the prompt's end needs, and a long reply has left that behind.
        """
        group, alignment = self._geometry.groups[index], self._geometry.alignment_tokens
        stop = request.num_prompt_tokens // alignment * alignment // group.block_tokens
        first = next((at for at, block in enumerate(blocks) if not block.is_null), 0)
        wanted = range(max(0, first - 1), first)
        if not any(block.block_hash is not None for block in blocks[stop:]):
            hit_tokens = (request.num_prompt_tokens - 1) // alignment * alignment
            wanted = range(group.first_needed_block(hit_tokens), min(stop, len(blocks)))
        found = list(blocks)
        for at, name in zip(
            wanted, self._names(request, index, wanted.start, wanted.stop), strict=False
        ):
            if found[at].is_null:
                found[at] = self._cached_block(pool, name)
        return found

    # --- a step ------------------------------------------------------------------------

    def step(self, preempted: Iterable[str]) -> None:
        """Once a step, after vLLM has scheduled it."""
        self.tick()
        for request_id in preempted if self.sam.claims is not None else ():
            known = self._requests.get(request_id)
            if known is not None and known.hint.hint is not None:
                groups = self._cached_blocks(known.request)
                self.sam.preempted(known.ref, known.hint.hint, known.arrived_s, groups)
        self.sam.tick(self._tick)

    def tick(self) -> None:
        """Forget sessions whose time is over. Once a step, and before a management request: an
        idle engine takes no step."""
        tick = int(self._clock())
        if tick != self._tick or self.manager.has_backlog:  # deadlines are whole seconds
            self._tick = tick
            self.changed = True
            self.manager.tick()

    def _cached_blocks(self, request: "Request") -> "list[list[KVCacheBlock]]":
        """Where the blocks of a request are that has lost its block table: by their hashes."""
        assert self._kv_cache_manager is not None
        pool = self._kv_cache_manager.block_pool
        return [
            [
                self._cached_block(pool, name)
                for name in self._names(request, index, 0, request.num_tokens)
            ]
            for index in range(len(self._geometry.groups))
        ]

    def _names(
        self, request: "Request", index: int, start: int, stop: int
    ) -> "list[BlockHashWithGroupId]":
        """What vLLM calls blocks ``start..stop`` of a group, as far as they are full."""
        if self._geometry.groups[index].block_tokens % self._geometry.hash_tokens:
            return []
        keys = self._geometry.published_keys(request, self._geometry.groups[index], start, stop)
        return cast("list[BlockHashWithGroupId]", keys)

    def _cached_block(self, pool: "BlockPool", name: "BlockHashWithGroupId") -> "KVCacheBlock":
        return pool.cached_block_hash_to_block.get_one_block(name) or pool.null_block

    # --- the rest ----------------------------------------------------------------------

    def sizes(self) -> tuple[int, ...]:
        """What gauges are made of: cheap, and different when a gauge is."""
        tracker = self.manager.tracker
        return tracker.num_sessions, tracker.num_keys, *self.sam.sizes()

    def gauges(self) -> dict[str, float]:
        """Current sizes, by metric key."""
        tracker = self.manager.tracker
        return {
            _SESSIONS: tracker.num_sessions,
            _SESSION_KEYS: tracker.num_keys,
            **self.sam.gauges(),
        }

    def check_integrity(self, *, idle: bool) -> None:
        """Raise :class:`spm.errors.IntegrityError` if the books are off."""
        self.manager.check_integrity()
        self.sam.check_integrity()
        if idle and self._requests:
            raise IntegrityError(f"idle, but {len(self._requests)} requests of sessions")
