"""What each session claims in the block pool: its branches, what it said, and their end.

Belongs to the scheduler thread. Bounded by ``max_records``: over it the session idle longest,
of the tenant that has the most, loses its claims, which is a loss of retention and nothing else.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spm.agent_hint import BlockRange
from spm.sam.audit import audit_table
from spm.sam.block_table import BlockTable
from spm.sam.chain import Association, claim_chain, reclaim_chain
from spm.sam.frontier import NO_BLOCK, Frontier
from spm.sam.holders import Reservation
from spm.sam.policy import UNHINTED, Retention, is_protected
from spm.sam.record_bound import RecordBound
from spm.sam.restoring import RestoredBlock, restore_places
from spm.sam.zones import (
    ASSOCIATED,
    DEMOTED,
    ORDINARY,
    Target,
    Zone,
    target_of,
    tick_of,
)
from tracker.ids import SessionRef, TenantId

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

MAX_FRONTIERS = 8
"""Branches of one session that can be resumed; beyond it the oldest is given up."""
MAX_TENANTS = 1 << 16
"""Tenants with a cap of their own; beyond it they share one."""


@dataclass(slots=True)
class _Held:
    """One session's part of the pool."""

    tenant: int
    frontiers: list[Frontier] = field(default_factory=list)
    retention: Retention = UNHINTED
    deadline_s: float = 0.0


