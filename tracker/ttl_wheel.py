"""A timer wheel: deadlines for many entries at constant cost per operation."""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from itertools import islice
from typing import Generic, TypeVar

from tracker.errors import IntegrityError

E = TypeVar("E", bound=Hashable)

DEFAULT_SLOTS = 3600
"""One turn is an hour at the one-second tick: the longest TTL a hint may ask for."""


class TtlWheel(Generic[E]):
    """Timer wheel with a one-second tick; ``advance`` touches only the slots that elapsed.

    A tick is a whole second of the injected clock, so comparing a deadline with a tick
    is exact and no entry leaves early by a rounding error. A deadline further away
    than one turn shares its slot with nearer ones and stays there until its own turn.

    The caller bounds the number of entries. All methods belong to one thread and
    raise nothing but what they name.
    """

    __slots__ = ("_clock", "_cursor_tick", "_deadlines_s", "_overdue", "_slots")

    def __init__(self, clock: Callable[[], float], slots: int = DEFAULT_SLOTS) -> None:
        """``clock`` returns monotonic seconds and never goes back.

        Raises ValueError when ``slots`` is not positive.
        """
        if slots < 1:
            raise ValueError(f"slots must be positive, got {slots}")
        self._clock = clock
        self._cursor_tick = math.floor(clock())
        self._deadlines_s: dict[E, float] = {}
        self._slots: list[dict[E, None]] = [{} for _ in range(slots)]
        # Due at a tick already visited (a TTL of zero, or beyond a limit): waits for the
        # next advance, because its slot is not looked at again for a whole turn.
        # OrderedDict: a burst is taken from the front piece by piece, and a dict would walk
        # over all that was taken before with every piece.
        self._overdue: OrderedDict[E, None] = OrderedDict()

    def register(self, entry: E, ttl_s: float) -> None:
        """Let ``entry`` expire ``ttl_s`` seconds from now, replacing an earlier deadline. O(1).

        Zero or less is due at once. Raises ValueError when ``ttl_s`` is not finite.
        """
        if not math.isfinite(ttl_s):
            raise ValueError(f"ttl_s must be finite, got {ttl_s}")
        deadline_s = self._clock() + ttl_s
        self.remove(entry)
        self._deadlines_s[entry] = deadline_s
        self._bucket(deadline_s)[entry] = None

    def refresh(self, entry: E, ttl_s: float) -> bool:
        """Move the deadline of a known entry to ``ttl_s`` seconds from now. O(1).

        False, and nothing changes, when the entry is unknown (perhaps just expired).
        Raises ValueError when ``ttl_s`` is not finite.
        """
        if entry not in self._deadlines_s:
            return False
        self.register(entry, ttl_s)
        return True

    def remove(self, entry: E) -> bool:
        """Forget ``entry``; False when it was unknown. O(1)."""
        deadline_s = self._deadlines_s.pop(entry, None)
        if deadline_s is None:
            return False
        del self._where(entry, deadline_s)[entry]
        return True

    def advance(self, limit: int | None = None) -> list[E]:
        """Read the clock, drop and return what expired since the last call, in no given order.

        An entry is returned by the first call at or after its deadline rounded up to a
        whole second, or, beyond ``limit``, by one of the next. Cost: the elapsed slots, at
        most one turn, and what is in them; of slots no more are visited than the limit needs.
        """
        now_tick = math.floor(self._clock())
        # After a pause of several turns each slot is still visited once.
        last_tick = min(now_tick, self._cursor_tick + len(self._slots))
        for tick in range(self._cursor_tick + 1, last_tick + 1):
            if limit is not None and len(self._overdue) >= limit:
                break
            for entry in self._take_due(tick % len(self._slots), now_tick):
                self._overdue[entry] = None
            self._cursor_tick = tick
        else:
            self._cursor_tick = now_tick
        expired = list(islice(self._overdue, limit))
        if len(expired) == len(self._overdue):
            self._overdue = OrderedDict()  # a burst's table is given back
        for entry in expired:
            self._overdue.pop(entry, None)
            del self._deadlines_s[entry]
        return expired

    def deadline_s(self, entry: E) -> float | None:
        """Clock reading in seconds at which the TTL of ``entry`` has passed; None if unknown."""
        return self._deadlines_s.get(entry)

    def __len__(self) -> int:
        return len(self._deadlines_s)

    def __contains__(self, entry: object) -> bool:
        return entry in self._deadlines_s

    def check_integrity(self) -> None:
        """Re-derive every entry's place from its deadline. O(entries + slots).

        Raises IntegrityError when an entry is lost, doubled or in the wrong slot.
        """
        placed = sum(len(slot) for slot in self._slots) + len(self._overdue)
        if placed != len(self._deadlines_s):
            raise IntegrityError(f"{placed} entries placed, {len(self._deadlines_s)} deadlines")
        for entry, deadline_s in self._deadlines_s.items():
            if entry not in self._where(entry, deadline_s):
                raise IntegrityError(f"entry with deadline {deadline_s} s is in the wrong slot")
        now_tick = math.floor(self._clock())
        if any(math.ceil(self._deadlines_s[entry]) > now_tick for entry in self._overdue):
            raise IntegrityError("an entry is overdue before its deadline")

    def _where(self, entry: E, deadline_s: float) -> dict[E, None]:
        """What has an entry, or should have it. After a pause of several turns one may be
        overdue whose tick the cursor has not reached: it shared a slot with a nearer one."""
        return self._overdue if entry in self._overdue else self._bucket(deadline_s)

    def _bucket(self, deadline_s: float) -> dict[E, None]:
        """Where an entry is put now."""
        tick = math.ceil(deadline_s)
        if tick <= self._cursor_tick:
            return self._overdue
        return self._slots[tick % len(self._slots)]

    def _take_due(self, slot_index: int, now_tick: int) -> list[E]:
        slot = self._slots[slot_index]
        due = [entry for entry in slot if self._deadlines_s[entry] <= now_tick]
        if len(due) == len(slot):
            # A new dict, not clear(): a burst's table is given back, not kept for a turn.
            self._slots[slot_index] = {}
        else:
            for entry in due:
                del slot[entry]
        return due
