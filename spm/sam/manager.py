"""SessionAwareManager: hints become claims on vLLM's block pool, within its bounds.

Owned by the scheduler thread, called at boundaries vLLM has anyway: a request's arrival, its
end before its blocks are freed, a preemption, a step, a reset. Nothing happens per token.
"""

import logging
from collections.abc import Callable, Container, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from spm.agent_hint import AgentHint, BlockRange, Edit, EditType
from spm.capability import NoPooling, PoolingCapability
from spm.config import SamConfig
from spm.hints import HintOutcome, RequestHint
from spm.metrics import Counters, Metric, metric_key
from spm.operation import Status
from spm.sam.attach import attach
from spm.sam.block_table import BlockTable
from spm.sam.chain import Association
from spm.sam.claims import SessionClaims
from spm.sam.edits import EditResult
from spm.sam.policy import ASSOCIATED, EXPECTED, Retention, decide, is_protected
from spm.sam.restoring import RestoredBlock
from spm.sam.zones import DEMOTED, FINISHED, ORDINARY, ZONE_LABELS, Zone
from tracker.ids import SessionRef

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

logger = logging.getLogger(__name__)
_GAUGES = (
    metric_key(Metric.SAM_ACTIVE),
    metric_key(Metric.SAM_RECORDS),
    metric_key(Metric.SAM_PROTECTED_BLOCKS),
    *(metric_key(Metric.SAM_BLOCKS, label) for label in ZONE_LABELS),
)


