"""How many blocks are where, and how many of them each tenant protects."""

from dataclasses import dataclass

from spm.sam.holders import Holder, Sharing
from spm.sam.zones import FIRST_PROTECTED, ORDINARY, ZONE_SHIFT, Zone


@dataclass(frozen=True, slots=True)
class Caps:
    """Most blocks that may be protected at a time."""

    blocks: int
    tenant_blocks: int


class Ledger:
    """Counts by zone and tenant, kept as blocks change holders. Belongs to the scheduler
    thread."""

    __slots__ = ("_caps", "_num_blocks", "num_marked", "tenant_blocks", "zone_blocks")

    def __init__(self, num_blocks: int, caps: Caps) -> None:
        self._num_blocks = num_blocks
        self._caps = caps
        self.num_marked = 0
        """Blocks whose target is not :data:`ORDINARY`."""
        self.zone_blocks = [0] * len(Zone)
        """Marked blocks by zone."""
        self.tenant_blocks: dict[int, int] = {}
        """Protected blocks by tenant; no zeros."""

    def count(self, holder: Holder, blocks: int = 1) -> None:
        """So many blocks more (or fewer) belong where ``holder`` says."""
        target = holder.target
        if target == ORDINARY or not blocks:
            return
        self.num_marked += blocks
        self.zone_blocks[target >> ZONE_SHIFT] += blocks
        if target >= FIRST_PROTECTED:
            total = self.tenant_blocks.get(holder.tenant, 0) + blocks
            if total:
                self.tenant_blocks[holder.tenant] = total
            else:
                del self.tenant_blocks[holder.tenant]

    def uncount(self, holder: Holder) -> None:
        """One block fewer belongs there."""
        self.count(holder, -1)

    @property
    def num_protected(self) -> int:
        """Blocks that hints protect now."""
        return self.zone_blocks[Zone.LATER] + self.zone_blocks[Zone.SOON]

    @property
    def zone_sizes(self) -> tuple[int, ...]:
        """Blocks by the zone where they are or, in use, will be; the null block is ordinary."""
        sizes = list(self.zone_blocks)
        sizes[Zone.ORDINARY] = self._num_blocks - self.num_marked
        return tuple(sizes)

    def budget(self, tenant: int) -> int:
        """Blocks that may still become protected for a tenant."""
        left = self._caps.blocks - self.num_protected
        return max(0, min(left, self._caps.tenant_blocks - self.tenant_blocks.get(tenant, 0)))

    def exceeds(self, sharing: Sharing, tenant: int, *, counted: bool) -> bool:
        """Whether protecting a shared block for ``tenant`` would break a cap: what another
        tenant paid for so far may fall to this one. ``counted``: the block is in the books."""
        protected = counted and sharing.target >= FIRST_PROTECTED
        if protected and sharing.tenant == tenant:
            return False
        if self.tenant_blocks.get(tenant, 0) >= self._caps.tenant_blocks:
            return True
        return not protected and self.num_protected >= self._caps.blocks

    def is_within_caps(self) -> bool:
        """What must always hold."""
        most = max(self.tenant_blocks.values(), default=0)
        return self.num_protected <= self._caps.blocks and most <= self._caps.tenant_blocks
