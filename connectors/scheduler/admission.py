"""Sessions that resume go first: a request that would displace them waits, for a while.

vLLM admits requests in the order of their arrival. In a closed loop of agents that need more
than the pool, whoever is next takes the blocks of whoever comes after it, so that everybody
finds its blocks gone (the order in which an LRU cache fails on a cycle). Continuum (arXiv
2511.02230) and others admit by program for that reason; here it is a bounded delay of requests
that name a session, by vLLM's own way to say "ask again". Scheduler thread only.
"""

import heapq
import math
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
        self._engine_is_idle = True

    # --- sessions ----------------------------------------------------------------------

    def said(self, ref: SessionRef) -> None:
        """Something was said of an idle session, or its last request has ended."""
        zone, left_s = self._sam.state(ref)
        self._drop(ref)
        if zone is Zone.SOON and left_s > 0:
            until_s = self._clock() + min(left_s, self._soon_s)
            self._reserve(ref, _Reserved(self._sam.own_blocks(ref), until_s))

    def _reserve(self, ref: SessionRef, one: _Reserved) -> None:
        self._reserved[ref] = one
        self.reserved_blocks += one.blocks
        heapq.heappush(self._ends, (one.until_s, next(self._numbers), ref))
        if len(self._ends) > 2 * len(self._reserved) + _STALE:
            self._ends = [
                (kept.until_s, next(self._numbers), whose)
                for whose, kept in self._reserved.items()
                if kept.until_s < math.inf
            ]
            heapq.heapify(self._ends)

    def _drop(self, ref: SessionRef) -> None:
        one = self._reserved.pop(ref, None)
        if one is not None:
            self.reserved_blocks -= one.blocks

    def expire(self) -> None:
        """What is overdue is reserved no longer."""
        now_s = self._clock()
        while self._ends and self._ends[0][0] <= now_s:
            _, _, ref = heapq.heappop(self._ends)
            one = self._reserved.get(ref)
            if one is not None and one.until_s <= now_s:
                self._drop(ref)

    def arrived(self, ref: SessionRef) -> None:
        """The session is back: what it has stays reserved until its request is let in."""
        one = self._reserved.get(ref)
        if one is not None:
            one.until_s = math.inf

    # --- requests ----------------------------------------------------------------------

    def holds(
        self, request: "Request", ref: SessionRef, arrived_s: float, local_tokens: int
    ) -> bool:
        """Whether vLLM is to ask again: the request would need blocks of sessions that are
        expected back soon, and has not waited its time yet."""
        if self.pool is None:
            return False
        self.expire()
        resumes = ref in self._reserved and 2 * local_tokens >= request.num_tokens
        if not resumes:
            self._drop(ref)  # it lost its blocks after all: what is left is not worth waiting for
        if resumes or self._engine_is_idle or self._fits(request, local_tokens):
            self._engine_is_idle = False
            return False
        return self._clock() - arrived_s < self._hold_s

    def _fits(self, request: "Request", local_tokens: int) -> bool:
        """Whether there are blocks for it beside the reserved ones."""
        assert self.pool is not None
        needed = sum(
            -(-request.num_tokens // group.block_tokens) - local_tokens // group.block_tokens
            for group in self._geometry.groups
        )
        return needed <= self.pool.get_num_free_blocks() - self.reserved_blocks

    def admitted(self, ref: SessionRef) -> None:
        """vLLM has given a request of the session its blocks."""
        self._drop(ref)

    def check_integrity(self) -> None:
        """Raise :class:`IntegrityError` if reservations are miscounted."""
        blocks = sum(one.blocks for one in self._reserved.values())
        if blocks != self.reserved_blocks:
            raise IntegrityError(f"{blocks} blocks reserved, {self.reserved_blocks} counted")

    def end_step(self, scheduled_tokens: int) -> None:
        """vLLM has scheduled a step."""
        self._engine_is_idle = scheduled_tokens == 0
