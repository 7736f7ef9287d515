"""When reservations end: by tick, so that a second costs what ends in it."""

from spm.sam.holders import Reservation
from spm.sam.zones import FIRST_PROTECTED, target_tick


class Endings:
    """Reservations that protect, by the tick at which they stop. Belongs to the scheduler
    thread; bounded by the longest TTL in ticks and by the number of reservations."""

    __slots__ = ("_by_tick",)

    def __init__(self) -> None:
        self._by_tick: dict[int, dict[Reservation, None]] = {}

    def add(self, one: Reservation) -> None:
        """To be called when its target has been set; no matter if it does not protect."""
        if one.target >= FIRST_PROTECTED:
            self._by_tick.setdefault(target_tick(one.target), {})[one] = None

    def remove(self, one: Reservation) -> None:
        """To be called before its target changes, and when nobody needs it any more."""
        tick = target_tick(one.target)
        ending = self._by_tick.get(tick)
        if ending is not None:
            ending.pop(one, None)
            if not ending:
                del self._by_tick[tick]

    def due(self, now_tick: int) -> list[Reservation]:
        """Those that have stopped; they stay until they are removed."""
        return [one for tick, ending in self._by_tick.items() if tick <= now_tick for one in ending]