class SessionClaims:
    """Claims by session."""

    def __init__(
        self,
        table: BlockTable,
        scales: Sequence[int],
        max_records: int,
        clock: Callable[[], float],
        windows: Container[int] = (),
    ) -> None:
        """``scales``: by KV cache group, its blocks in one logical block. ``windows``: groups
        with a sliding window."""
        self._table = table
        self._windows = windows
        self._scales = tuple(scales)
        self._clock = clock
        self._held: dict[SessionRef, _Held] = {}
        self._bound = RecordBound(max_records)
        self._tenants: dict[TenantId, int] = {}

    @property
    def num_records(self) -> int:
        """Pairs of a session and a block it holds or held."""
        return self._bound.num_records

    # --- boundaries --------------------------------------------------------------------

    def associate(
        self,
        ref: SessionRef,
        arrived_s: float,
        groups: "Sequence[Sequence[KVCacheBlock]]",
        retention: Retention,
        *,
        ended: bool = True,
        hit_blocks: int = 0,
    ) -> Association:
        """A request of the session ends; its blocks, by group and logical index, are still
        its own. Supersedes what requests left that had ended when this one arrived.

        ``ended`` False: it was interrupted, and its end will supersede this. ``hit_blocks``:
        logical blocks that were in the pool already when it came.
        """
        held = self._touch(ref)
        strong, weak = self._said(held, retention)
        old = [f for f in held.frontiers if _supersedes(arrived_s, ended, f)]
        held.frontiers = [f for f in held.frontiers if f not in old]
        frontier = old.pop() if old else self._new_frontier(held, len(groups))
        self._bound.count(ref.tenant, -frontier.num_places)
        stops, hits = self._strong_stops(retention), [hit_blocks * s for s in self._scales]
        done = claim_chain(frontier, groups, (strong, weak), stops, hits, self._windows)
        frontier.finished_s = self._clock() if ended else arrived_s
        frontier.interrupted = not ended
        self._bound.count(ref.tenant, frontier.num_places)
        held.frontiers.append(frontier)
        while len(held.frontiers) > MAX_FRONTIERS:
            old.append(held.frontiers.pop(0))
        for superseded in old:
            self._end_frontier(ref.tenant, superseded, DEMOTED)
        self._enforce_bound(ref)
        return done

    def retain(self, ref: SessionRef, retention: Retention) -> Association:
        """A hint without a request: what the session holds already changes its class."""
        held = self._held.get(ref)
        done = Association()
        if held is not None:
            targets = self._said(held, retention)
            for frontier in held.frontiers:
                reclaim_chain(frontier, targets, self._strong_stops(retention), done)
        return done

    def restore(
        self,
        ref: SessionRef,
        retention: Retention,
        restored: Sequence[RestoredBlock],
        *,
        renew: bool = True,
    ) -> int:
        """Blocks of a session that are in the pool although no request of it has just ended
        (prefetched, or found there) join its newest branch; how many it holds of them.
        ``renew``: what it holds already is protected anew too, which costs O(its blocks)."""
        held = self._touch(ref)
        fresh = not held.frontiers
        if fresh:
            held.frontiers.append(self._new_frontier(held, len(self._scales)))
            held.frontiers[-1].finished_s = self._clock()
        frontier = held.frontiers[-1]
        self._bound.count(ref.tenant, -frontier.num_places)
        if renew or fresh:
            targets = self._said(held, retention)
            reclaim_chain(frontier, targets, self._strong_stops(retention), Association())
        known = restore_places(frontier, restored, self._strong_stops(held.retention))
        self._bound.count(ref.tenant, frontier.num_places)
        self._enforce_bound(ref)
        return known

    def release(
        self,
        ref: SessionRef,
        leave: Target,
        *,
        blocks: BlockRange | None = None,
        own_refs: int = 0,
    ) -> int:
        """Give back a session's blocks, or a logical range of them: how many it still held.
        Those that nobody claims or uses then go to ``leave``; ``own_refs`` are those of the
        request of the session whose end made the newest branch."""
        held = self._held.get(ref)
        known = 0
        for frontier in held.frontiers if held else ():
            own = own_refs if held and frontier is held.frontiers[-1] else 0
            for group, index in frontier.places():
                logical = index // self._scales[group]
                if blocks is None or blocks.start <= logical < blocks.stop:
                    known += frontier.release(group, index, leave, own)
        if held is not None and blocks is None:
            for frontier in held.frontiers:
                self._end_frontier(ref.tenant, frontier, leave)
            held.frontiers.clear()
        return known

    def forget(self, ref: SessionRef, leave: Target = ORDINARY) -> None:
        """The session is over."""
        held = self._held.pop(ref, None)
        if held is not None:
            for frontier in held.frontiers:
                self._end_frontier(ref.tenant, frontier, leave)
            self._bound.closed(ref)

    def clear(self) -> None:
        """The prefix cache was reset: nobody holds anything."""
        for ref, held in self._held.items():
            for frontier in held.frontiers:
                self._end_frontier(ref.tenant, frontier, ORDINARY)
            held.frontiers.clear()

    # --- questions ---------------------------------------------------------------------

    def num_blocks(self, ref: SessionRef) -> int:
        """Blocks of the session's newest branch, all groups."""
        newest = self._newest(ref)
        return sum(len(ids) - ids.count(NO_BLOCK) for ids in newest.ids) if newest else 0

    def num_resident(self, ref: SessionRef) -> int:
        """How many of these still have their block in the GPU pool. O(blocks)."""
        newest = self._newest(ref)
        return (
            sum(newest.holds(block_id) for ids in newest.ids for block_id in ids) if newest else 0
        )

    def own_blocks(self, ref: SessionRef) -> int:
        """Protected blocks of its newest branch that the session holds alone."""
        newest = self._newest(ref)
        return newest.strong.blocks if newest is not None else 0

    def _newest(self, ref: SessionRef) -> Frontier | None:
        held = self._held.get(ref)
        return held.frontiers[-1] if held and held.frontiers else None

    def standing(self, ref: SessionRef) -> Retention:
        """What the session said last, if that still holds: a request that says nothing
        renews it."""
        held = self._held.get(ref)
        if held is None or held.retention.zone in (Zone.FINISHED, Zone.DEMOTED):
            return UNHINTED
        expired = is_protected(held.retention) and held.deadline_s <= self._clock()
        return UNHINTED if expired else held.retention

    def note(self, ref: SessionRef, retention: Retention) -> None:
        """Remember what was said of a session that holds nothing any more."""
        held = self._held.get(ref)
        if held is not None:
            self._said(held, retention)

    def state(self, ref: SessionRef) -> tuple[Zone, float]:
        """The class last chosen for the session, and the seconds it is still protected."""
        held = self._held.get(ref)
        if held is None:
            return Zone.ORDINARY, 0.0
        left_s = max(0.0, held.deadline_s - self._clock())
        expired = is_protected(held.retention) and left_s == 0.0
        return Zone.ORDINARY if expired else held.retention.zone, left_s

    def logical_blocks(self, ref: SessionRef) -> int:
        """Length of the session's longest frontier, in logical blocks."""
        held = self._held.get(ref)
        lengths = [
            -(-len(ids) // scale)
            for frontier in (held.frontiers if held else ())
            for ids, scale in zip(frontier.ids, self._scales, strict=True)
        ]
        return max(lengths, default=0)

    # --- parts -------------------------------------------------------------------------

    def _touch(self, ref: SessionRef) -> _Held:
        held = self._held.get(ref)
        if held is None:
            tenant = self._tenants.get(ref.tenant)
            if tenant is None:  # beyond the bound, tenants share the last place
                tenant = min(len(self._tenants), MAX_TENANTS - 1)
                if len(self._tenants) < MAX_TENANTS:
                    self._tenants[ref.tenant] = tenant
            held = self._held[ref] = _Held(tenant)
            self._bound.opened(ref)
        else:
            self._bound.used(ref)
        return held

    def _new_frontier(self, held: _Held, num_groups: int) -> Frontier:
        strong, weak = (Reservation(ORDINARY, held.tenant) for _ in range(2))
        return Frontier(self._table, num_groups, strong, weak)

    def _said(self, held: _Held, retention: Retention) -> tuple[Target, Target]:
        """Where the protected blocks and the rest belong; notes the deadline."""
        held.retention = retention
        if is_protected(retention):
            held.deadline_s = self._clock() + retention.ttl_s
            return target_of(retention.zone, tick_of(held.deadline_s)), ASSOCIATED
        held.deadline_s = 0.0
        target = ASSOCIATED if retention.zone is Zone.ASSOCIATED else ORDINARY
        return target, target

    def _strong_stops(self, retention: Retention) -> list[int] | None:
        """By group: places before it are protected; None: all."""
        offset = retention.block_offset
        return None if offset is None else [offset * scale for scale in self._scales]

    def _end_frontier(self, tenant: TenantId, frontier: Frontier, leave: Target) -> None:
        self._bound.count(tenant, -frontier.num_places)
        frontier.end(leave)

    def _enforce_bound(self, current: SessionRef) -> None:
        """What ``current`` left last is always kept."""
        while self._bound.exceeded and (gone := self._bound.first_out(current)) is not None:
            self.forget(gone)
        frontiers = self._held[current].frontiers
        while self._bound.exceeded and len(frontiers) > 1:
            self._end_frontier(current.tenant, frontiers.pop(0), ORDINARY)

    def check_integrity(self) -> None:
        """Raise :class:`IntegrityError` if a bound is broken or claims are miscounted."""
        frontiers = [f for held in self._held.values() for f in held.frontiers]
        audit_table(self._table, (one for f in frontiers for one in (f.strong, f.weak)))
        self._bound.check_integrity(
            {ref: sum(f.num_places for f in held.frontiers) for ref, held in self._held.items()}
        )


def _supersedes(arrived_s: float, ended: bool, frontier: Frontier) -> bool:
    """Whether a request that ended takes the place of what was left before it arrived; one
    that is interrupted again, of what it left the last time."""
    if ended:
        return frontier.finished_s <= arrived_s
    return frontier.interrupted and frontier.finished_s == arrived_s