class SessionAwareManager:
    """The retention of one engine."""

    def __init__(
        self,
        config: SamConfig,
        scales: Sequence[int],
        max_records: int,
        counters: Counters,
        clock: Callable[[], float],
        windows: Container[int] = (),
    ) -> None:
        """``scales``: by KV cache group, its blocks in one logical block. ``windows``: groups
        with a sliding window."""
        self._windows = windows
        self._config = config
        self.pooling: PoolingCapability = NoPooling()
        """Who carries out what goes beyond the pool; set once, before the first step."""
        self._scales = scales
        self._max_records = max_records
        self._counters = counters
        self._clock = clock
        self._pool: BlockPool | None = None
        self._cached: object = None
        """The pool's map of cached blocks; vLLM puts a new one there when it resets it."""
        self._table: BlockTable | None = None
        self.claims: SessionClaims | None = None
        """None: hints do not act on the pool."""
        self.when_said: Callable[[SessionRef], None] = lambda ref: None
        """Told when the class of a session that is away may have changed."""

    def bind(self, pool: "BlockPool") -> None:
        """Take over the order of vLLM's free blocks, if the pool is as expected."""
        if not self._config.enabled:
            return
        self._table = attach(pool, self._config, self._counters, self._clock)
        if self._table is not None:
            self._pool, self._cached = pool, pool.cached_block_hash_to_block
            self.claims = SessionClaims(
                self._table, self._scales, self._max_records, self._clock, self._windows
            )

    # --- boundaries --------------------------------------------------------------------

    def tick(self, now_tick: int) -> None:
        """Once a step: let expired protection go, notice that vLLM reset its prefix cache."""
        if self._table is None or self._pool is None or self.claims is None:
            return
        if self._pool.cached_block_hash_to_block is not self._cached:
            self._cached = self._pool.cached_block_hash_to_block
            self._table.reset()
            self.claims.clear()
        self._table.tick(now_tick)

    def arrived(self, hint: RequestHint) -> None:
        """Count what will never act; the rest is counted when it acts."""
        if hint.outcome is HintOutcome.MALFORMED:
            self._counters.add(Metric.HINTS, label="malformed")
        elif hint.outcome is HintOutcome.UNKNOWN:
            self._counters.add(Metric.HINTS, label="unknown")
        elif hint.hint is not None and hint.ref is None:
            self._counters.add(Metric.HINTS, label="no_session")

    def finished(
        self,
        ref: SessionRef,
        hint: AgentHint | None,
        arrived_s: float,
        groups: "Sequence[Sequence[KVCacheBlock]]",
        hit_blocks: int = 0,
    ) -> tuple[Retention, list[EditResult]]:
        """A session's request ends and still has its blocks: claim them, then edit.
        ``hit_blocks``: logical blocks that were in the pool already when it came.

        Without a hint, what the session said before goes on while it has not expired.
        """
        if self.claims is None:
            self._counters.add(Metric.HINTS, hint is not None, label="off")
            return ASSOCIATED, []
        started_s = perf_counter()
        retention = self._retention(hint) if hint else self.claims.standing(ref)
        done = self.claims.associate(ref, arrived_s, groups, retention, hit_blocks=hit_blocks)
        if retention.zone is Zone.FINISHED:
            self.claims.release(ref, FINISHED, own_refs=1)
        results = [self.edit(ref, one, own_refs=1) for one in hint.edits] if hint else []
        if hint is not None:
            self._counters.add(Metric.HINTS, label=_outcome(done))
        self._counters.add(Metric.SAM_SECONDS, perf_counter() - started_s)
        return retention, results

    def preempted(
        self,
        ref: SessionRef,
        hint: AgentHint | None,
        arrived_s: float,
        groups: "Sequence[Sequence[KVCacheBlock]]",
    ) -> None:
        """vLLM freed the blocks of a running request; those still cached will be wanted
        again as soon as it is scheduled."""
        if self.claims is not None and hint is not None:
            retention = self._retention(hint)
            if retention.zone is not Zone.FINISHED:
                self.claims.associate(ref, arrived_s, groups, retention, ended=False)

    def closed(self, ref: SessionRef, *, told: bool = False) -> None:
        """A session is over. ``told``: the application said so, and its blocks go first;
        otherwise it was forgotten, and they become ordinary."""
        if self.claims is not None:
            self.claims.forget(ref, FINISHED if told else ORDINARY)
            self.when_said(ref)

    def _retention(self, hint: AgentHint) -> Retention:
        """A hint about a part of the blocks only associates while ranges are off."""
        control = hint.cache_control
        if control is not None and control.block_offset is not None and not self._config.ranges:
            return ASSOCIATED
        return decide(hint, self._config.soon_s)

    def restored(
        self, ref: SessionRef, blocks: Sequence[RestoredBlock], *, renew: bool = True
    ) -> int:
        """Blocks of a session that is expected back are in the pool: protect them as the
        session said last, or else as a resume that is asked for with nothing else said.
        Returns how many it holds. ``renew``: what it held before is protected anew too."""
        if self.claims is None:
            return 0
        started_s = perf_counter()
        standing = self.claims.standing(ref)
        retention = standing if is_protected(standing) else EXPECTED
        held = self.claims.restore(ref, retention, blocks, renew=renew)
        self.when_said(ref)
        self._counters.add(Metric.SAM_SECONDS, perf_counter() - started_s)
        return held

    def demoted(self, ref: SessionRef, blocks: BlockRange | None, *, own_refs: int = 0) -> int:
        """A session's blocks are kept elsewhere: the pool's may go, before ordinary ones.
        Returns how many it still held. ``own_refs``: as for :meth:`edit`."""
        if self.claims is None:
            return 0
        known = self.claims.release(ref, DEMOTED, blocks=blocks, own_refs=own_refs)
        if blocks is None:
            self.claims.note(ref, Retention(Zone.DEMOTED))
            self.when_said(ref)
        return known

    def low_free(self, limit: int) -> int:
        """Free blocks that nobody wants kept, counted up to ``limit``; 0 without a pool."""
        return self._table.queue.count_low(limit) if self._table is not None else 0

    def state(self, ref: SessionRef) -> tuple[Zone, float]:
        """The class last chosen for a session, and the seconds it is still protected."""
        return self.claims.state(ref) if self.claims is not None else (Zone.ORDINARY, 0.0)

    def own_blocks(self, ref: SessionRef) -> int:
        """Protected blocks of the pool that a session alone holds, of its newest branch."""
        return self.claims.own_blocks(ref) if self.claims is not None else 0

    def branch_blocks(self, ref: SessionRef) -> int:
        """Blocks of a session's newest branch, in the pool or not. O(blocks)."""
        return self.claims.num_blocks(ref) if self.claims is not None else 0

    # --- management --------------------------------------------------------------------

    def retain(self, ref: SessionRef, hint: AgentHint) -> tuple[Retention, Association]:
        """A hint without a request: what the session holds already changes its class."""
        retention = self._retention(hint)
        if self.claims is None:
            return retention, Association()
        if retention.zone is Zone.FINISHED:
            known = self.claims.release(ref, FINISHED)
            self.claims.note(ref, retention)
            done = Association(blocks=known)
        else:
            done = self.claims.retain(ref, retention)
        self.when_said(ref)
        return retention, done

    def edit(
        self, ref: SessionRef, edit: Edit, *, own_refs: int = 0, operation_id: str = ""
    ) -> EditResult:
        """Carry out one edit, begin to, or say why not. Counted by type and status when that is
        final. ``own_refs``: of the session's own request, if one is just ending.
        ``operation_id``: of the management request it is part of."""
        result = self._edit(ref, edit, own_refs, operation_id)
        if result.operation is not None:
            result.operation.when_done(lambda operation: self._count(edit, operation.status))
        else:
            self._count(edit, result.status)
        return result

    def _count(self, edit: Edit, status: Status) -> None:
        self._counters.add(Metric.EDITS, label=f"{edit.type.value},{status.value}")

    def _edit(self, ref: SessionRef, edit: Edit, own_refs: int, operation_id: str) -> EditResult:
        if self.claims is None:
            return EditResult(edit, Status.UNSUPPORTED, detail="hints do not act on this engine")
        if edit.blocks is not None and not self._config.ranges:
            return EditResult(edit, Status.UNSUPPORTED, detail="sam.ranges is false")
        if edit.type is EditType.EVICT:
            return self._evict(ref, edit, own_refs, self.claims)
        if not self._config.remote_operations:
            return EditResult(edit, Status.UNSUPPORTED, detail="sam.remote_operations is false")
        carry_out = {
            EditType.OFFLOAD: self.pooling.offload,
            EditType.PREFETCH: self.pooling.prefetch,
        }
        return EditResult.of(carry_out[edit.type](ref, edit, operation_id))

    def _evict(
        self, ref: SessionRef, edit: Edit, own_refs: int, claims: SessionClaims
    ) -> EditResult:
        """The session gives its claims up; what nobody else claims or uses is taken first, and
        stored copies that nobody else holds go too."""
        length = max(claims.logical_blocks(ref), self.pooling.logical_blocks(ref))
        known = claims.release(ref, FINISHED, blocks=edit.blocks, own_refs=own_refs)
        if edit.blocks is None:
            claims.note(ref, Retention(Zone.FINISHED))
        stored = 0
        if self._config.remote_operations:
            stored = self.pooling.evict(ref, edit).blocks
        if not known and not stored:
            detail = f"the session holds no block there; it has {length} logical blocks"
            return EditResult(edit, Status.NOT_FOUND, detail=detail)
        blocks = max(known, stored)
        if edit.blocks is not None and edit.blocks.stop > length:
            detail = f"the session has {length} logical blocks"
            return EditResult(edit, Status.PARTIAL, blocks, detail)
        return EditResult(edit, Status.OK, blocks)

    # --- numbers -----------------------------------------------------------------------

    def sizes(self) -> tuple[int, ...]:
        """The gauges' values, in their order; cheap."""
        table, claims = self._table, self.claims
        if table is None or claims is None:
            return (0,)
        return 1, claims.num_records, table.ledger.num_protected, *table.ledger.zone_sizes

    def gauges(self) -> dict[str, float]:
        """Current sizes, by metric key."""
        return dict(zip(_GAUGES, self.sizes(), strict=False))

    def gpu_status(self) -> dict[str, int]:
        """vLLM's block pool, for the operation ``status``; empty if hints do not act on it."""
        if self._pool is None or self._table is None:
            return {}
        return {
            "blocks": self._pool.num_gpu_blocks - 1,
            "free_blocks": self._pool.get_num_free_blocks(),
            "protected_blocks": self._table.ledger.num_protected,
        }

    def check_integrity(self) -> None:
        """Raise :class:`spm.errors.IntegrityError` if claims, table or queue disagree."""
        if self.claims is not None:
            self.claims.check_integrity()


def _outcome(done: Association) -> str:
    if done.late:
        return "late"
    return "clipped" if done.clipped else "acted"
