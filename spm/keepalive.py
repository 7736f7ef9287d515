"""Which keys are to be touched next, so that a store neither evicts nor expires them."""

import math
from array import array
from binascii import crc32
from collections.abc import Iterable

from spm.errors import IntegrityError
from tracker.ids import BlockKey

DEFAULT_SLOTS = 1024

_Slot = dict[BlockKey, float]
_NONE = -1


class KeepAliveRing:
    """Every held key comes round about once in ``interval_s`` seconds, evenly spread.

    The interval is cut into slots and a key's own bytes say in which it is, so no key needs a
    schedule of its own: per key there is one entry in its slot's dict, whoever and however
    many hold it. A key newly held waits for its slot's turn. Time is whatever monotonic
    seconds the caller passes; it never goes back. Pure state of one thread; raises nothing
    but what is named.
    """

    __slots__ = (
        "_interval_s",
        "_left",
        "_left_slot",
        "_max_keys",
        "_size",
        "_slots",
        "_start_s",
        "_tick",
        "_turned_s",
    )

    def __init__(self, interval_s: float, max_keys: int, slots: int = DEFAULT_SLOTS) -> None:
        """Raises ValueError unless all three are positive."""
        if interval_s <= 0 or max_keys < 1 or slots < 1:
            raise ValueError(f"must be positive: {interval_s=} {max_keys=} {slots=}")
        self._interval_s = interval_s
        self._max_keys = max_keys
        self._slots: list[_Slot] = [{} for _ in range(slots)]
        # The slot having its turn loses its keys to a new dict one by one, which remembers how
        # far it got however keys come and go meanwhile.
        self._left: _Slot = {}
        self._left_slot = _NONE
        self._size = 0
        self._tick = 0
        self._start_s = math.nan  # tick n is due n slots after it; not running while empty
        self._turned_s = array("d", [math.nan]) * slots

    @property
    def interval_s(self) -> float:
        """Seconds in which every key comes round once."""
        return self._interval_s

    def hold(self, keys: Iterable[BlockKey], until_s: float) -> int:
        """Keep ``keys`` until then, those held already until the later of both instants.

        Returns how many are held now; over ``max_keys`` new ones are refused. O(1) a key.
        Raises ValueError for NaN.
        """
        if math.isnan(until_s):
            raise ValueError("until_s is NaN")
        held = 0
        for key in keys:
            slot = self._slot_with(key)
            known_s = slot.get(key)
            if known_s is None:
                if self._size >= self._max_keys:
                    continue
                if not self._size:
                    self._start_s = math.nan
                self._size += 1
            if known_s is None or known_s < until_s:
                slot[key] = until_s
            held += 1
        return held

    def drop(self, keys: Iterable[BlockKey]) -> int:
        """Forget ``keys`` at once; returns how many were held. O(1) a key."""
        dropped = sum(self._slot_with(key).pop(key, None) is not None for key in keys)
        self._size -= dropped
        return dropped

    def take(self, now_s: float, limit: int) -> list[tuple[BlockKey, float]]:
        """The next keys that are due, with the instant until which each is held.

        Looks at no more than ``limit`` keys, at least one; those whose time has passed leave
        without being returned, so there may be more due after an empty answer: see
        :meth:`next_due_s`.
        """
        taken: list[tuple[BlockKey, float]] = []
        if not self._size:
            return taken
        if math.isnan(self._start_s):
            self._start(now_s)
        self._catch_up(now_s)
        budget = max(1, limit)
        while budget and self._due_s(self._tick) <= now_s:
            if self._left_slot == _NONE:
                self._open_slot()
            budget = self._move(now_s, budget, taken)
            if not self._left:
                self._close_slot(now_s)
        return taken

    def until_s(self, key: BlockKey) -> float | None:
        """Until when ``key`` is held; None if it is not."""
        return self._slot_with(key).get(key)

    def next_due_s(self, now_s: float) -> float:
        """When :meth:`take` is worth calling: now or earlier if keys are due, infinity if
        none is held. O(slots) at worst, when nearly all are empty."""
        if not self._size:
            return math.inf
        if math.isnan(self._start_s) or self._left:
            return now_s
        return self._due_s(self._next_tick())

    def behind_s(self, now_s: float) -> float:
        """By how much the next slot's keys have waited longer than the interval; 0 on time."""
        if not self._size or math.isnan(self._start_s):
            return 0.0
        turned_s = self._turned_s[self._next_tick() % len(self._slots)]
        late_s = now_s - turned_s - self._interval_s
        # Less than a slot's width is not late: nobody takes keys at the very instant.
        return late_s if late_s > self._interval_s / len(self._slots) else 0.0

    def clear(self) -> None:
        """Forget all keys. O(slots)."""
        self._slots = [{} for _ in self._slots]
        self._left = {}
        self._left_slot = _NONE
        self._size = 0

    def __len__(self) -> int:
        """Keys held, those included whose time has passed since they last came round."""
        return self._size

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self.until_s(BlockKey(key)) is not None

    def check_integrity(self) -> None:
        """Raise :class:`IntegrityError` if a key is lost, doubled or in the wrong slot. O(n)."""
        counted = len(self._left) + sum(map(len, self._slots))
        if counted != self._size:
            raise IntegrityError(f"{self._size} keys counted, {counted} held")
        for index, slot in enumerate(self._slots):
            if any(self._index(key) != index for key in slot):
                raise IntegrityError(f"a key of another slot is in slot {index}")
        if any(self._index(key) != self._left_slot for key in self._left):
            raise IntegrityError(f"a key of another slot is left of slot {self._left_slot}")
        if not self._left.keys().isdisjoint(self._slots[self._left_slot]):
            raise IntegrityError(f"slot {self._left_slot} has a key twice")

    def _index(self, key: BlockKey) -> int:
        return crc32(key) % len(self._slots)

    def _slot_with(self, key: BlockKey) -> _Slot:
        """The dict that has ``key``, or should have it."""
        index = self._index(key)
        return self._left if index == self._left_slot and key in self._left else self._slots[index]

    def _due_s(self, tick: int) -> float:
        return self._start_s + tick * (self._interval_s / len(self._slots))

    def _next_tick(self) -> int:
        """The tick of the next slot that has keys."""
        slots = len(self._slots)
        ticks = range(self._tick, self._tick + slots)
        return next(tick for tick in ticks if self._left or self._slots[tick % slots])

    def _start(self, now_s: float) -> None:
        """The first key came: as if every slot had had its turn in the interval before."""
        self._tick = 0
        self._left_slot = _NONE
        self._start_s = now_s
        slots = len(self._slots)
        for index in range(slots):
            self._turned_s[index] = self._due_s(index) - self._interval_s

    def _catch_up(self, now_s: float) -> None:
        """At most one turn is owed, and no slot twice, however long nobody called."""
        owed_s = now_s - self._due_s(self._tick + len(self._slots) - 1)
        if owed_s > 0:
            self._start_s += owed_s

    def _open_slot(self) -> None:
        self._left_slot = self._tick % len(self._slots)
        self._left, self._slots[self._left_slot] = self._slots[self._left_slot], {}

    def _close_slot(self, now_s: float) -> None:
        self._turned_s[self._left_slot] = now_s
        self._left = {}  # gives the old table back
        self._left_slot = _NONE
        self._tick += 1

    def _move(self, now_s: float, budget: int, taken: list[tuple[BlockKey, float]]) -> int:
        """Look at up to ``budget`` keys of the open slot; returns what is left of it."""
        left, done = self._left, self._slots[self._left_slot]
        count = min(budget, len(left))
        for _ in range(count):
            key, until_s = left.popitem()
            if until_s > now_s:
                done[key] = until_s
                taken.append((key, until_s))
            else:
                self._size -= 1
        return budget - count
