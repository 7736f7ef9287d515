"""Whose chunks LMCache's host tier is to keep, and who is next. Pure state behind the control
worker's lock."""

import math
from collections import OrderedDict
from dataclasses import dataclass

from connectors.lmcache.control import WarmRequest
from tracker.ids import SessionRef


@dataclass(slots=True)
class _Kept:
    request: WarmRequest
    until_s: float
    due_s: float


class KeptSessions:
    """Each session comes round once in ``interval_s``, those due together one after the other
    with pauses between them. O(1) a call; instants are whatever monotonic seconds the caller
    passes.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._kept: OrderedDict[SessionRef, _Kept] = OrderedDict()  # in the order of due_s
        self._resume_s = -math.inf

    def hold(self, ref: SessionRef, request: WarmRequest, until_s: float, now_s: float) -> None:
        """Keep these until then. A session that was just computed needs nothing for an
        interval; one that is only to be kept longer keeps its turn."""
        known = self._kept.get(ref)
        if known is not None and known.request == request:
            known.until_s = until_s
            return
        self._kept[ref] = _Kept(request, until_s, now_s + self.interval_s)
        self._kept.move_to_end(ref)

    def drop(self, ref: SessionRef) -> None:
        """Not any more."""
        self._kept.pop(ref, None)

    def clear(self) -> None:
        """None of them."""
        self._kept.clear()

    def next_due_s(self) -> float:
        """When :meth:`take` is worth calling; infinity if no session is kept."""
        first = next(iter(self._kept.values()), None)
        return math.inf if first is None else max(first.due_s, self._resume_s)

    def take(self, now_s: float) -> tuple[SessionRef, WarmRequest | None] | None:
        """The session that is due, and what to bring; None in place of that: its time is over,
        and it is kept no longer."""
        if self.next_due_s() > now_s:
            return None
        ref, kept = self._kept.popitem(last=False)
        if kept.until_s <= now_s:
            return ref, None
        kept.due_s = now_s + self.interval_s
        self._kept[ref] = kept
        self._resume_s = now_s + self.interval_s / (2 * len(self._kept))
        return ref, kept.request

    def behind_s(self, now_s: float) -> float:
        """By how much the next one has waited longer than the interval."""
        first = next(iter(self._kept.values()), None)
        return 0.0 if first is None else max(0.0, now_s - first.due_s)

    def __len__(self) -> int:
        return len(self._kept)
