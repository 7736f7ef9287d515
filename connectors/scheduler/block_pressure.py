"""Requests that go without blocks: who is waiting for some, and who has to let others pass.

Scheduler thread only; reads vLLM's pool and requests.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from connectors.groups import CacheGeometry
from connectors.scheduler.records import RequestRecord

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request


_RESUMING = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class BlockPressure:
    """Between vLLM's question about a request and the blocks it gives it."""

    def __init__(self, geometry: CacheGeometry, records: Mapping[str, RequestRecord]) -> None:
        """``records``: all requests there are, by id; read only."""
        self._geometry = geometry
        self._records = records
        self.pool: BlockPool | None = None
        """Set before the first step."""
        self._asked: dict[str, Request] = {}
        """Requests vLLM has asked about in this step and given no blocks yet."""

    def asked(self, request: "Request") -> None:
        """vLLM is about to look for blocks for the request."""
        self._asked[request.request_id] = request

    def served(self, request_id: str) -> None:
        """It has got them, or is gone."""
        self._asked.pop(request_id, None)

    def end_step(self, preempted: Iterable[str] | None, *, matters: bool) -> bool:
        """Whether requests went without blocks in this step because too few are free; looked
        at only if that ``matters``.

        Blocks a request hits are counted as needed: those that are free are taken too.
        """
        asked, self._asked = list(self._asked.values()), {}
        if not matters:
            return False
        if preempted:
            return True
        # Those whose load has ended are not asked about again.
        asked += [
            record.request
            for record in self._records.values()
            if record.request.status in _RESUMING and record.request.num_computed_tokens
        ]
        return any(not self._fits(request) for request in asked)

    def lets_others_pass(self, request: "Request") -> bool:
        """Whether a request whose load has failed has to wait for others' to be taken in.

        It needs all its blocks anew. If they are not free, vLLM looks no further in its queue,
        and requests behind it whose loads have ended would hold their blocks for ever.
        """
        return not self._fits(request) and any(
            other.loaded
            and other.request is not request
            and other.request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            for other in self._records.values()
        )

    def _fits(self, request: "Request") -> bool:
        assert self.pool is not None
        groups = self._geometry.groups
        held = request.num_computed_tokens
        needed = sum(
            -(-request.num_tokens // group.block_tokens) - held // group.block_tokens
            for group in groups
        )
        return needed <= self.pool.get_num_free_blocks()
