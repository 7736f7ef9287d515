"""Offloads over a wrapped connector, which saves what it wants when it wants: what is found to
be stored is given up by the GPU pool, and nothing else. Scheduler thread only.
"""

from collections.abc import Callable
from dataclasses import dataclass

from connectors.wrapping.chains import SessionChain
from spm.agent_hint import BlockRange, Edit
from spm.errors import IntegrityError
from spm.operation import Operation, Status
from spm.sam.manager import SessionAwareManager
from tracker.ids import SessionRef

_PAUSES_S = (0.1, 0.3, 1.0)
"""Between questions, while saves of the session may be under way."""

Confirm = Callable[
    [SessionRef, SessionChain, int, Callable[[int | None], None]], Callable[[], None]
]
"""As :meth:`connectors.wrapping.pooling.WrappedPooling.confirm`."""


@dataclass(slots=True, eq=False)
class _Offload:
    operation: Operation
    chain: SessionChain
    span: BlockRange
    rounds: int = 0
    """That were answered."""
    again_s: float | None = None
    """When to ask next; None: a question is open."""
    withdraw: Callable[[], None] | None = None
    in_use: bool = False
    """A request of the session has come: its blocks are not given up."""


class WrappedOffloads:
    """Those of one engine."""

    def __init__(
        self, confirm: Confirm, sam: SessionAwareManager, clock: Callable[[], float]
    ) -> None:
        self._confirm = confirm
        self._sam = sam
        self._clock = clock
        self._offloads: dict[Operation, _Offload] = {}

    def start(
        self, ref: SessionRef, edit: Edit, chain: SessionChain, span: BlockRange, cut: str
    ) -> Operation:
        """Find out how much of a range is stored. ``cut``: why it is not all that was asked
        for."""
        operation = Operation(ref, edit, span.stop - span.start)
        operation.cut = cut
        offload = _Offload(operation, chain, span)
        self._offloads[operation] = offload
        self._ask(offload)
        return operation

    def _ask(self, offload: _Offload) -> None:
        offload.again_s = None
        operation = offload.operation
        withdraw = self._confirm(
            operation.ref,
            offload.chain,
            offload.span.stop,
            lambda blocks: self._answered(offload, blocks),
        )
        if not operation.done and offload.again_s is None:  # else it was answered at once
            offload.withdraw = withdraw

    def _answered(self, offload: _Offload, blocks: int | None) -> None:
        offload.withdraw = None
        if blocks is None:
            detail = "the connector could not say what it has: try again later"
            self._end(offload, Status.FAILED, detail)
            return
        operation, span = offload.operation, offload.span
        operation.done_blocks = max(0, min(blocks, span.stop) - span.start)
        if operation.done_blocks < operation.blocks and offload.rounds < len(_PAUSES_S):
            offload.again_s = self._clock() + _PAUSES_S[offload.rounds]
            offload.rounds += 1
            return
        self._confirmed(offload)

    def _confirmed(self, offload: _Offload) -> None:
        operation, span = offload.operation, offload.span
        done, detail = operation.done_blocks, ""
        if offload.in_use:
            detail = "stored; the session is in use again, so the GPU's copies stay protected"
        elif done == operation.blocks:
            self._sam.demoted(operation.ref, operation.edit.blocks)
        elif done:
            self._sam.demoted(operation.ref, BlockRange(span.start, span.start + done))
        if done == operation.blocks:
            self._end(offload, Status.OK, detail)
        elif done:
            self._end(offload, Status.PARTIAL, "the connector has not stored the rest")
        else:
            self._end(offload, Status.FAILED, "the connector has stored nothing of it")

    def tick(self) -> None:
        """Once a step: ask again."""
        if not self._offloads:
            return
        now_s = self._clock()
        for offload in list(self._offloads.values()):
            if offload.again_s is not None and offload.again_s <= now_s:
                self._ask(offload)

    def _end(self, offload: _Offload, status: Status, detail: str) -> None:
        del self._offloads[offload.operation]
        offload.operation.end(status, detail)

    def request_arrived(self, ref: SessionRef) -> None:
        """The session is in use: what is stored is stored, and nothing is given up."""
        for offload in self._of(ref):
            offload.in_use = True

    def release(self, ref: SessionRef) -> None:
        """The session has ended, or gave its blocks up."""
        for offload in self._of(ref):
            self._cancel(offload, "the session gave its blocks up")

    def cancel_all(self) -> None:
        """The cache was reset."""
        for offload in list(self._offloads.values()):
            self._cancel(offload, "the cache was reset")

    def _cancel(self, offload: _Offload, detail: str) -> None:
        if offload.withdraw is not None:
            offload.withdraw()
        self._end(offload, Status.FAILED, detail)

    def _of(self, ref: SessionRef) -> list[_Offload]:
        return [one for one in self._offloads.values() if one.operation.ref == ref]

    @property
    def pending(self) -> bool:
        """Whether any goes on."""
        return bool(self._offloads)

    def check_integrity(self, *, idle: bool) -> None:
        """Raise :class:`IntegrityError` if one waits for nothing; with ``idle`` also if any is
        left over."""
        stuck = [o for o in self._offloads.values() if o.again_s is None and o.withdraw is None]
        if stuck or any(operation.done for operation in self._offloads):
            raise IntegrityError("an offload waits for nothing")
        if idle and self._offloads:
            raise IntegrityError(f"idle, but {len(self._offloads)} offloads go on")
