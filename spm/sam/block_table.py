"""What sessions claim of each block of vLLM's pool: constant memory a block, one guarded door.

A fact about a block belongs to the hash the block held when it was recorded (its *owner*
hash). When the block is handed out again its *generation* moves on, and whatever was
recorded before no longer counts. ``ref_cnt`` and hashes are read, never changed. Belongs to
the scheduler thread.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from spm.errors import IntegrityError
from spm.metrics import Counters, Metric
from spm.sam.free_queue import ZonedFreeBlockQueue
from spm.sam.shared_claims import SharedClaims
from spm.sam.zones import (
    DEMOTED,
    DEMOTED_WHEN_FREED,
    FINISHED,
    FINISHED_WHEN_FREED,
    FIRST_PROTECTED,
    NO_CLAIM,
    ORDINARY,
    TENANT_SHIFT,
    ZONE_SHIFT,
    Claim,
    Target,
    Zone,
    claim_target,
    claim_tenant,
    has_expired,
    target_of,
    target_tick,
    target_zone,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_RELIEF_BLOCKS = 4096
"""Expired blocks looked at in one go, so that a mass expiry cannot stall the scheduler."""
_GENERATIONS = 1 << 32
_TENANT_BITS = np.uint64(TENANT_SHIFT)
_ASSOCIATED = target_of(Zone.ASSOCIATED)
_FIRST_SOON = target_of(Zone.SOON)
_WHEN_FREED = {FINISHED: FINISHED_WHEN_FREED, DEMOTED: DEMOTED_WHEN_FREED}
_NOW_FREE = {FINISHED_WHEN_FREED: FINISHED, DEMOTED_WHEN_FREED: DEMOTED}


@dataclass(frozen=True, slots=True)
class Caps:
    """Most blocks that may be protected at a time."""

    blocks: int
    tenant_blocks: int


class BlockStates(NamedTuple):
    """What is known of some blocks, a column each; copies."""

    targets: npt.NDArray[np.uint64]
    generations: npt.NDArray[np.uint32]
    refs: npt.NDArray[np.uint32]
    charged: npt.NDArray[np.uint16]
    owned: npt.NDArray[np.bool_]


class BlockTable:
    """Claims by block, and the queue that is kept in their order."""

    def __init__(
        self,
        blocks: "Sequence[KVCacheBlock]",
        free_blocks: "list[KVCacheBlock]",
        caps: Caps,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        """``free_blocks``: vLLM's free queue, in order; ``clock``: monotonic seconds."""
        num_blocks = len(blocks)
        self._blocks = blocks
        self._caps = caps
        self._counters = counters
        self._clock = clock
        self._now_tick = math.floor(clock())
        self._expiry_backlog = False
        self.num_marked = 0
        self.marked = bytearray(num_blocks)
        self._owned = bytearray(num_blocks)
        """Whether there is an owner hash."""
        self.targets = array("Q", [ORDINARY]) * num_blocks
        self.owners: list[bytes | None] = [None] * num_blocks
        self.generations = array("I", [0]) * num_blocks
        self._best = array("Q", [NO_CLAIM]) * num_blocks
        self._refs = array("I", [0]) * num_blocks
        self._charged = array("H", [0]) * num_blocks
        # The same memory, for many blocks at a time.
        self._np_targets = np.frombuffer(self.targets, np.uint64)
        self._np_generations = np.frombuffer(self.generations, np.uint32)
        self._np_best = np.frombuffer(self._best, np.uint64)
        self._np_refs = np.frombuffer(self._refs, np.uint32)
        self._np_charged = np.frombuffer(self._charged, np.uint16)
        self._np_marked = np.frombuffer(self.marked, np.uint8)
        self._np_owned = np.frombuffer(self._owned, np.uint8)
        self._shared: dict[int, SharedClaims] = {}
        self._zone_blocks = [0] * len(Zone)
        self._tenant_blocks: dict[int, int] = {}
        self.queue = ZonedFreeBlockQueue(free_blocks, self)

    # --- the door ----------------------------------------------------------------------

    def claim(self, block: "KVCacheBlock", expected: bytes, claim: Claim) -> int | None:
        """Record that one more session makes ``claim``; returns the generation to name it by.

        None, and nothing changes, for a null block or one that does not hold ``expected``.
        """
        if block.is_null or block.block_hash != expected:
            return None
        block_id = block.block_id
        if self.owners[block_id] != expected:
            self._forget(block)
            self.owners[block_id] = expected
            self._owned[block_id] = True
        refs = self._refs[block_id]
        self._refs[block_id] = refs + 1
        if refs:
            if refs == 1:
                self._shared[block_id] = SharedClaims(Claim(self._best[block_id]))
            self._shared[block_id].add(claim)
            self._retarget(block)
        else:
            self._best[block_id] = claim
            self._settle(block, claim)
        return self.generations[block_id]

    def look(self, ids: npt.NDArray[np.uint32]) -> "BlockStates":
        """What is known of many blocks."""
        return BlockStates(
            self._np_targets[ids],
            self._np_generations[ids],
            self._np_refs[ids],
            self._np_charged[ids],
            self._np_owned[ids].astype(np.bool_),
        )

    def renew(
        self,
        ids: npt.NDArray[np.uint32],
        claims: npt.NDArray[np.uint64],
        old_targets: npt.NDArray[np.uint64],
    ) -> None:
        """Of blocks in use that one session alone claims, and whose tenant pays for their
        protection: other claims that protect."""
        targets = claims >> _TENANT_BITS
        self._np_best[ids] = claims
        self._np_targets[ids] = targets
        soon = int(np.count_nonzero(targets >= _FIRST_SOON))
        moved = soon - int(np.count_nonzero(old_targets >= _FIRST_SOON))
        self._zone_blocks[Zone.SOON] += moved
        self._zone_blocks[Zone.LATER] -= moved

    def renew_shared(self, block: "KVCacheBlock", old: Claim, new: Claim, tenant: int) -> bool:
        """The same for a block in use that several sessions claim; False if ``old`` was not
        among their claims."""
        block_id = block.block_id
        if not self._shared[block_id].replace(old, new):
            return False
        if new < self._best[block_id]:
            self._retarget(block)
            return True
        self._best[block_id] = new
        target, before = claim_target(new), self.targets[block_id]
        if before >> ZONE_SHIFT != target >> ZONE_SHIFT:
            self._zone_blocks[before >> ZONE_SHIFT] -= 1
            self._zone_blocks[target >> ZONE_SHIFT] += 1
        self.targets[block_id] = target
        return True

    def adopt(
        self,
        ids: npt.NDArray[np.uint32],
        claims: npt.NDArray[np.uint64],
        tenant: int,
        names: Sequence[bytes | None],
    ) -> None:
        """The first claims on blocks in use that nothing is known of; ``names``: their hashes.
        The caller stays within :meth:`budget`."""
        targets = claims >> _TENANT_BITS
        protected = targets >= FIRST_PROTECTED
        num_marked = int(np.count_nonzero(targets != ORDINARY))
        self._np_owned[ids] = 1
        self._np_refs[ids] = 1
        self._np_best[ids] = claims
        self._np_targets[ids] = targets
        if num_marked:
            self._np_marked[ids] = targets != ORDINARY
            self._np_charged[ids[protected]] = tenant
            self.num_marked += num_marked
            self._count_zones(targets)
            self._charge(tenant, int(np.count_nonzero(protected)))
        for block_id, name in zip(ids.tolist(), names, strict=True):
            self.owners[block_id] = name

    def _count_zones(self, targets: npt.NDArray[np.uint64]) -> None:
        """More marked blocks, many at a time."""
        for zone in (Zone.ASSOCIATED, Zone.LATER, Zone.SOON):
            low, high = target_of(zone), target_of(zone) + (1 << ZONE_SHIFT)
            inside = (targets >= low) & (targets < high)
            self._zone_blocks[zone] += int(np.count_nonzero(inside))

    def generations_of(self, ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """The present generation of each block."""
        return self._np_generations[ids]

    def holds(self, block_id: int, generation: int) -> bool:
        """Whether what was claimed at ``generation`` is still in the block."""
        owner = self.owners[block_id]
        return (
            generation == self.generations[block_id]
            and owner is not None
            and self._blocks[block_id].block_hash == owner
        )

    def change(self, block_id: int, generation: int, old: Claim, new: Claim) -> bool:
        """One session's claim ``old`` becomes ``new``; False if it no longer counts."""
        refs = self._refs[block_id]
        if generation != self.generations[block_id] or not refs:
            return False
        block = self._blocks[block_id]
        if refs == 1:
            self._best[block_id] = new
            self._retarget(block)
        elif not self._shared[block_id].replace(old, new):
            return False
        elif new >= self._best[block_id]:
            self._best[block_id] = new
            self._settle(block, new)
        else:
            self._retarget(block)
        return True

    def release(
        self, block_id: int, generation: int, claim: Claim, leave: Target, own_refs: int = 0
    ) -> bool:
        """One session takes its claim back; False if it no longer counted.

        When it was the last and no other request uses the block (``own_refs`` references
        are the session's own), the block goes where ``leave`` says.
        """
        refs = self._refs[block_id]
        if generation != self.generations[block_id] or not refs:
            return False
        if refs > 1:
            shared = self._shared[block_id]
            if not shared.discard(claim):
                return False
            if refs == 2:
                self._best[block_id] = shared.only()
                del self._shared[block_id]
        self._refs[block_id] = refs - 1
        block = self._blocks[block_id]
        if refs > 1:
            self._retarget(block)
        else:
            self._best[block_id] = NO_CLAIM
            self._set_target(block, self._resting_place(block, leave, own_refs))
        return True

    def _resting_place(self, block: "KVCacheBlock", leave: Target, own_refs: int) -> Target:
        """Of a block nobody claims any more."""
        if leave == ORDINARY or block.ref_cnt > own_refs:
            return ORDINARY
        hash_now = block.block_hash
        if hash_now is None or hash_now != self.owners[block.block_id]:
            return ORDINARY  # an ordinary block is reused without notice: it is another's now
        return leave if block.ref_cnt == 0 else _WHEN_FREED[leave]

    # --- bounds and numbers ------------------------------------------------------------

    def budget(self, tenant: int) -> int:
        """Blocks that may still become protected for a tenant."""
        left = self._caps.blocks - self.num_protected
        return max(0, min(left, self._caps.tenant_blocks - self._tenant_blocks.get(tenant, 0)))

    def is_charged(self, block_id: int, tenant: int) -> bool:
        """Whether it counts against the caps already, and on this tenant's account."""
        return self.targets[block_id] >= FIRST_PROTECTED and self._charged[block_id] == tenant

    def is_unclaimed(self, block_id: int) -> bool:
        """Whether no session claims it."""
        return not self._refs[block_id]

    @property
    def num_protected(self) -> int:
        """Blocks that hints protect now."""
        return self._zone_blocks[Zone.LATER] + self._zone_blocks[Zone.SOON]

    @property
    def zone_sizes(self) -> tuple[int, ...]:
        """Blocks by the zone where they are or, in use, will be; the null block is ordinary."""
        sizes = list(self._zone_blocks)
        sizes[Zone.ORDINARY] = len(self._blocks) - self.num_marked
        return tuple(sizes)

    # --- time --------------------------------------------------------------------------

    def tick(self, now_tick: int) -> None:
        """Once a step: what has expired becomes ordinary, a bounded number at a time."""
        if now_tick > self._now_tick or self._expiry_backlog:
            self._now_tick = now_tick
            self._expire()

    def relieve(self) -> bool:
        """A late or skipped tick must not keep an expired block from being taken."""
        self._now_tick = math.floor(self._clock())
        if not self.queue.any_expired(self._now_tick):
            return False
        moved = self._expire()
        while not moved and self._expiry_backlog:  # all went to weaker claims on them
            moved = self._expire()
        return moved > 0

    def _expire(self) -> int:
        blocks = self.queue.expired(self._now_tick, _RELIEF_BLOCKS)
        moved = 0
        for block in blocks:
            self._retarget(block)
            moved += self.targets[block.block_id] == ORDINARY
        self._expiry_backlog = len(blocks) == _RELIEF_BLOCKS
        self._counters.add(Metric.SAM_EXPIRED_BLOCKS, len(blocks))
        return moved

    # --- what the queue tells ----------------------------------------------------------

    def freed(self, block: "KVCacheBlock") -> Target:
        """See :class:`spm.sam.free_queue.Marks`."""
        target = Target(self.targets[block.block_id])
        if block.block_hash != self.owners[block.block_id]:
            self._forget(block)
        else:  # placed once: who used it since has shown that it is of use
            self._set_target(block, _NOW_FREE.get(target, ORDINARY))
        return Target(self.targets[block.block_id])

    def reused(self, blocks: "Sequence[KVCacheBlock]") -> None:
        """See :class:`spm.sam.free_queue.Marks`."""
        broken, zones = 0, self._zone_blocks
        for block in blocks:  # _forget, for blocks that are in no list: most of what is taken
            block_id = block.block_id
            target = self.targets[block_id]
            zones[target >> ZONE_SHIFT] -= 1
            if target >= FIRST_PROTECTED:
                broken += 1
                self._charge(self._charged[block_id], -1)
            self.targets[block_id] = ORDINARY
            self.marked[block_id] = False
            self._drop_records(block_id)
        self.num_marked -= len(blocks)
        self._counters.add(Metric.SAM_OVERRIDDEN_BLOCKS, broken)

    def emptied(self, blocks: "Sequence[KVCacheBlock]") -> None:
        """See :class:`spm.sam.free_queue.Marks`."""
        for block in blocks:
            if self.targets[block.block_id] != ORDINARY:
                self._forget(block)

    def reset(self) -> None:
        """vLLM reset its prefix cache: no block holds anything."""
        for block in self._blocks:
            if self.owners[block.block_id] is not None:
                self._forget(block)

    # --- bookkeeping -------------------------------------------------------------------

    def _forget(self, block: "KVCacheBlock") -> None:
        """Nothing recorded of the block counts any more."""
        self._drop_records(block.block_id)
        self._set_target(block, ORDINARY)

    def _drop_records(self, block_id: int) -> None:
        if self._owned[block_id]:
            self.owners[block_id] = None
            self._owned[block_id] = False
            self.generations[block_id] = (self.generations[block_id] + 1) % _GENERATIONS
        if self._refs[block_id] > 1:
            del self._shared[block_id]
        self._refs[block_id] = 0
        self._best[block_id] = NO_CLAIM

    def _retarget(self, block: "KVCacheBlock") -> None:
        """Put a claimed block where its best claim says."""
        block_id = block.block_id
        if self._refs[block_id] > 1:
            best = self._shared[block_id].best(self._now_tick)
            self._best[block_id] = NO_CLAIM if best is None else best
        elif has_expired(Claim(self._best[block_id]), self._now_tick):
            best = None
        else:
            best = Claim(self._best[block_id])
        if best is None:
            self._set_target(block, ORDINARY)
        else:
            self._settle(block, best)

    def _settle(self, block: "KVCacheBlock", best: Claim) -> None:
        """Put a block where a claim that has not expired says, unless a cap forbids it."""
        block_id, target = block.block_id, claim_target(best)
        if target < FIRST_PROTECTED:
            self._set_target(block, target)
            return
        tenant, old = claim_tenant(best), self.targets[block_id]
        if old >= FIRST_PROTECTED and self._charged[block_id] == tenant:
            if old >> ZONE_SHIFT == target >> ZONE_SHIFT and block.prev_free_block is None:
                self.targets[block_id] = target  # in use, the same class: most of all renewals
            else:
                self._set_target(block, target, tenant)
        elif self._exceeds_cap(block_id, tenant):
            self._set_target(block, _ASSOCIATED)
        else:
            self._set_target(block, target, tenant)

    def _exceeds_cap(self, block_id: int, tenant: int) -> bool:
        """Whether protecting the block would break a cap: what another tenant paid for so
        far may fall to this one."""
        protected = self.targets[block_id] >= FIRST_PROTECTED
        if protected and self._charged[block_id] == tenant:
            return False
        if self._tenant_blocks.get(tenant, 0) >= self._caps.tenant_blocks:
            return True
        return not protected and self.num_protected >= self._caps.blocks

    def _set_target(self, block: "KVCacheBlock", target: Target, tenant: int = 0) -> None:
        block_id = block.block_id
        old = self.targets[block_id]
        was_protected, is_protected = old >= FIRST_PROTECTED, target >= FIRST_PROTECTED
        if was_protected and not (is_protected and self._charged[block_id] == tenant):
            self._charge(self._charged[block_id], -1)
            was_protected = False
        if is_protected and not was_protected:
            self._charged[block_id] = tenant
            self._charge(tenant, 1)
        if old == target:
            return
        if old != ORDINARY:
            self.num_marked -= 1
            self._zone_blocks[old >> ZONE_SHIFT] -= 1
        if target != ORDINARY:
            self.num_marked += 1
            self._zone_blocks[target >> ZONE_SHIFT] += 1
        self.targets[block_id] = target
        self.marked[block_id] = target != ORDINARY
        if block.prev_free_block is not None:
            self.queue.move(block, target)

    def _charge(self, tenant: int, blocks: int) -> None:
        if not blocks:
            return
        total = self._tenant_blocks.get(tenant, 0) + blocks
        if total:
            self._tenant_blocks[tenant] = total
        else:
            del self._tenant_blocks[tenant]

    def check_claims(self, made: Iterable[tuple[int, int, Claim]]) -> None:
        """Raise :class:`IntegrityError` unless the claims sessions remember, as block id,
        generation and claim, are those counted here."""
        by_block: dict[int, list[Claim]] = {}
        for block_id, generation, claim in made:
            if generation == self.generations[block_id]:
                by_block.setdefault(block_id, []).append(claim)
        for block_id, refs in enumerate(self._refs):
            claims = by_block.get(block_id, [])
            if len(claims) != refs:
                raise IntegrityError(f"block {block_id}: {refs} claims, {len(claims)} remembered")
            if refs == 1 and claims[0] != self._best[block_id]:
                raise IntegrityError(f"block {block_id}: its only claim is another")
            self._check_place(block_id, claims)

    def _check_place(self, block_id: int, claims: list[Claim]) -> None:
        """A block is where its best live claim puts it, or waits for its expiry to be noticed:
        until the next tick, in use until it is freed."""
        target = Target(self.targets[block_id])
        made = [claim_target(claim) for claim in claims]
        if target in made and target >= FIRST_PROTECTED and target_tick(target) <= self._now_tick:
            return
        live = [claim for claim in claims if not has_expired(claim, self._now_tick)]
        if not live and target > ORDINARY:
            raise IntegrityError(f"block {block_id} is kept without a claim")
        wanted = claim_target(max(live)) if live else target
        capped = wanted >= FIRST_PROTECTED and target == _ASSOCIATED
        if target != wanted and not capped:
            raise IntegrityError(f"block {block_id} is not where its best claim puts it")

    def check_integrity(self) -> None:
        """Raise :class:`IntegrityError` if counts, claims and queue disagree. O(pool)."""
        self.queue.check_integrity()
        zones = [0] * len(Zone)
        for block_id, target in enumerate(self.targets):
            if self.marked[block_id] != (target != ORDINARY):
                raise IntegrityError(f"block {block_id} is marked, or not, by mistake")
            if target != ORDINARY:
                zones[target_zone(Target(target))] += 1
            refs = self._refs[block_id]
            if (refs > 1) != (block_id in self._shared):
                raise IntegrityError(f"block {block_id}: {refs} claims, shared or not")
            if refs > 1:
                self._shared[block_id].check_integrity(refs)
            if self._blocks[block_id].is_null and (refs or target != ORDINARY):
                raise IntegrityError("the null block is claimed")
        if zones != self._zone_blocks or sum(zones) != self.num_marked:
            raise IntegrityError(f"blocks by zone {self._zone_blocks}, counted {zones}")
        if sum(self._tenant_blocks.values()) != self.num_protected:
            raise IntegrityError("protected blocks are not charged to tenants one by one")
        if min(self._tenant_blocks.values(), default=1) < 1:
            raise IntegrityError("a tenant is charged for less than nothing")
        if self.num_protected > self._caps.blocks:
            raise IntegrityError(f"{self.num_protected} protected blocks, {self._caps}")
        if max(self._tenant_blocks.values(), default=0) > self._caps.tenant_blocks:
            raise IntegrityError(f"a tenant protects more than {self._caps}")
