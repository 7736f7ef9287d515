"""Who holds each block of vLLM's pool, and where it therefore belongs: one guarded door.

What is recorded of a block belongs to the hash the block held at that time (its *owner*
hash). A block outside the ordinary zone is never handed out unnoticed; one in it is, and
what was recorded is dropped when it is found to be about another content. ``ref_cnt`` and
hashes are read, never changed. Belongs to the scheduler thread.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from spm.metrics import Counters, Metric
from spm.sam.endings import Endings
from spm.sam.free_queue import ZonedFreeBlockQueue
from spm.sam.holders import PLACED, Holder, Placement, Reservation, Sharing
from spm.sam.ledger import Caps, Ledger
from spm.sam.zones import (
    ASSOCIATED,
    DEMOTED,
    DEMOTED_WHEN_FREED,
    FINISHED,
    FINISHED_WHEN_FREED,
    FIRST_PROTECTED,
    ORDINARY,
    ZONE_SHIFT,
    Target,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_RELIEF_BLOCKS = 4096
"""Expired blocks moved in one go, so that a mass expiry cannot stall the scheduler."""
_WHEN_FREED = {FINISHED: FINISHED_WHEN_FREED, DEMOTED: DEMOTED_WHEN_FREED}
_NOW_FREE = {FINISHED_WHEN_FREED: FINISHED, DEMOTED_WHEN_FREED: DEMOTED}


class BlockTable:
    """Holders by block, and the queue that is kept in their order."""

    def __init__(
        self,
        blocks: "Sequence[KVCacheBlock]",
        free_blocks: "list[KVCacheBlock]",
        caps: Caps,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        """``free_blocks``: vLLM's free queue, in order; ``clock``: monotonic seconds."""
        self.blocks = blocks
        self._counters = counters
        self._clock = clock
        self.now_tick = math.floor(clock())
        self._expiry_backlog = False
        self.holders: list[Holder | None] = [None] * len(blocks)
        self.owners: list[bytes | None] = [None] * len(blocks)
        self.ledger = Ledger(len(blocks), caps)
        self._endings = Endings()
        self.queue = ZonedFreeBlockQueue(free_blocks, self)

    # --- the door ----------------------------------------------------------------------

    def claim(self, block: "KVCacheBlock", expected: bytes, by: Reservation) -> bool:
        """Let ``by`` hold the block, with whoever holds it already. False, and nothing
        changes, for a null block or one that does not hold ``expected``."""
        if block.is_null or block.block_hash != expected:
            return False
        block_id = block.block_id
        if self.owners[block_id] != expected:
            self._forget(block)
            self.owners[block_id] = expected
        holder = self.holders[block_id]
        if holder is by:
            return True
        if isinstance(holder, Reservation):
            self.ledger.uncount(holder)
            holder.blocks -= 1
            sharing = Sharing((holder,))
            holder.shared[block_id] = sharing
            self.holders[block_id] = sharing
            sharing.add(by)
            by.shared[block_id] = sharing
            self._settle(block, sharing, holder.target, counted=False)
        elif isinstance(holder, Sharing):
            holder.add(by)
            by.shared[block_id] = holder
            self._settle(block, holder, holder.target)
        else:
            self._take(block, holder, by)
        return True

    def _take(self, block: "KVCacheBlock", before: Holder | None, by: Holder | None) -> None:
        """Another holder in place of one, or none, that held the block alone."""
        old = ORDINARY if before is None else before.target
        if before is not None:
            self.ledger.uncount(before)
            if isinstance(before, Reservation):
                before.blocks -= 1
        self.holders[block.block_id] = by
        if by is not None:
            self.ledger.count(by)
            if isinstance(by, Reservation):
                by.blocks += 1
        self._moved(block, old, ORDINARY if by is None else by.target)

    def transfer(self, block_id: int, before: Reservation, by: Reservation) -> None:
        """One session's claim on a block it holds goes to its other reservation."""
        holder, block = self.holders[block_id], self.blocks[block_id]
        if holder is before:
            self._take(block, before, by)
        elif isinstance(holder, Sharing) and holder.discard(before):
            before.shared.pop(block_id, None)
            holder.add(by)
            by.shared[block_id] = holder
            self._settle(block, holder, holder.target)

    def release(self, block_id: int, by: Reservation, leave: Target, own_refs: int = 0) -> bool:
        """``by`` no longer holds the block; False if it did not.

        When nobody holds it then and no other request uses it (``own_refs`` references are
        the session's own), the block goes where ``leave`` says.
        """
        holder, block = self.holders[block_id], self.blocks[block_id]
        if holder is by:
            self._take(block, holder, self._resting_place(block, leave, own_refs))
            return True
        by.shared.pop(block_id, None)
        if not isinstance(holder, Sharing) or not holder.discard(by):
            return False
        if not holder.members:
            self._take(block, holder, self._resting_place(block, leave, own_refs))
            return True
        self._settle(block, holder, holder.target)
        if len(holder.members) == 1:
            (only,) = holder.members.values()
            if only.target == holder.target:  # else a cap keeps it below
                del only.shared[block_id]
                self._take(block, holder, only)
        return True

    def _resting_place(
        self, block: "KVCacheBlock", leave: Target, own_refs: int
    ) -> Placement | None:
        """Of a block nobody holds any more."""
        if leave == ORDINARY or block.ref_cnt > own_refs:
            return None
        hash_now = block.block_hash
        if hash_now is None or hash_now != self.owners[block.block_id]:
            return None  # an ordinary block is reused without notice: it is another's now
        return PLACED[leave if block.ref_cnt == 0 else _WHEN_FREED[leave]]

    def retarget(self, one: Reservation, target: Target) -> None:
        """A reservation says something else of all its blocks. Those it holds alone and that
        are free are not moved: see :meth:`put_right`. O(blocks it shares)."""
        old = one.target
        if old != target:
            self.ledger.count(one, -one.blocks)
            self._endings.remove(one)
            one.target = target
            self.ledger.count(one, one.blocks)
            self._endings.add(one)
            self._speak_again(one)

    def _speak_again(self, one: Reservation) -> None:
        """A reservation says something new of the blocks it shares."""
        holders, target, stale = self.holders, one.target, list[int]()
        for block_id, sharing in one.shared.items():
            if holders[block_id] is not sharing:
                stale.append(block_id)
                continue
            sharing.add(one)
            block = self.blocks[block_id]
            if (
                FIRST_PROTECTED <= sharing.target <= target
                and sharing.tenant == one.tenant
                and sharing.target >> ZONE_SHIFT == target >> ZONE_SHIFT
                and block.prev_free_block is None
            ):
                sharing.target = target  # in use, the same class: most of all renewals
            else:
                self._settle(block, sharing, sharing.target)
        for block_id in stale:
            del one.shared[block_id]
        one.lost += len(stale)

    def take_new(
        self, blocks: "Iterable[KVCacheBlock]", strong: Reservation, weak: Reservation, budget: int
    ) -> "list[KVCacheBlock]":
        """Let ``strong`` hold those of some hashed blocks in use that nothing is known of, as
        many as ``budget`` allows, and ``weak`` the others; returns the blocks left over."""
        holders, owners, left = self.holders, self.owners, list["KVCacheBlock"]()
        taken = 0
        one = strong if budget > 0 else weak
        for block in blocks:
            block_id = block.block_id
            if holders[block_id] is not None or block.prev_free_block is not None:
                left.append(block)
                continue
            if taken == budget:
                one = weak
            holders[block_id] = one
            owners[block_id] = block._block_hash
            taken += 1
        protected = min(taken, max(0, budget))
        for one, count in ((strong, protected), (weak, taken - protected)):
            one.blocks += count
            self.ledger.count(one, count)
        return left

    def put_right(self, block_id: int) -> None:
        """Move a free block to the end of where it belongs."""
        holder, block = self.holders[block_id], self.blocks[block_id]
        if block.prev_free_block is not None:
            self.queue.move(block, ORDINARY if holder is None else holder.target)

    def drop(self, one: Reservation) -> None:
        """Nobody will ask for this reservation again; it holds nothing."""
        self._endings.remove(one)

    # --- questions ---------------------------------------------------------------------

    def has_claim(self, block_id: int, by: Reservation) -> bool:
        """Whether ``by`` is a holder of the block."""
        holder = self.holders[block_id]
        return holder is by or (isinstance(holder, Sharing) and by.number in holder.members)

    def has_session(self, block_id: int) -> bool:
        """Whether some session holds the block for what is in it."""
        held = isinstance(self.holders[block_id], (Reservation, Sharing))
        return held and self.is_intact(block_id)

    def is_intact(self, block_id: int) -> bool:
        """Whether the content that the block is held for is still in it."""
        owner = self.owners[block_id]
        return owner is not None and self.blocks[block_id].block_hash == owner

    def has_lost(self, one: Reservation) -> bool:
        """Whether a block of it was handed out, or may have been, since it last looked."""
        holders = self.holders
        return (
            one.lost > 0
            or one.target <= ORDINARY
            or any(holders[block_id] is not s for block_id, s in one.shared.items())
        )

    def accept_losses(self, one: Reservation) -> None:
        """Its session has looked at what is left."""
        one.lost = 0
        holders = self.holders
        for block_id in [b for b, sharing in one.shared.items() if holders[b] is not sharing]:
            del one.shared[block_id]

    def is_charged(self, block_id: int, tenant: int) -> bool:
        """Whether the block counts against the caps already, and on this tenant's account."""
        holder = self.holders[block_id]
        return holder is not None and holder.target >= FIRST_PROTECTED and holder.tenant == tenant

    # --- time --------------------------------------------------------------------------

    def tick(self, now_tick: int) -> None:
        """Once a step: what has expired becomes ordinary, a bounded number of blocks at a
        time."""
        if now_tick > self.now_tick or self._expiry_backlog:
            self._end_reservations(now_tick)
            self._move_expired()

    def relieve(self) -> bool:
        """A late or skipped tick must not keep an expired block from being taken."""
        now_tick = math.floor(self._clock())
        if not self.queue.any_expired(now_tick):
            return False
        self._end_reservations(now_tick)  # this alone moves blocks that are shared
        while not self.queue.has_ordinary and self.queue.any_expired(self.now_tick):
            self._move_expired()
        self._expiry_backlog = self.queue.any_expired(self.now_tick)  # for the next tick
        return self.queue.has_ordinary

    def _end_reservations(self, now_tick: int) -> None:
        """Protection whose time has come ends for all its blocks at once."""
        self.now_tick = max(self.now_tick, now_tick)
        for one in self._endings.due(self.now_tick):
            self._counters.add(Metric.SAM_EXPIRED_BLOCKS, one.blocks)
            self.retarget(one, ORDINARY)

    def _move_expired(self) -> None:
        blocks = self.queue.expired(self.now_tick, _RELIEF_BLOCKS)
        for block in blocks:
            self.put_right(block.block_id)
        self._expiry_backlog = len(blocks) == _RELIEF_BLOCKS

    # --- what the queue tells ----------------------------------------------------------

    def freed(self, block: "KVCacheBlock") -> Target:
        """See :class:`spm.sam.free_queue.Marks`."""
        holder = self.holders[block.block_id]
        if block.block_hash != self.owners[block.block_id]:
            self._forget(block)
        elif isinstance(holder, Placement):
            # Placed once: who used it since has shown that it is of use.
            now_free = _NOW_FREE.get(holder.target)
            self._take(block, holder, PLACED[now_free] if now_free is not None else None)
        holder = self.holders[block.block_id]
        return ORDINARY if holder is None else holder.target

    def reused(self, blocks: "Sequence[KVCacheBlock]") -> None:
        """See :class:`spm.sam.free_queue.Marks`."""
        broken, holders, owners = 0, self.holders, self.owners
        for block in blocks:
            holder = holders[block.block_id]
            broken += holder is not None and holder.target >= FIRST_PROTECTED
        alone: Reservation | None = None
        run = 0
        for block in blocks:
            block_id = block.block_id
            holder = holders[block_id]
            if type(holder) is not Reservation:
                self._forget(block)
                continue
            # _forget, for most of what is taken: block after block of one session.
            holders[block_id] = owners[block_id] = None
            if holder is not alone:
                self._lose(alone, run)
                alone, run = holder, 0
            run += 1
        self._lose(alone, run)
        if broken:
            self._counters.add(Metric.SAM_OVERRIDDEN_BLOCKS, broken)

    def _lose(self, one: Reservation | None, blocks: int) -> None:
        """So many blocks that a reservation held alone were handed out."""
        if one is not None:
            one.blocks -= blocks
            one.lost += blocks
            self.ledger.count(one, -blocks)

    def emptied(self, blocks: "Sequence[KVCacheBlock]") -> None:
        """See :class:`spm.sam.free_queue.Marks`."""
        for block in blocks:
            if self.holders[block.block_id] is not None:
                self._forget(block)

    def reset(self) -> None:
        """vLLM reset its prefix cache: no block holds anything."""
        for block in self.blocks:
            self._forget(block)

    # --- bookkeeping -------------------------------------------------------------------

    def _forget(self, block: "KVCacheBlock") -> None:
        """Nothing recorded of the block counts any more."""
        block_id = block.block_id
        self.owners[block_id] = None
        holder = self.holders[block_id]
        if holder is None:
            return
        self.holders[block_id] = None
        self.ledger.uncount(holder)
        if isinstance(holder, Reservation):
            holder.blocks -= 1
            holder.lost += 1
        elif isinstance(holder, Sharing):
            holder.members = {}  # they find out when they look: there may be thousands
        self._moved(block, holder.target, ORDINARY)

    def _settle(
        self, block: "KVCacheBlock", sharing: Sharing, old: Target, *, counted: bool = True
    ) -> None:
        """Put a shared block where its strongest member says, unless a cap forbids it."""
        best = sharing.best()
        target, tenant = (ORDINARY, 0) if best is None else (best.target, best.tenant)
        if target >= FIRST_PROTECTED and self.ledger.exceeds(sharing, tenant, counted=counted):
            target, tenant = self._within_cap(sharing, counted), sharing.tenant
        if counted:
            if target == old and tenant == sharing.tenant:
                return
            self.ledger.uncount(sharing)
        sharing.target, sharing.tenant = target, tenant
        self.ledger.count(sharing)
        self._moved(block, old, target)

    def _within_cap(self, sharing: Sharing, counted: bool) -> Target:
        """What whoever pays for the block already asks for, if anybody does. O(members)."""
        pays = counted and sharing.target >= FIRST_PROTECTED
        asked = [m.target for m in sharing.members.values() if pays and m.tenant == sharing.tenant]
        return max((ASSOCIATED, *asked))

    def _moved(self, block: "KVCacheBlock", old: Target, target: Target) -> None:
        # With a backlog it may lie where it belonged before its reservation ended.
        if block.prev_free_block is not None and (old != target or self._expiry_backlog):
            self.queue.move(block, target)
