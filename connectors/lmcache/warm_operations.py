"""Prefetches of sessions into LMCache's host tier, as operations. Scheduler thread only."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from connectors.lmcache.control import MAX_PREFETCH_TOKENS, ServerStatus, WarmRequest
from connectors.lmcache.control_news import WarmEnded
from connectors.lmcache.control_worker import ControlWorker
from connectors.lmcache.session_chunks import chunks_covering
from connectors.wrapping.chains import SessionChain
from spm.agent_hint import BlockRange, Edit
from spm.errors import IntegrityError
from spm.operation import Operation, Status, ended
from tracker.ids import SessionRef

PATIENCE_S = 120.0
"""LMCache has this long for one."""
_LATE_S = 30.0
"""Then no answer is expected any more."""

NoteHost = Callable[[SessionRef, SessionChain, int], None]
"""So many of the chain's logical blocks are in the host tier now."""


@dataclass(slots=True, eq=False)
class _Warming:
    operation: Operation
    chain: SessionChain
    stop: int
    """Logical blocks from the first on that were asked for."""
    give_up_s: float


class WarmOperations:
    """Those of one engine. LMCache finds chunks by their tokens from the first on, so a prefetch
    starts there whatever its range, and reaches to the end of the range's last chunk."""

    def __init__(
        self,
        control: ControlWorker,
        block_tokens: int,
        note_host: NoteHost,
        clock: Callable[[], float],
    ) -> None:
        """``block_tokens``: length of a logical block."""
        self._control = control
        self._block_tokens = block_tokens
        self._note_host = note_host
        self._clock = clock
        self._warming: dict[int, _Warming] = {}
        self._numbers = count(1)

    def start(
        self, ref: SessionRef, edit: Edit, chain: SessionChain, server: ServerStatus
    ) -> Operation:
        """Ask for it; the operation may be over already."""
        span, cut = self._span(server, chain, edit)
        if span is None:
            return ended(ref, edit, Status.NOT_FOUND, cut)
        operation = Operation(ref, edit, span.stop - span.start)
        operation.cut = cut
        number, deadline_s = next(self._numbers), self._clock() + PATIENCE_S
        request = self.request(server, chain, span.stop)
        if not self._control.warm(number, request, deadline_s):
            return operation.end(Status.REJECTED, "too many prefetches wait: try again later")
        self._warming[number] = _Warming(operation, chain, span.stop, deadline_s + _LATE_S)
        return operation

    def _span(
        self, server: ServerStatus, chain: SessionChain, edit: Edit
    ) -> tuple[BlockRange | None, str]:
        """What of a range is in whole chunks, and why that is not all; None: nothing."""
        length, size = len(chain), server.chunk_tokens
        tokens = min(len(chain.tokens), MAX_PREFETCH_TOKENS) // size * size
        span = edit.blocks if edit.blocks is not None else BlockRange(0, length)
        stop = min(span.stop, tokens // self._block_tokens)
        cut = ""
        if span.stop > length:
            cut = f"the session has {length} logical blocks"
        elif span.stop > stop:
            cut = f"LMCache stores whole chunks of {size} tokens only"
        return (BlockRange(span.start, stop) if span.start < stop else None), cut

    def request(self, server: ServerStatus, chain: SessionChain, stop: int) -> WarmRequest:
        """For the chunks of the chain's first ``stop`` logical blocks."""
        size = server.chunk_tokens
        chunks = chunks_covering(stop, self._block_tokens, size)
        limit = min(len(chain.tokens), MAX_PREFETCH_TOKENS) // size
        return WarmRequest(chain.tokens, min(chunks, limit) * size, chain.cache_salt or "")

    def ended(self, news: WarmEnded) -> None:
        """The control worker's answer."""
        warming, result = self._warming.get(news.number), news.result
        if warming is None:
            return
        operation = warming.operation
        if result is None:
            self._end(news.number, Status.FAILED, news.detail)
        elif not result.found:
            self._end(news.number, Status.NOT_FOUND, "LMCache has nothing of it")
        elif result.found < result.total:
            operation.done_blocks = operation.blocks * result.found // result.total
            detail = f"LMCache has {result.found} of {result.total} objects"
            self._end(news.number, Status.PARTIAL, detail)
        else:
            operation.done_blocks = operation.blocks
            self._note_host(operation.ref, warming.chain, warming.stop)
            self._end(news.number, Status.OK)

    def release(self, ref: SessionRef) -> None:
        """The session has ended, or gave its blocks up."""
        for number, warming in list(self._warming.items()):
            if warming.operation.ref == ref:
                self._end(number, Status.FAILED, "the session gave its blocks up")

    def cancel_all(self) -> None:
        """The cache was reset."""
        for number in list(self._warming):
            self._end(number, Status.FAILED, "the cache was reset")

    def tick(self) -> None:
        """Once a step: nobody waits for ever."""
        if not self._warming:
            return
        now_s = self._clock()
        for number in [at for at, one in self._warming.items() if one.give_up_s <= now_s]:
            self._end(number, Status.FAILED, "no answer from LMCache's control API")

    def _end(self, number: int, status: Status, detail: str = "") -> None:
        self._control.forget(number)
        self._warming.pop(number).operation.end(status, detail)

    @property
    def pending(self) -> bool:
        """Whether any goes on."""
        return bool(self._warming)

    def check_integrity(self, *, idle: bool) -> None:
        """Raise :class:`IntegrityError` if one is over and still here; with ``idle`` also if
        any is left over."""
        if any(one.operation.done for one in self._warming.values()):
            raise IntegrityError("a prefetch into the host tier is over and still waited for")
        if idle and self._warming:
            raise IntegrityError(f"idle, but {len(self._warming)} prefetches go on")
