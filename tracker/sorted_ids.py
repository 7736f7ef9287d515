"""Sorted ids in pieces, so that adding and removing one moves no more than a piece."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from tracker.errors import IntegrityError
from tracker.ids import SessionId

DEFAULT_PIECE = 1024


class SortedIds:
    """Distinct ids, ascending. All methods belong to one thread and raise nothing but what they
    name."""

    __slots__ = ("_lasts", "_longest", "_pieces")

    def __init__(self, longest: int = DEFAULT_PIECE) -> None:
        """``longest``: ids in a piece, at least two."""
        self._longest = longest
        self._pieces: list[list[SessionId]] = []
        self._lasts: list[SessionId] = []
        """The last id of each piece."""

    def add(self, one: SessionId) -> None:
        """An id that is not there."""
        at = min(bisect_left(self._lasts, one), len(self._pieces) - 1)
        if at < 0:
            self._pieces.append([one])
            self._lasts.append(one)
            return
        piece = self._pieces[at]
        insort(piece, one)
        if len(piece) > self._longest:
            middle = len(piece) // 2
            self._pieces.insert(at + 1, piece[middle:])
            self._lasts.insert(at + 1, piece[-1])
            del piece[middle:]
        self._lasts[at] = piece[-1]

    def remove(self, one: SessionId) -> None:
        """An id that is there."""
        at = bisect_left(self._lasts, one)
        piece = self._pieces[at]
        del piece[bisect_left(piece, one)]
        if piece:
            self._lasts[at] = piece[-1]
        else:
            del self._pieces[at], self._lasts[at]

    def above(self, after: str | None) -> Iterator[SessionId]:
        """The ids above ``after``, or all; not to be changed meanwhile."""
        start = 0 if after is None else bisect_right(self._lasts, after)
        for at in range(start, len(self._pieces)):
            piece = self._pieces[at]
            first = bisect_right(piece, after) if after is not None and at == start else 0
            for position in range(first, len(piece)):
                yield piece[position]

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def check_integrity(self) -> None:
        """Raise IntegrityError if a piece is empty, too long, or its last id is another."""
        if any(not 0 < len(piece) <= self._longest for piece in self._pieces):
            raise IntegrityError("a piece of sorted ids is empty or too long")
        if self._lasts != [piece[-1] for piece in self._pieces]:
            raise IntegrityError("the last ids of pieces are others")
