"""Sessions that resume go first: a request that would displace them waits, for a while.

vLLM admits requests in the order of their arrival. In a closed loop of agents that need more
than the pool, whoever is next takes the blocks of whoever comes after it, so that everybody
finds its blocks gone (the order in which an LRU cache fails on a cycle). Continuum (arXiv
2511.02230) and others admit by program for that reason; here it is a bounded delay of requests
that name a session, by vLLM's own way to say "ask again". Scheduler thread only.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from connectors.groups import CacheGeometry
from spm.config import SamConfig
from spm.errors import IntegrityError
from spm.sam.manager import SessionAwareManager
from spm.sam.zones import Zone
from tracker.ids import SessionRef

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

_STALE = 1024
"""Entries of the heap that may be out of date before it is made anew."""


@dataclass(slots=True, eq=False)
class _Reserved:
    """Free blocks of one session that is expected back, or whose request waits already."""

    blocks: int
    until_s: float
    had: int
    """Blocks when it went away, those that it shares with others included."""
    waits: bool = False
    """Its request has come."""


class AdmissionGate:
    """Which requests are let wait. Holds nothing longer than ``sam.resume_first_s``, reserves
    nothing for a session longer than ``sam.soon_s``, and lets everything in while the engine
    has nothing else to do."""

    def __init__(
        self,
        config: SamConfig,
        geometry: CacheGeometry,
        sam: SessionAwareManager,
        clock: Callable[[], float],
    ) -> None:
        self._hold_s = config.resume_first_s
        self._soon_s = config.soon_s
        self._geometry = geometry
        self._sam = sam
        self._clock = clock
        self.pool: BlockPool | None = None
        """vLLM's; None: nothing is held. Set before the first step."""
        self._reserved: dict[SessionRef, _Reserved] = {}
        self.reserved_blocks = 0
        """Of all sessions together."""
        self._ends: list[tuple[float, int, SessionRef]] = []
        """Heap; entries of reservations that are gone or last longer by now are skipped."""
        self._numbers = count()
        self._num_waiting = 0
        """Reservations whose session is back and waits to be let in."""
        self._is_counted = False
        """Whether reservations were counted anew in this step."""
        self._idle_steps = 1
        """Steps since one in which something was scheduled."""

    # --- sessions ----------------------------------------------------------------------

    def said(self, ref: SessionRef) -> None:
        """Something was said of an idle session, or its last request has ended."""
        zone, left_s = self._sam.state(ref)
        self._drop(ref)
        if zone is Zone.SOON and left_s > 0:
            until_s = self._clock() + min(left_s, self._soon_s)
            own, had = self._sam.own_blocks(ref), self._sam.branch_blocks(ref)
            self._reserve(ref, _Reserved(own, until_s, had))

    def _reserve(self, ref: SessionRef, one: _Reserved) -> None:
        self._reserved[ref] = one
        self.reserved_blocks += one.blocks
        self._num_waiting += one.waits
        heapq.heappush(self._ends, (one.until_s, next(self._numbers), ref))
        if len(self._ends) > 2 * len(self._reserved) + _STALE:
            self._ends = [
                (kept.until_s, next(self._numbers), whose) for whose, kept in self._reserved.items()
            ]
            heapq.heapify(self._ends)

    def _drop(self, ref: SessionRef) -> None:
        one = self._reserved.pop(ref, None)
        if one is not None:
            self.reserved_blocks -= one.blocks
            self._num_waiting -= one.waits

    def expire(self) -> None:
        """What is overdue is reserved no longer."""
        now_s = self._clock()
        while self._ends and self._ends[0][0] <= now_s:
            _, _, ref = heapq.heappop(self._ends)
            one = self._reserved.get(ref)
            if one is not None and one.until_s <= now_s:
                self._drop(ref)

    def arrived(self, ref: SessionRef) -> None:
        """The session is back: what it has stays reserved until its request is let in, as long
        as a request waits at most."""
        one = self._reserved.get(ref)
        if one is not None and not one.waits:
            self._drop(ref)
            until_s = self._clock() + self._hold_s
            self._reserve(ref, _Reserved(one.blocks, until_s, one.had, waits=True))

    # --- requests ----------------------------------------------------------------------

    def holds(
        self, request: "Request", ref: SessionRef, arrived_s: float, local_tokens: int
    ) -> bool:
        """Whether vLLM is to ask again: the request would need blocks of sessions that are
        expected back soon, and has not waited its time yet."""
        if self.pool is None:
            return False
        self.expire()
        if self._resumes(ref, local_tokens) or self._has_nothing_else():
            return False
        return not self._fits(request, local_tokens) and self._clock() - arrived_s < self._hold_s

    def _resumes(self, ref: SessionRef, local_tokens: int) -> bool:
        """Whether the session still has most of what it had when it went away. One that lost it
        after all reserves nothing any more: what is left is not worth waiting for."""
        own = self._reserved.get(ref)
        if own is None:
            return False
        groups = self._geometry.groups
        if 2 * sum(local_tokens // group.block_tokens for group in groups) >= own.had:
            return True
        self._drop(ref)
        return False

    def _has_nothing_else(self) -> bool:
        """Whether the engine is idle, and those that resume have had a step to go first."""
        return self._idle_steps > (1 if self._num_waiting else 0)

    def _fits(self, request: "Request", local_tokens: int) -> bool:
        """Whether there are blocks for it beside the reserved ones."""
        assert self.pool is not None
        tokens, needed = request.num_tokens, 0
        for group in self._geometry.groups:
            first = max(local_tokens // group.block_tokens, group.first_needed_block(tokens))
            needed += -(-tokens // group.block_tokens) - first
        free = self.pool.get_num_free_blocks()
        if needed > free - self.reserved_blocks and not self._is_counted:
            self._count_anew()
        return needed <= free - self.reserved_blocks

    def _count_anew(self) -> None:
        """Of what was reserved some may be gone: taken by others, evicted, or the cache was
        reset. At most once a step; O(reservations)."""
        self._is_counted = True
        for ref, one in self._reserved.items():
            blocks = min(one.blocks, self._sam.own_blocks(ref))
            self.reserved_blocks -= one.blocks - blocks
            one.blocks = blocks

    def admitted(self, ref: SessionRef) -> None:
        """vLLM has given a request of the session its blocks."""
        self._drop(ref)
        self._idle_steps = 0

    def check_integrity(self) -> None:
        """Raise :class:`IntegrityError` if reservations are miscounted."""
        blocks = sum(one.blocks for one in self._reserved.values())
        waiting = sum(one.waits for one in self._reserved.values())
        if blocks != self.reserved_blocks or waiting != self._num_waiting:
            raise IntegrityError(f"{blocks} blocks reserved, {self.reserved_blocks} counted")

    def end_step(self, scheduled_tokens: int) -> None:
        """vLLM has scheduled a step."""
        self._is_counted = False
        self._idle_steps = 0 if scheduled_tokens else self._idle_steps + 1
