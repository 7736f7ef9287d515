"""The capability protocol over a wrapped connector: what can be had of it by asking on behalf
of stand-in requests.

Scheduler thread only. Nothing here calls the wrapped connector: what is asked for waits for
the next step, see :class:`connectors.wrapping.half.WrappingHalf`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from connectors.groups import CacheGeometry
from connectors.scheduler.gpu_pool import GpuPool
from connectors.scheduler.operations import RunningOperations
from connectors.wrapping.chains import SessionChain, SessionChains
from connectors.wrapping.keep_alive import LookupKeepAlive
from connectors.wrapping.lookups import PrefixLookups
from connectors.wrapping.offloads import WrappedOffloads
from connectors.wrapping.prefetches import WrappedPrefetches
from connectors.wrapping.presence import KnownPrefixes
from connectors.wrapping.stand_in import StandIns
from spm.agent_hint import BlockRange, Edit, PrefetchTarget
from spm.capability import Capabilities
from spm.config import SpmConfig
from spm.manager import SessionAwarePoolingManager
from spm.metrics import Counters, Metric, metric_key
from spm.operation import Operation, Status, ended
from spm.residency_view import Residence, residency_view
from spm.sam.manager import SessionAwareManager
from tracker.ids import BlockKey, GroupId, SessionRef

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_PINS = "the connector pins what it is asked for: it is asked for requests only"
_GAUGES = (metric_key(Metric.OPERATIONS), metric_key(Metric.LOADS_IN_FLIGHT))


@dataclass(frozen=True, slots=True)
class PoolingParts:
    """What the operations of one engine are made of."""

    config: SpmConfig
    geometry: CacheGeometry
    manager: SessionAwarePoolingManager
    sam: SessionAwareManager
    chains: SessionChains
    lookups: PrefixLookups
    prefetches: WrappedPrefetches
    stand_ins: StandIns
    lookup_refreshes: bool
    """Being asked for a prefix keeps the wrapped connector from evicting it."""
    lookups_pin: bool
    """The wrapped connector is not to be asked on behalf of stand-ins."""
    vllm_config: "VllmConfig"
    world_size: int
    engine_id: str
    """Unique among engines and starts."""
    counters: Counters
    clock: Callable[[], float]


class WrappedPooling:
    """Implements :class:`spm.capability.PoolingCapability`.

    A store that can do more than be asked is a subclass. What it overrides, all on the
    scheduler thread and without waiting: :attr:`capabilities`, :meth:`_after_association`,
    :meth:`confirm`, :meth:`_prefetch_to_host`, :meth:`evict`, :meth:`released`,
    :meth:`was_reset`, :meth:`external_blocks`, :meth:`tick`, :attr:`has_pending_work`,
    :meth:`_external_status`, :attr:`keep_alive_status`, :meth:`sizes`, :meth:`gauges`,
    :meth:`close`.
    """

    def __init__(self, parts: PoolingParts) -> None:
        self._parts = parts
        self._config = parts.config
        self._geometry = parts.geometry
        self._manager = parts.manager
        self._sam = parts.sam
        self._chains = parts.chains
        self._clock = parts.clock
        self.operations = RunningOperations(parts.manager, parts.config)
        self.pool: GpuPool | None = None
        """vLLM's pool; None: nothing can be put there. Set before the first step."""
        self._block_bytes = 0
        self._known = KnownPrefixes(parts.clock)
        self._offloads = WrappedOffloads(self._confirm, parts.sam, parts.clock)
        self._keep_alive: LookupKeepAlive | None = None
        if parts.lookup_refreshes and not parts.lookups_pin:
            self._keep_alive = LookupKeepAlive(
                parts.chains,
                parts.manager.holding,
                self._look,
                parts.config.keep_alive.interval_s,
                parts.clock,
            )

    def bind(self, pool: GpuPool | None, block_bytes: int) -> None:
        """Before the first step: vLLM's pool, None if nothing can be put there, and the size of
        a logical block on one rank."""
        self.pool = self._parts.prefetches.fills.pool = pool
        self._parts.prefetches.block_bytes = max(1, block_bytes)
        self._block_bytes = block_bytes * self._parts.world_size

    # --- for subclasses ----------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """What is offered now."""
        works = self._parts.stand_ins.works
        return Capabilities(
            offload=works and self._can_confirm,
            prefetch=self._parts.prefetches.is_possible and not self._parts.lookups_pin,
            evict=True,
            release=True,
            query_residency=True,
            touch=works and self._keep_alive is not None,
        )

    @property
    def _can_confirm(self) -> bool:
        """Whether it can be found out what is stored."""
        return not self._parts.lookups_pin

    def _after_association(self, ref: SessionRef, chain: SessionChain) -> None:
        """A request of the session ended; ``chain`` is what the session consists of now."""

    def confirm(
        self, ref: SessionRef, chain: SessionChain, stop: int, tell: Callable[[int | None], None]
    ) -> Callable[[], None]:
        """Ask how many of the chain's first ``stop`` logical blocks are stored outside the GPU
        pool, from the first on and without a hole. ``tell`` gets the answer once, now or in a
        later :meth:`tick` or step; None: nobody could say. Returns a function that withdraws
        the question: then ``tell`` is not called any more."""
        return self._parts.lookups.ask(chain, stop, tell)

    def _prefetch_to_host(self, ref: SessionRef, edit: Edit, operation_id: str) -> Operation:
        """Bring a session's blocks from behind the connector into host memory near the
        workers. An operation that goes on has to pass through ``self.operations.begun``."""
        detail = "a connector can only be asked to load into the GPU pool"
        return ended(ref, edit, Status.UNSUPPORTED, detail)

    def released(self, ref: SessionRef) -> None:
        """The session was ended or forgotten: nothing goes on for it, nothing is kept."""
        self._chains.forget(ref)
        self._stop(ref)

    def was_reset(self) -> None:
        """Nothing stored so far may be used again (new weights)."""
        self._offloads.cancel_all()
        self._parts.prefetches.cancel_all()
        self._parts.lookups.fail_all()
        self._known.clear()

    def external_blocks(self, ref: SessionRef, chain: SessionChain) -> Residence:
        """Which of ``chain.names`` are in which tier behind the GPU pool, as last confirmed."""
        return self._known.of(ref, chain)

    def tick(self) -> None:
        """Once a step, and after management. Costs little when nothing goes on."""
        self._offloads.tick()
        if self._keep_alive is not None:
            self._keep_alive.tick()

    @property
    def has_pending_work(self) -> bool:
        """Keeps an idle engine stepping until what was asked is answered, or should have been."""
        parts = self._parts
        return parts.lookups.busy or parts.prefetches.pending or self._offloads.pending

    def _external_status(self) -> dict[str, Any]:
        """The tiers behind the GPU pool, for the operation ``status``."""
        wrapped = self._config.wrapped
        assert wrapped is not None
        remote = {
            "kind": wrapped.kv_connector,
            "url": "",
            "breaker": "closed" if self._parts.stand_ins.works else "open",
            "known_blocks": self._known.total_blocks,
            "used_bytes": None,
            "limit_bytes": None,
        }
        return {"host": None, "remote": remote}

    @property
    def keep_alive_status(self) -> dict[str, Any] | None:
        """What is kept alive and how well, for the operation ``status``."""
        return self._keep_alive.status() if self._keep_alive is not None else None

    def sizes(self) -> tuple[int, ...]:
        """What gauges are made of: cheap, and different when a gauge is."""
        return (len(self.operations), int(self._parts.prefetches.fills.busy))

    def gauges(self) -> dict[str, float]:
        """Current sizes, by metric key."""
        return dict(zip(_GAUGES, WrappedPooling.sizes(self), strict=True))

    def close(self) -> None:
        """At the engine's end."""

    def check_integrity(self, *, idle: bool) -> None:
        """Raise :class:`spm.errors.IntegrityError` if the books are off; with ``idle`` also if
        anything is left over."""
        self._offloads.check_integrity(idle=idle)
        self._parts.prefetches.check_integrity(idle=idle)

    # --- the protocol ------------------------------------------------------------------

    def register_cache(
        self, ref: SessionRef, keys: Mapping[GroupId, Sequence[BlockKey | None]]
    ) -> None:
        """Names of ours say nothing to a wrapped connector: see :meth:`register`."""

    def register(self, ref: SessionRef, request: "Request", stop_tokens: int) -> None:
        """A request of the session ended, having computed its first ``stop_tokens``."""
        if not self._manager.tracker.is_open(ref):
            return
        chain = self._chains.put(ref, request, stop_tokens)
        if chain is not None:
            if self._keep_alive is not None:
                self._keep_alive.used(ref)
            self._after_association(ref, chain)

    def refreshed(self, ref: SessionRef) -> None:
        """How long a session is kept is asked anew each time."""
        if self._keep_alive is not None and self._chains.get(ref) is not None:
            self._keep_alive.wanted(ref)

    def offload(self, ref: SessionRef, edit: Edit, operation_id: str = "") -> Operation:
        refusal = self._refusal(ref, edit)
        if refusal is not None:
            return refusal
        if not self._can_confirm:
            return ended(ref, edit, Status.UNSUPPORTED, _PINS)
        chain = self._chains.get(ref)
        if chain is None:
            return self._no_chain(ref, edit)
        span, cut = _clipped(chain, edit.blocks)
        if span is None:
            return ended(ref, edit, Status.NOT_FOUND, cut)
        return self.operations.begun(
            self._offloads.start(ref, edit, chain, span, cut), operation_id
        )

    def prefetch(self, ref: SessionRef, edit: Edit, operation_id: str = "") -> Operation:
        refusal = self._refusal(ref, edit)
        if refusal is not None:
            return refusal
        if edit.target is PrefetchTarget.HOST:
            return self._prefetch_to_host(ref, edit, operation_id)
        prefetches = self._parts.prefetches
        if self._parts.lookups_pin:
            return ended(ref, edit, Status.UNSUPPORTED, _PINS)
        if not prefetches.is_possible:
            detail = "nothing can be loaded ahead into the GPU pool"
            if prefetches.fills.loads_in_step:
                detail = "the connector loads only within a request's own step"
            return ended(ref, edit, Status.UNSUPPORTED, detail)
        chain = self._chains.get(ref)
        if chain is None:
            return self._no_chain(ref, edit)
        span, cut = _clipped(chain, edit.blocks)
        if span is None:
            return ended(ref, edit, Status.NOT_FOUND, cut)
        operation = prefetches.start(ref, edit, chain, span, cut)
        return self.operations.begun(operation, operation_id)

    def evict(self, ref: SessionRef, edit: Edit) -> Operation:
        """The session forgets the range and, as nothing behind a hole can be resumed from, what
        lies behind it. What the connector has stored stays: it cannot be told to delete."""
        chain = self._chains.get(ref)
        span = _clipped(chain, edit.blocks)[0] if chain is not None else None
        if edit.blocks is None:
            self._stop(ref)
        if span is None:
            return ended(ref, edit, Status.NOT_FOUND)
        self._chains.cut(ref, span.start)
        operation = Operation(ref, edit, span.stop - span.start)
        operation.done_blocks = operation.blocks
        return operation.end(Status.OK)

    def release(self, ref: SessionRef) -> None:
        """The same as being closed, which has been by now."""

    def logical_blocks(self, ref: SessionRef) -> int:
        chain = self._chains.get(ref)
        return len(chain) if chain is not None else 0

    def in_progress(self, ref: SessionRef) -> list[dict[str, Any]]:
        return self.operations.of(ref)

    def query_residency(self, ref: SessionRef) -> dict[str, Any]:
        """Of a model with several KV cache groups, what is in the GPU pool is not in it."""
        chain = self._chains.get(ref)
        if chain is None:
            return {}
        pool, external = self.pool, self.external_blocks(ref, chain)

        def in_gpu(_group: GroupId, index: int) -> bool:
            return pool is not None and pool.find(chain.names[index]) is not None

        view = residency_view([chain.names], [1], [self._block_bytes], external, in_gpu)
        wire = view.to_wire()
        if pool is None:
            del wire["gpu"], wire["gpu_bytes"]
        return wire

    def recall(self, ref: SessionRef, tell: Callable[[dict[str, Any] | None], None]) -> bool:
        """No connector can be asked what a session is."""
        return False

    # --- parts of it -------------------------------------------------------------------

    def _refusal(self, ref: SessionRef, edit: Edit) -> Operation | None:
        if not self._parts.stand_ins.works:
            detail = "the wrapped connector failed when it was asked for a session"
            return ended(ref, edit, Status.UNSUPPORTED, detail)
        return self.operations.refusal(ref, edit)

    def _no_chain(self, ref: SessionRef, edit: Edit) -> Operation:
        if not self._manager.tracker.is_open(ref):
            return ended(ref, edit, Status.NOT_FOUND, "no such session on this engine")
        detail = (
            "the session has no full block that the connector could be asked about: images, "
            "embeddings, and salts or adapters that it does not keep apart, are not stored; the "
            "sessions used longest ago are forgotten (max_chain_tokens)"
        )
        return ended(ref, edit, Status.NOT_FOUND, detail)

    def _confirm(
        self, ref: SessionRef, chain: SessionChain, stop: int, tell: Callable[[int | None], None]
    ) -> Callable[[], None]:
        """As :meth:`confirm`; what is said is remembered."""

        def note(blocks: int | None) -> None:
            if blocks is not None:
                self._known.note(ref, chain, blocks)
            tell(blocks)

        return self.confirm(ref, chain, stop, note)

    def _look(self, ref: SessionRef, tell: Callable[[int | None], None]) -> None:
        """Ask about all of a session, as keep-alive."""
        chain = self._chains.get(ref)
        assert chain is not None

        def note(blocks: int | None) -> None:
            if blocks is not None and self._chains.get(ref) is chain:
                self._known.note(ref, chain, blocks)
            tell(blocks)

        self._parts.lookups.ask(chain, len(chain), note)

    def request_arrived(self, ref: SessionRef) -> None:
        """The session is back."""
        self._parts.prefetches.request_arrived(ref)
        self._offloads.request_arrived(ref)

    def closed(self, ref: SessionRef) -> None:
        """The session was ended or forgotten."""
        self.released(ref)

    def _stop(self, ref: SessionRef) -> None:
        """Nothing goes on for the session any more."""
        self._parts.prefetches.release(ref)
        self._offloads.release(ref)
        self._known.forget(ref)
        if self._keep_alive is not None:
            self._keep_alive.forget(ref)

    def status(self) -> dict[str, Any]:
        """Of the whole engine, for the operation ``status``."""
        gpu = {**self._sam.gpu_status(), "block_bytes": self._block_bytes}
        return {
            "tiers": {"gpu": gpu, **self._external_status()},
            "capabilities": self.capabilities.to_wire(),
            "queues": {
                "lookup": self._parts.lookups.status(),
                "prefetch": self._parts.prefetches.status(),
            },
            "keep_alive": self.keep_alive_status,
            "speeds": {},
            "operations": len(self.operations),
        }


def _clipped(chain: SessionChain, blocks: BlockRange | None) -> tuple[BlockRange | None, str]:
    """What of a range the chain has, and what to say if that is not all; None: nothing."""
    length = len(chain)
    if blocks is None:
        return BlockRange(0, length), ""
    cut = f"the session has {length} logical blocks" if blocks.stop > length else ""
    if blocks.start >= length:
        return None, cut
    return BlockRange(blocks.start, min(blocks.stop, length)), cut
