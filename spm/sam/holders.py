"""Who has a say about a block: one branch of a session, several, or nobody any more.

The queue asks a block's holder for one thing only: ``target``, where the block belongs.
Renewing a session's protection therefore changes one object, not every block.
"""

import heapq
import itertools
from collections.abc import Iterable

from spm.errors import IntegrityError
from spm.sam.zones import (
    DEMOTED,
    DEMOTED_WHEN_FREED,
    FINISHED,
    FINISHED_WHEN_FREED,
    ORDINARY,
    Target,
)

_FEW = 64
"""Members up to which looking at all of them costs less than a heap of them."""
_numbers = itertools.count(1)


class Holder:
    """Where a block belongs, and which tenant's protection it is if it is protected."""

    __slots__ = ("target", "tenant")

    def __init__(self, target: Target, tenant: int = 0) -> None:
        self.target = target
        self.tenant = tenant


class Reservation(Holder):
    """What one branch of a session says of some of its blocks, the same of all."""

    __slots__ = ("blocks", "lost", "number", "shared")

    def __init__(self, target: Target, tenant: int) -> None:
        super().__init__(target, tenant)
        self.number = next(_numbers)
        self.blocks = 0
        """Blocks it holds alone."""
        self.lost = 0
        """Blocks it held alone that were handed out since its session last looked."""
        self.shared: dict[int, Sharing] = {}
        """Blocks it holds with others, by id; an entry is stale if the block has another
        holder by now."""


class Placement(Holder):
    """Nobody claims the block; it was put where it is taken early."""

    __slots__ = ()


PLACED = {
    target: Placement(target)
    for target in (FINISHED, DEMOTED, FINISHED_WHEN_FREED, DEMOTED_WHEN_FREED)
}


class Sharing(Holder):
    """Several reservations on one block: it belongs where the strongest says.

    ``target`` is set by the block table, which may have to keep below it for a cap.
    """

    __slots__ = ("_heap", "members")

    def __init__(self, members: Iterable[Reservation]) -> None:
        super().__init__(ORDINARY)
        self.members = {member.number: member for member in members}
        self._heap: list[tuple[int, int]] | None = None

    def add(self, member: Reservation) -> None:
        """One more reservation, or one that has changed. O(log members)."""
        self.members[member.number] = member
        if self._heap is not None:
            heapq.heappush(self._heap, (-member.target, member.number))
            if self._is_bloated():
                self._rebuild()
        elif len(self.members) > _FEW:
            self._rebuild()

    def discard(self, member: Reservation) -> bool:
        """One reservation fewer; False if it was none of them."""
        known = self.members.pop(member.number, None) is not None
        if self._is_bloated():
            self._rebuild()
        return known

    def _is_bloated(self) -> bool:
        """Whether too many entries are of members that left or said something else since."""
        return self._heap is not None and len(self._heap) > 2 * len(self.members) + 8

    def _rebuild(self) -> None:
        self._heap = None
        if len(self.members) > _FEW:
            self._heap = [(-m.target, m.number) for m in self.members.values()]
            heapq.heapify(self._heap)

    def best(self) -> Reservation | None:
        """The member that says the most; None without members. Amortised O(log members)."""
        if self._heap is None:
            return max(self.members.values(), key=_target, default=None)
        while self._heap:
            negative, number = self._heap[0]
            member = self.members.get(number)
            if member is not None and member.target == -negative:
                return member
            heapq.heappop(self._heap)  # it left, or said something else since
        return None

    def check_integrity(self) -> None:
        """Raise :class:`IntegrityError` if the heap has lost a member or grows for ever."""
        strongest = max(self.members.values(), key=_target, default=None)
        best = self.best()
        if (best and best.target) != (strongest and strongest.target):
            raise IntegrityError("the strongest member of a shared block is not known")
        if self._heap is not None and self._is_bloated():
            raise IntegrityError(f"{len(self._heap)} entries for {len(self.members)} members")


def _target(member: Reservation) -> int:
    return member.target
