"""How long a session usually stays away between two requests. Owned by the scheduler thread."""

from collections import OrderedDict
from dataclasses import dataclass

from tracker.ids import SessionRef

NEWEST_WEIGHT = 0.3
"""Of the newest gap in the average: the last few count, tools change with an agent's task."""


@dataclass(slots=True)
class _Gap:
    ended_s: float | None = None
    """When the session became idle; None while it is not."""
    average_s: float | None = None


class SessionGaps:
    """Moving average of each session's gaps, from the end of its last request to the next arrival.

    At most ``max_sessions`` are remembered, least recently heard of forgotten first. Times are
    readings of one monotonic clock in seconds.
    """

    def __init__(self, max_sessions: int) -> None:
        """Raises ValueError if ``max_sessions`` is not positive."""
        if max_sessions < 1:
            raise ValueError(f"max_sessions must be positive, got {max_sessions}")
        self._max_sessions = max_sessions
        self._gaps: OrderedDict[SessionRef, _Gap] = OrderedDict()  # least recent first

    def note_end(self, ref: SessionRef, now_s: float) -> None:
        """The session has no request any more: a gap begins."""
        gap = self._gaps.setdefault(ref, _Gap())
        self._gaps.move_to_end(ref)
        gap.ended_s = now_s
        if len(self._gaps) > self._max_sessions:
            self._gaps.popitem(last=False)

    def note_start(self, ref: SessionRef, now_s: float) -> None:
        """A request arrived: ends a gap if there is one; further requests change nothing."""
        gap = self._gaps.get(ref)
        if gap is None:
            return
        self._gaps.move_to_end(ref)
        if gap.ended_s is None:
            return
        gap_s = max(0.0, now_s - gap.ended_s)
        gap.ended_s = None
        if gap.average_s is None:
            gap.average_s = gap_s
        else:
            gap.average_s += NEWEST_WEIGHT * (gap_s - gap.average_s)

    def expected_gap_s(self, ref: SessionRef) -> float | None:
        """The average; None: the session was never seen to come back."""
        gap = self._gaps.get(ref)
        return None if gap is None else gap.average_s

    def forget(self, ref: SessionRef) -> None:
        """The session is over; an unknown one is fine."""
        self._gaps.pop(ref, None)

    def __len__(self) -> int:
        return len(self._gaps)
