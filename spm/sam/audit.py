"""Are the books right? Whole-pool checks for tests and debugging; nothing here runs in a step."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from spm.errors import IntegrityError
from spm.sam.holders import Holder, Reservation, Sharing
from spm.sam.zones import (
    ASSOCIATED,
    DEMOTED,
    FIRST_PROTECTED,
    ORDINARY,
    ZONE_SHIFT,
    Target,
    Zone,
    target_tick,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from spm.sam.block_table import BlockTable
    from spm.sam.free_queue import ZonedFreeBlockQueue


def audit_table(table: "BlockTable", reservations: Iterable[Reservation]) -> None:
    """Raise :class:`IntegrityError` if counts, holders and queue disagree, or blocks are held
    by other than these ``reservations``. O(pool)."""
    audit_queue(table.queue, table)
    zones, tenants = [0] * len(Zone), dict[int, int]()
    alone: dict[Holder, int] = {}
    for block_id, holder in enumerate(table.holders):
        if holder is None:
            continue
        if table.blocks[block_id].is_null or table.owners[block_id] is None:
            raise IntegrityError(f"block {block_id} is held for no content")
        if holder.target != ORDINARY:
            zones[holder.target >> ZONE_SHIFT] += 1
        if holder.target >= FIRST_PROTECTED:
            tenants[holder.tenant] = tenants.get(holder.tenant, 0) + 1
        if isinstance(holder, Reservation):
            alone[holder] = alone.get(holder, 0) + 1
        elif isinstance(holder, Sharing):
            _audit_sharing(block_id, holder)
    ledger = table.ledger
    if zones != ledger.zone_blocks or sum(zones) != ledger.num_marked:
        raise IntegrityError(f"blocks by zone {ledger.zone_blocks}, counted {zones}")
    if tenants != ledger.tenant_blocks:
        raise IntegrityError(f"charged {ledger.tenant_blocks}, counted {tenants}")
    if not ledger.is_within_caps():
        raise IntegrityError(f"more is protected than a cap allows: {tenants}")
    if alone != {one: one.blocks for one in reservations if one.blocks}:
        raise IntegrityError("reservations and blocks disagree about who holds what")


def _audit_sharing(block_id: int, sharing: Sharing) -> None:
    sharing.check_integrity()
    best = sharing.best()
    if best is None or any(
        member.shared.get(block_id) is not sharing for member in sharing.members.values()
    ):
        raise IntegrityError(f"block {block_id} is shared with nobody, or unknown to one")
    capped = best.target >= FIRST_PROTECTED and ASSOCIATED <= sharing.target < best.target
    if sharing.target != best.target and not capped:
        raise IntegrityError(f"block {block_id} is not where its strongest member says")


def audit_queue(queue: "ZonedFreeBlockQueue", table: "BlockTable") -> None:
    """Raise :class:`IntegrityError` unless the links agree both ways, the count is right and
    each block lies where its holder says. O(free blocks)."""
    segments = queue.segments()
    order = [target for target, _ in segments]
    if order != sorted(order):
        raise IntegrityError("the segments are out of order")
    count = sum(len(blocks) for _, blocks in segments)
    if count != queue.num_free_blocks:
        raise IntegrityError(f"{count} blocks are linked, {queue.num_free_blocks} counted")
    for target, blocks in segments:
        if blocks and target <= DEMOTED and not queue.low_zones_used:
            raise IntegrityError("finished or demoted blocks would be passed over")
        for block in blocks:
            _audit_place(table, target, block)


def _audit_place(table: "BlockTable", segment: Target, block: "KVCacheBlock") -> None:
    """A block whose protection has ended may still wait to be moved."""
    holder = table.holders[block.block_id]
    target = ORDINARY if holder is None else holder.target
    over = segment >= FIRST_PROTECTED and target_tick(segment) <= table.now_tick
    if target != segment and not (over and target < segment):
        where = f"{segment:#x}, not {target:#x}"
        raise IntegrityError(f"block {block.block_id} lies in {where}")
