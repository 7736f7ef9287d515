"""What each session claims in the block pool: frontiers, their claims, and their end.

Belongs to the scheduler thread. Bounded by ``max_records``: over it the session idle
longest loses its claims, which is a loss of retention and nothing else.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from spm.agent_hint import BlockRange
from spm.errors import IntegrityError
from spm.sam.block_table import BlockTable
from spm.sam.bulk import ChainClaim
from spm.sam.frontier import NO_BLOCK, Frontier, GroupBlocks
from spm.sam.policy import UNHINTED, Retention, is_protected
from spm.sam.zones import (
    DEMOTED,
    MAX_TENANTS,
    ORDINARY,
    Claim,
    Target,
    Zone,
    make_claim,
    tick_of,
)
from tracker.ids import SessionRef, TenantId

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

MAX_FRONTIERS = 8
"""Branches of one session that can be resumed; beyond it the oldest is given up."""
_ORDINARY_CLAIM = make_claim(Zone.ORDINARY)
_ASSOCIATED_CLAIM = make_claim(Zone.ASSOCIATED)


@dataclass(slots=True)
class Association:
    """What became of one hint."""

    blocks: int = 0
    """Places claimed."""
    protected: int = 0
    clipped: int = 0
    """Places that a cap kept from being protected."""
    late: int = 0
    """Groups whose blocks were free already when the hint acted."""


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
    ) -> None:
        """``scales``: by KV cache group, its blocks in one logical block."""
        self._table = table
        self._scales = tuple(scales)
        self._max_records = max_records
        self._clock = clock
        self._held: OrderedDict[SessionRef, _Held] = OrderedDict()  # idle longest first
        self._tenants: dict[TenantId, int] = {}
        self.num_records = 0

    # --- boundaries --------------------------------------------------------------------

    def associate(
        self,
        ref: SessionRef,
        arrived_s: float,
        groups: "Sequence[Sequence[KVCacheBlock]]",
        retention: Retention,
        *,
        ended: bool = True,
    ) -> Association:
        """A request of the session ends; its blocks, by group and logical index, are still
        its own. Supersedes what requests left that had ended when this one arrived.

        ``ended`` False: it was interrupted, and its end will supersede this.
        """
        held = self._touch(ref)
        strong, weak = self._claims_for(held, retention)
        old = [f for f in held.frontiers if _supersedes(arrived_s, ended, f)]
        done = Association()
        budget = [self._table.budget(held.tenant)]
        parts = []
        for index, blocks in enumerate(groups):
            before = old[-1].groups[index] if old else GroupBlocks()
            done.late += bool(blocks) and _is_free(blocks)
            strong_stop = self._strong_stop(retention, index, len(blocks))
            parts.append(self._claim_group(blocks, before, strong_stop, strong, weak, budget, done))
        held.frontiers = [f for f in held.frontiers if f not in old]
        finished_s = self._clock() if ended else arrived_s
        held.frontiers.append(Frontier(finished_s, tuple(parts), interrupted=not ended))
        self.num_records += sum(map(len, parts))
        surplus = held.frontiers[: max(0, len(held.frontiers) - MAX_FRONTIERS)]
        for frontier in [*old, *surplus]:
            self._release_frontier(frontier, DEMOTED)
        del held.frontiers[: len(surplus)]
        self._enforce_bound(ref)
        return done

    def _claim_group(
        self,
        blocks: "Sequence[KVCacheBlock]",
        before: GroupBlocks,
        strong_stop: int,
        strong: Claim,
        weak: Claim,
        budget: list[int],
        done: Association,
    ) -> GroupBlocks:
        """Claim one group's blocks, taking over the claims of ``before`` where they are the
        same: most of them at once, what is left one by one, the tail first, because those
        that are free are to be taken in that order. ``budget``: blocks that may still become
        protected, all groups together."""
        chain = ChainClaim(self._table, blocks, before, strong_stop, strong, weak, budget[0])
        budget[0] -= chain.newly_protected
        done.clipped += chain.clipped
        for index in reversed(chain.settle()):
            claim = chain.claim_at(index)
            chain.held[index] = self._claim_place(blocks[index], before, index, claim)
        done.blocks += int(np.count_nonzero(chain.held))
        done.protected += int(np.count_nonzero(chain.claims[chain.held] > _ASSOCIATED_CLAIM))
        return chain.result()

    def _claim_place(
        self, block: "KVCacheBlock", before: GroupBlocks, index: int, claim: Claim
    ) -> bool:
        """Claim one block, in place of what the session claimed of it before, if it did."""
        expected, block_id, table = block.block_hash, block.block_id, self._table
        if expected is None:
            return False
        if (
            index < len(before)
            and before.ids[index] == block_id
            and table.owners[block_id] == expected
            and table.change(
                block_id, before.generations[index], Claim(before.claims[index]), claim
            )
        ):
            before.drop(index)
            return True
        return table.claim(block, expected, claim) is not None

    def retain(self, ref: SessionRef, retention: Retention) -> Association:
        """A hint without a request: what the session holds already changes its class."""
        held = self._held.get(ref)
        done = Association()
        if held is None:
            return done
        strong, weak = self._claims_for(held, retention)
        for frontier in held.frontiers:
            for index, group in enumerate(frontier.groups):
                stop = self._strong_stop(retention, index, len(group))
                self._reclaim_group(group, stop, strong, weak, held.tenant, done)
        return done

    def _reclaim_group(
        self,
        group: GroupBlocks,
        strong_stop: int,
        strong: Claim,
        weak: Claim,
        tenant: int,
        done: Association,
    ) -> None:
        """Tail first, because that is the order in which free blocks are to be taken."""
        table = self._table
        places = [i for i in range(len(group)) if table.holds(group.ids[i], group.generations[i])]
        new = [i for i in places if i < strong_stop and not table.is_charged(group.ids[i], tenant)]
        allowed = len(new) if strong <= _ASSOCIATED_CLAIM else table.budget(tenant)
        clipped = set(new[allowed:])
        for index in reversed(places):
            claim = strong if index < strong_stop and index not in clipped else weak
            block_id, old = group.ids[index], Claim(group.claims[index])
            if table.change(block_id, group.generations[index], old, claim):
                group.claims[index] = claim
                done.blocks += 1
                done.protected += claim > _ASSOCIATED_CLAIM
        done.clipped += len(clipped)

    def release(
        self,
        ref: SessionRef,
        leave: Target,
        *,
        blocks: BlockRange | None = None,
        own_refs: int = 0,
    ) -> tuple[int, int]:
        """Give back a session's blocks, or a logical range of them: how many it held there,
        and how many of these no session claims now. Those nobody uses go to ``leave``;
        ``own_refs`` are those of the request of the session whose end made the newest."""
        held = self._held.get(ref)
        known = free = 0
        for frontier in held.frontiers if held else ():
            own = own_refs if held and frontier is held.frontiers[-1] else 0
            for group, index in frontier.held():
                scale = self._scales[frontier.groups.index(group)]
                if blocks is None or blocks.start <= index // scale < blocks.stop:
                    known += 1
                    free += self._release_place(group, index, leave, own)
        if held is not None and blocks is None:
            self.num_records -= sum(len(g) for f in held.frontiers for g in f.groups)
            held.frontiers.clear()
        return known, free

    def forget(self, ref: SessionRef, leave: Target = ORDINARY) -> None:
        """The session is over."""
        held = self._held.pop(ref, None)
        for frontier in held.frontiers if held else ():
            self._release_frontier(frontier, leave)

    def clear(self) -> None:
        """The prefix cache was reset: nobody holds anything."""
        for held in self._held.values():
            held.frontiers.clear()
        self.num_records = 0

    # --- questions ---------------------------------------------------------------------

    def num_blocks(self, ref: SessionRef) -> int:
        """Blocks of the session's newest frontier, all groups."""
        held = self._held.get(ref)
        groups = held.frontiers[-1].groups if held and held.frontiers else ()
        return sum(len(group) - group.ids.count(NO_BLOCK) for group in groups)

    def num_resident(self, ref: SessionRef) -> int:
        """How many of these still have their block in the GPU pool. O(blocks)."""
        held = self._held.get(ref)
        groups = held.frontiers[-1].groups if held and held.frontiers else ()
        return sum(
            self._table.holds(block_id, generation)
            for group in groups
            for block_id, generation in zip(group.ids, group.generations, strict=True)
        )

    def standing(self, ref: SessionRef) -> Retention:
        """What the session said last, if that still holds: a request that says nothing
        renews it."""
        held = self._held.get(ref)
        if held is None or held.retention.zone is Zone.FINISHED:
            return UNHINTED
        expired = is_protected(held.retention) and held.deadline_s <= self._clock()
        return UNHINTED if expired else held.retention

    def note(self, ref: SessionRef, retention: Retention) -> None:
        """Remember what was said of a session that holds nothing any more."""
        held = self._held.get(ref)
        if held is not None:
            self._claims_for(held, retention)

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
            -(-len(group) // scale)
            for frontier in (held.frontiers if held else ())
            for group, scale in zip(frontier.groups, self._scales, strict=True)
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
        self._held.move_to_end(ref)
        return held

    def _claims_for(self, held: _Held, retention: Retention) -> tuple[Claim, Claim]:
        """The claims on what is protected and on the rest; notes the deadline."""
        held.retention = retention
        held.deadline_s = self._clock() + retention.ttl_s if is_protected(retention) else 0.0
        if is_protected(retention):
            tick = tick_of(held.deadline_s)
            return make_claim(retention.zone, tick, held.tenant), _ASSOCIATED_CLAIM
        weak = _ASSOCIATED_CLAIM if retention.zone is Zone.ASSOCIATED else _ORDINARY_CLAIM
        return weak, weak

    def _strong_stop(self, retention: Retention, group: int, length: int) -> int:
        if retention.block_offset is None:
            return length
        return min(length, retention.block_offset * self._scales[group])

    def _release_place(self, group: GroupBlocks, index: int, leave: Target, own_refs: int) -> bool:
        block_id = group.ids[index]
        claim = Claim(group.claims[index])
        released = self._table.release(block_id, group.generations[index], claim, leave, own_refs)
        group.drop(index)
        return released and self._table.is_unclaimed(block_id)

    def _release_frontier(self, frontier: Frontier, leave: Target) -> None:
        for group, index in frontier.held():
            self._release_place(group, index, leave, 0)
        self.num_records -= sum(map(len, frontier.groups))

    def _enforce_bound(self, current: SessionRef) -> None:
        """What ``current`` left last is always kept."""
        while self.num_records > self._max_records and len(self._held) > 1:
            self.forget(next(iter(self._held)))  # the current one is the last of all
        frontiers = self._held[current].frontiers
        while self.num_records > self._max_records and len(frontiers) > 1:
            self._release_frontier(frontiers.pop(0), ORDINARY)

    def check_integrity(self) -> None:
        """Raise :class:`IntegrityError` if a bound is broken or claims are miscounted."""
        self._table.check_integrity()
        records = sum(len(g) for h in self._held.values() for f in h.frontiers for g in f.groups)
        if records != self.num_records:
            raise IntegrityError(f"{self.num_records} records, counted {records}")
        self._table.check_claims(
            (group.ids[index], group.generations[index], Claim(group.claims[index]))
            for held in self._held.values()
            for frontier in held.frontiers
            for group, index in frontier.held()
        )


def _is_free(blocks: "Sequence[KVCacheBlock]") -> bool:
    """Whether vLLM has freed a request's blocks, which it does all at once."""
    last = blocks[-1]
    return last.ref_cnt == 0 and not last.is_null


def _supersedes(arrived_s: float, ended: bool, frontier: Frontier) -> bool:
    """Whether a request that ended takes the place of what was left before it arrived; one
    that is interrupted again, of what it left the last time."""
    if ended:
        return frontier.finished_s <= arrived_s
    return frontier.interrupted and frontier.finished_s == arrived_s
