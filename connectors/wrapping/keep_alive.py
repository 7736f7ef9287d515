"""Keep-alive by asking: for connectors in which a lookup counts as use.

Scheduler thread only, and only in steps: an engine without requests takes none, and a
connector cannot wake it. What is stored for its idle sessions is then as safe as the store's
own order of eviction makes it.
"""

import math
from collections import OrderedDict
from collections.abc import Callable

from connectors.wrapping.chains import SessionChains
from tracker.ids import SessionRef

Ask = Callable[[SessionRef, Callable[[int | None], None]], None]
"""Ask about all of a session, and have the answer told."""


class LookupKeepAlive:
    """Of one engine's sessions: each about once in ``interval_s``, one at a time."""

    def __init__(
        self,
        chains: SessionChains,
        holding: Callable[[SessionRef], float],
        ask: Ask,
        interval_s: float,
        clock: Callable[[], float],
    ) -> None:
        """``holding``: monotonic seconds until which a session's blocks are wanted."""
        self._chains = chains
        self._holding = holding
        self._ask = ask
        self._interval_s = interval_s
        self._clock = clock
        self._due_s: OrderedDict[SessionRef, float] = OrderedDict()
        """In order of time."""
        self._asking = False

    def used(self, ref: SessionRef) -> None:
        """The connector has just handled the session's blocks."""
        self._due_s[ref] = self._clock() + self._interval_s
        self._due_s.move_to_end(ref)

    def wanted(self, ref: SessionRef) -> None:
        """The session is to be kept, maybe again after its time was over."""
        if ref not in self._due_s:
            self.used(ref)

    def forget(self, ref: SessionRef) -> None:
        """The session is gone, or gave its blocks up."""
        self._due_s.pop(ref, None)

    def tick(self) -> None:
        """Once a step: ask about the session that waits longest, if it is time."""
        if self._asking or not self._due_s:
            return
        now_s = self._clock()
        ref, due_s = next(iter(self._due_s.items()))
        if due_s > now_s:
            return
        if self._chains.get(ref) is None or self._holding(ref) <= now_s:
            self.forget(ref)
            return
        self.used(ref)
        self._asking = True
        self._ask(ref, self._note)

    def _note(self, blocks: int | None) -> None:
        self._asking = False

    def status(self) -> dict[str, float]:
        """For the operation ``status``: logical blocks of the sessions, how often each is asked
        about, how late that is, and how many a second that makes."""
        chains = (self._chains.get(ref) for ref in self._due_s)
        blocks = sum(len(chain) for chain in chains if chain is not None)
        first_s = next(iter(self._due_s.values()), math.inf)
        return {
            "keys": blocks,
            "interval_s": self._interval_s,
            "behind_s": max(0.0, self._clock() - first_s),
            "keys_per_s": blocks / self._interval_s,
        }
