"""Claims of a whole chain of blocks at once: what a request that ends leaves behind.

Most of a chain is what the session left there the last time, or new; both take a few array
operations for any number of blocks. What is shared with other sessions is changed block by
block, and whatever is unusual is left to the caller.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from spm.sam.block_table import BlockTable
from spm.sam.frontier import NO_BLOCK, GroupBlocks
from spm.sam.zones import FIRST_PROTECTED, TENANT_SHIFT, Claim, Zone, claim_tenant, make_claim

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_Mask = npt.NDArray[np.bool_]
_TENANT_BITS = np.uint64(TENANT_SHIFT)
_ORDINARY_CLAIM = make_claim(Zone.ORDINARY)
_ASSOCIATED_CLAIM = make_claim(Zone.ASSOCIATED)


class ChainClaim:
    """One KV cache group of a request that ends, while its claims are being made.

    ``budget``: blocks that may still become protected. Scheduler thread.
    """

    def __init__(
        self,
        table: BlockTable,
        blocks: "Sequence[KVCacheBlock]",
        before: GroupBlocks,
        strong_stop: int,
        strong: Claim,
        weak: Claim,
        budget: int,
    ) -> None:
        self._table = table
        self._blocks = blocks
        self._before = before
        self._tenant = claim_tenant(strong)
        self._strong, self._weak = strong, weak
        self.ids = np.array([block.block_id for block in blocks], np.uint32)
        # The property costs as much as the rest of the loop.
        self.held: _Mask = np.array([b._block_hash is not None for b in blocks], np.bool_)
        """Places that hold a hashed block."""
        self.claims = np.full(len(blocks), weak, np.uint64)
        self.claims[:strong_stop] = strong
        self._state = table.look(self.ids)
        self.clipped = self._clip(strong_stop, strong, weak, budget)
        """Places that a cap kept from being protected."""

    def _clip(self, strong_stop: int, strong: Claim, weak: Claim, budget: int) -> int:
        """Where not all can be protected that are not yet, the prefix comes first."""
        self.newly_protected = 0
        if strong <= _ASSOCIATED_CLAIM:
            return 0
        new = np.flatnonzero(self.held[:strong_stop] & ~self._charged()[:strong_stop])
        clipped = new[budget:]
        self.claims[clipped] = weak
        self.newly_protected = len(new) - len(clipped)
        return len(clipped)

    def _charged(self) -> _Mask:
        charged: _Mask = self._state.targets >= FIRST_PROTECTED
        charged &= self._state.charged == self._tenant
        return charged

    def settle(self) -> list[int]:
        """Make the claims that are simple, on blocks in use; the places left to be claimed one
        by one."""
        free = self.held & np.array([block.ref_cnt == 0 for block in self._blocks], np.bool_)
        left = self.held & ~free
        self._take_over(left)
        places = np.flatnonzero(left & ~self._state.owned)
        if len(places):
            names = [self._blocks[i].block_hash for i in places.tolist()]
            self._table.adopt(self.ids[places], self.claims[places], self._tenant, names)
            left[places] = False
        return [int(index) for index in np.flatnonzero(left | free)]

    def _take_over(self, left: _Mask) -> None:
        """What the session claimed before, in the same place."""
        both = min(len(self.ids), len(self._before))
        old_ids = np.frombuffer(self._before.ids, np.uint32)[:both]
        same = left[:both] & (self.ids[:both] == old_ids)
        same &= (
            self._state.generations[:both]
            == np.frombuffer(self._before.generations, np.uint32)[:both]
        )
        claims = self.claims[:both]
        unchanged = same & (np.frombuffer(self._before.claims, np.uint64)[:both] == claims)
        taken = self._trusted(unchanged)
        marking = same & ~unchanged & (claims > _ORDINARY_CLAIM)
        if marking.any():
            taken |= self._renew(marking)
        left[:both] &= ~taken
        old_ids[taken] = NO_BLOCK

    def _trusted(self, unchanged: _Mask) -> _Mask:
        """A block that is not marked may have been handed out and filled again unnoticed."""
        doubtful = np.flatnonzero(unchanged & (self.claims[: len(unchanged)] <= _ORDINARY_CLAIM))
        owners, blocks = self._table.owners, self._blocks
        for index in doubtful.tolist():
            block = blocks[index]
            if owners[block.block_id] != block._block_hash:
                unchanged[index] = False
        return unchanged

    def _renew(self, wanted: _Mask) -> _Mask:
        """Those of the ``wanted`` that stay in their class, or protected by the same tenant."""
        state, both = self._state, len(wanted)
        protected = self.claims[:both] >> _TENANT_BITS >= FIRST_PROTECTED
        fits = wanted & protected & self._charged()[:both]
        alone: _Mask = fits & (state.refs[:both] == 1)
        places = np.flatnonzero(alone)
        self._table.renew(self.ids[places], self.claims[places], state.targets[places])
        olds = self._before.claims
        for index in np.flatnonzero(fits & ~alone).tolist():
            alone[index] = self._table.renew_shared(
                self._blocks[index],
                Claim(olds[index]),
                self.claim_at(index),
                self._tenant,
            )
        return alone

    def claim_at(self, index: int) -> Claim:
        """The claim on one place. One object for all: a chain has thousands of them."""
        return self._strong if self.claims[index] == self._strong else self._weak

    def result(self) -> GroupBlocks:
        """What is claimed now."""
        self.ids[~self.held] = NO_BLOCK
        return GroupBlocks.of(self.ids, self._table.generations_of(self.ids), self.claims)
