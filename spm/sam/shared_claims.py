"""The claims of several sessions on one block, by strength."""

import heapq

from spm.errors import IntegrityError
from spm.sam.zones import Claim, has_expired

_FEW = 4
"""Different claims up to which looking at all of them costs less than a heap of them."""


class SharedClaims:
    """A multiset of claims that knows its best one. O(log claims) an operation.

    Belongs to the scheduler thread.
    """

    __slots__ = ("_counts", "_heap")

    def __init__(self, first: Claim) -> None:
        self._counts: dict[Claim, int] = {first: 1}
        self._heap: list[int] | None = None

    def add(self, claim: Claim) -> None:
        """One more session makes this claim."""
        count = self._counts.get(claim, 0)
        self._counts[claim] = count + 1
        if count:
            return
        if self._heap is not None:
            heapq.heappush(self._heap, -claim)
            self._compact()
        elif len(self._counts) > _FEW:
            self._rebuild()

    def discard(self, claim: Claim) -> bool:
        """One session fewer makes this claim; False when none did."""
        count = self._counts.get(claim, 0)
        if count > 1:
            self._counts[claim] = count - 1
        elif count:
            del self._counts[claim]
            self._compact()
        return count > 0

    def replace(self, old: Claim, new: Claim) -> bool:
        """One session's claim becomes another; False, and nothing changes, when none made
        ``old``."""
        counts = self._counts
        count = counts.get(old, 0)
        if old == new or not count:
            return count > 0
        if count > 1:
            counts[old] = count - 1
        else:
            del counts[old]
        self.add(new)
        return True

    def _compact(self) -> None:
        """Entries of claims that came and went are dropped when they are the greatest, or
        here."""
        if self._heap is not None and len(self._heap) > 2 * len(self._counts) + 8:
            self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [-c for c in self._counts] if len(self._counts) > _FEW else None
        if self._heap is not None:
            heapq.heapify(self._heap)

    def best(self, now_tick: int) -> Claim | None:
        """The strongest claim that has not expired; None when none is left."""
        if self._heap is None:
            return max((c for c in self._counts if not has_expired(c, now_tick)), default=None)
        while self._heap:
            claim = Claim(-self._heap[0])
            if claim in self._counts and not has_expired(claim, now_tick):
                return claim
            heapq.heappop(self._heap)
        return None

    def only(self) -> Claim:
        """The one claim left. ValueError when there are more."""
        (claim,) = self._counts
        return claim

    def __len__(self) -> int:
        """Different claims."""
        return len(self._counts)

    def check_integrity(self, refs: int) -> None:
        """Raise :class:`IntegrityError` unless ``refs`` sessions are counted."""
        if sum(self._counts.values()) != refs or min(self._counts.values()) < 1:
            raise IntegrityError(f"{refs} sessions claim a block, counted {self._counts}")
