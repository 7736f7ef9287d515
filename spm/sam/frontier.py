"""The blocks one request of a session left in the pool, and what the session claims of them."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NO_BLOCK = 0
"""vLLM's null block; here also a place that holds nothing (any more)."""


class GroupBlocks:
    """One KV cache group of a frontier, by logical index: 16 bytes a block.

    ``ids[i]`` is :data:`NO_BLOCK` where nothing is claimed; else the claim ``claims[i]`` was
    made at generation ``generations[i]`` of that block.
    """

    __slots__ = ("claims", "generations", "ids")

    def __init__(self, length: int = 0) -> None:
        """Nothing is claimed of ``length`` logical blocks."""
        self.ids = array("I", [NO_BLOCK]) * length
        self.generations = array("I", [0]) * length
        self.claims = array("Q", [0]) * length

    @classmethod
    def of(
        cls,
        ids: npt.NDArray[np.uint32],
        generations: npt.NDArray[np.uint32],
        claims: npt.NDArray[np.uint64],
    ) -> "GroupBlocks":
        """From columns of equal length; places at the end that hold nothing are left out."""
        held = np.flatnonzero(ids)
        length = int(held[-1]) + 1 if len(held) else 0
        made = cls()
        made.ids = array("I", ids[:length].tobytes())
        made.generations = array("I", generations[:length].tobytes())
        made.claims = array("Q", claims[:length].tobytes())
        return made

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
    interrupted: bool = False
    """Its request has not ended; ``finished_s`` is when that arrived."""

    def held(self) -> Iterator[tuple[GroupBlocks, int]]:
        """Every place that holds a block, the tail of each group first: a prefix without
        its tail is useful, a tail without its prefix is not."""
        for group in self.groups:
            for index in np.flatnonzero(np.frombuffer(group.ids, np.uint32))[::-1].tolist():
                yield group, index
