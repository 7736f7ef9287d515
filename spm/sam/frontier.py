"""The blocks one request of a session left in the pool, and what the session says of them."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from spm.sam.block_table import BlockTable
from spm.sam.holders import Reservation
from spm.sam.zones import ORDINARY, Target

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

NO_BLOCK = 0
"""vLLM's null block; here also a place that holds nothing (any more)."""


def hashed_ids(blocks: "Sequence[KVCacheBlock]") -> list[int]:
    """Block ids by logical index, :data:`NO_BLOCK` where there is nothing to reuse; without
    the places at the end that hold nothing, as the block being filled."""
    # The property costs as much as the rest of the loop.
    ids = [block.block_id if block._block_hash is not None else NO_BLOCK for block in blocks]
    while ids and ids[-1] == NO_BLOCK:
        ids.pop()
    return ids


class Frontier:
    """A chain of blocks that a session can resume from, as its last request left it.

    Places are (group, logical index). The first ones are held by ``strong``, or by ``weak``
    where a cap or the hint's ``block_offset`` keeps them from being protected.
    """

    __slots__ = ("borrowed", "finished_s", "ids", "interrupted", "strong", "table", "weak")

    def __init__(
        self, table: BlockTable, num_groups: int, strong: Reservation, weak: Reservation
    ) -> None:
        self.table = table
        self.strong = strong
        self.weak = weak
        self.ids: list[list[int]] = [[] for _ in range(num_groups)]
        """By group and logical index."""
        self.borrowed = [0] * num_groups
        """By group: places before it may hold what requests of nobody's session computed and
        go on using. The session does not give that away early."""
        self.finished_s = 0.0
        """Clock reading; a request that arrived later supersedes it."""
        self.interrupted = False
        """Its request has not ended; ``finished_s`` is when that arrived."""

    @property
    def num_places(self) -> int:
        """Length over all groups."""
        return sum(map(len, self.ids))

    def claimant_at(self, block_id: int) -> Reservation | None:
        """Which of the two has a claim on the block; None: neither has, any more."""
        if block_id == NO_BLOCK:
            return None
        for one in (self.strong, self.weak):
            if self.table.has_claim(block_id, one):
                return one
        return None

    def holds(self, block_id: int) -> bool:
        """Whether a claim is left, and what it was made for is still there."""
        return self.claimant_at(block_id) is not None and self.table.is_intact(block_id)

    def places(self) -> Iterator[tuple[int, int]]:
        """Every place, the tail of each group first: a prefix without its tail is useful, a
        tail without its prefix is not."""
        for group, ids in enumerate(self.ids):
            for index in range(len(ids) - 1, -1, -1):
                yield group, index

    def common_prefix(self, group: int, ids: list[int]) -> int:
        """Places from the first on that are the same in ``ids`` and still held."""
        mine = self.ids[group]
        length = min(len(mine), len(ids))
        if mine[:length] != ids[:length]:
            length = next(i for i in range(length) if mine[i] != ids[i])
        if self.table.has_lost(self.strong) or self.table.has_lost(self.weak):
            return self._intact_prefix(mine, length)
        return length

    def _intact_prefix(self, ids: list[int], length: int) -> int:
        """Places before the first one that is no longer held, or holds something else."""
        table, both = self.table, (self.strong, self.weak)
        holders, intact = table.holders, table.is_intact
        for index in range(length):
            block_id = ids[index]
            if block_id == NO_BLOCK:
                continue
            alone = holders[block_id] in both
            if not intact(block_id) or not (alone or self.claimant_at(block_id) is not None):
                return index
        return length

    def release(self, group: int, index: int, leave: Target, own_refs: int = 0) -> bool:
        """Give one place back; False if nothing was held there."""
        block_id, self.ids[group][index] = self.ids[group][index], NO_BLOCK
        one = self.claimant_at(block_id)
        if one is None:
            return False
        if index < self.borrowed[group]:
            leave = ORDINARY
        return self.table.release(block_id, one, leave, own_refs)

    def cut(self, group: int, length: int, leave: Target) -> None:
        """Give back the places from ``length`` on."""
        ids = self.ids[group]
        for index in range(len(ids) - 1, length - 1, -1):
            self.release(group, index, leave)
        del ids[length:]

    def end(self, leave: Target) -> None:
        """Give everything back, for good."""
        for group in range(len(self.ids)):
            self.cut(group, 0, leave)
        self.table.drop(self.strong)
        self.table.drop(self.weak)
