"""The blocks one request of a session left in the pool, and what the session claims of them."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

NO_BLOCK = 0
"""vLLM's null block; here also a place that holds nothing (any more)."""


class GroupBlocks:
    """One KV cache group of a frontier, by logical index: 16 bytes a block.

    ``ids[i]`` is :data:`NO_BLOCK` where nothing is claimed; else the claim ``claims[i]`` was
    made at generation ``generations[i]`` of that block.
    """

    __slots__ = ("claims", "generations", "ids")

    def __init__(self) -> None:
        self.ids = array("I")
        self.generations = array("I")
        self.claims = array("Q")

    def append(self, block_id: int, generation: int, claim: int) -> None:
        """The next logical block."""
        self.ids.append(block_id)
        self.generations.append(generation)
        self.claims.append(claim)

    def drop(self, index: int) -> None:
        """Nothing is claimed there any more."""
        self.ids[index] = NO_BLOCK

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(slots=True, eq=False)
class Frontier:
    """A chain of blocks that a session can resume from, as its last request left it."""

    finished_s: float
    """Clock reading; a request that arrived later supersedes it."""
    groups: tuple[GroupBlocks, ...]

    def held(self) -> Iterator[tuple[GroupBlocks, int]]:
        """Every place that holds a block, the tail of each group first: a prefix without
        its tail is useful, a tail without its prefix is not."""
        for group in self.groups:
            for index in range(len(group) - 1, -1, -1):
                if group.ids[index] != NO_BLOCK:
                    yield group, index
