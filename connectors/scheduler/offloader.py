"""Offloads: blocks are stored, that is confirmed, and only then the GPU's copies are given up.

An offload goes through rounds: save what is not known to be stored, then ask the store about
everything. What it says it does not have is saved once more. Scheduler thread only.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from connectors.scheduler.gpu_pool import GpuPool
from connectors.scheduler.session_blocks import SessionBlock
from connectors.scheduler.transfer_queue import Payload, Transfer, TransferQueue
from spm.agent_hint import BlockRange, Edit
from spm.config import SpmConfig
from spm.errors import IntegrityError
from spm.events import KeysGone, KeysSeen
from spm.manager import SessionAwarePoolingManager
from spm.operation import Operation, Status
from spm.residency import Tier
from spm.sam.manager import SessionAwareManager
from spm.work import WorkClass
from spm.work_queue import Offer
from tracker.ids import BlockKey, SessionRef

_ROUNDS = 2
PATIENCE_S = 120.0
"""After so long in the queue a block is not saved for an offload any more."""

Check = Callable[[int, Sequence[BlockKey]], bool]
"""Ask the store about keys, under a number; False if it cannot be asked now."""


@dataclass(slots=True, eq=False)
class _Offload:
    operation: Operation
    blocks: Sequence[SessionBlock]
    unsaved: set[BlockKey] = field(default_factory=set)
    rounds_left: int = _ROUNDS
    check: int | None = None
    """Number of the question that is open."""
    asked_s: float = 0.0
    in_use: bool = False
    """A request of the session has come: its blocks are not given up."""


class Offloader:
    """All offloads of one engine."""

    def __init__(
        self,
        config: SpmConfig,
        queue: TransferQueue,
        sam: SessionAwareManager,
        manager: SessionAwarePoolingManager,
        scales: Sequence[int],
        check: Check,
        clock: Callable[[], float],
    ) -> None:
        """``scales``: by KV cache group, its blocks in one logical block."""
        self._tier = Tier.HOST if config.remote is None else Tier.REMOTE
        self._queue = queue
        self._sam = sam
        self._manager = manager
        self._scales = scales
        self._check = check
        self._clock = clock
        self.pool: GpuPool | None = None
        """vLLM's pool; set before the first step."""
        self._offloads: dict[Operation, _Offload] = {}
        self._checks: dict[int, _Offload] = {}
        self._numbers = count(1)

    def start(
        self, ref: SessionRef, edit: Edit, blocks: Sequence[SessionBlock], cut: str = ""
    ) -> Operation:
        """Have ``blocks`` stored outside the GPU pool. ``cut``: why they are not all that was
        asked for."""
        operation = Operation(ref, edit, len(blocks))
        operation.cut = cut
        if not blocks:
            return operation.end(Status.NOT_FOUND, "the session has no full block there")
        offload = _Offload(operation, blocks)
        self._offloads[operation] = offload
        self._save(offload)
        return operation

    def _save(self, offload: _Offload) -> None:
        """Queue what is not known to be stored; without anything to wait for, ask at once."""
        offload.rounds_left -= 1
        for one in offload.blocks:
            if self._manager.residency.is_stored(one.key, self._tier):
                continue
            payload = self._source(one.key)
            if payload is None:
                continue
            offer = self._queue.offer(
                WorkClass.OFFLOAD, one.key, payload, offload.operation, PATIENCE_S
            )
            if offer is Offer.REJECTED:
                self._queue.cancel(offload.operation)
                self._end(offload, Status.REJECTED, "too many blocks wait: try again later")
                return
            offload.unsaved.add(one.key)
        if not offload.unsaved:
            self._confirm(offload)

    def _source(self, key: BlockKey) -> Payload | None:
        """Where a block that is not stored yet can be copied from."""
        block = self.pool.find(key) if self.pool is not None else None
        if block is not None and block.block_hash is not None:
            return Payload(block=block, published=bytes(key))
        in_host = self._manager.residency.is_stored(key, Tier.HOST)
        return Payload() if in_host and self._tier is Tier.REMOTE else None

    def transfer_ended(self, work: Transfer) -> None:
        """A save has ended, well or badly, or was given up; what it is worth is asked of the
        store."""
        for owner in work.owners:
            offload = self._offloads.get(owner) if isinstance(owner, Operation) else None
            if offload is not None and work.key in offload.unsaved:
                offload.unsaved.discard(work.key)
                if not offload.unsaved:
                    self._confirm(offload)

    def _confirm(self, offload: _Offload) -> None:
        keys = [one.key for one in offload.blocks]
        if self._tier is Tier.HOST:
            stored = self._manager.residency.is_stored
            self._confirmed(offload, [stored(key, Tier.HOST) for key in keys])
            return
        number = next(self._numbers)
        if not self._check(number, keys):
            self._end(offload, Status.FAILED, "the store cannot be asked now: try again later")
            return
        offload.check, offload.asked_s = number, self._clock()
        self._checks[number] = offload

    def checked(self, number: int, present: Sequence[bool] | None) -> bool:
        """The store's answer; False if the question was not one of ours."""
        offload = self._checks.pop(number, None)
        if offload is None:
            return False
        offload.check = None
        if present is None:
            self._end(offload, Status.FAILED, "the store did not answer: try again later")
        else:
            keys = [one.key for one in offload.blocks]
            there = dict(zip(keys, present, strict=True))
            asked_s = offload.asked_s
            self._manager.handle(KeysSeen([key for key in keys if there[key]], asked_s))
            self._manager.handle(KeysGone([key for key in keys if not there[key]], asked_s))
            self._confirmed(offload, present)
        return True

    def _confirmed(self, offload: _Offload, present: Sequence[bool]) -> None:
        operation = offload.operation
        operation.done_blocks = sum(present)
        again = [
            one
            for one, there in zip(offload.blocks, present, strict=True)
            if not there and self._source(one.key) is not None
        ]
        if again and offload.rounds_left:
            self._save(offload)
            return
        if offload.in_use:
            detail = "stored; the session is in use again, so the GPU's copies stay protected"
        else:
            detail = ""
            self._demote(offload, present)
        if all(present):
            self._end(offload, Status.OK, detail)
        elif any(present):
            self._end(offload, Status.PARTIAL, "the rest is neither stored nor in the GPU pool")
        else:
            self._end(offload, Status.FAILED, "nothing of it could be stored")

    def _demote(self, offload: _Offload, present: Sequence[bool]) -> None:
        """Give up the GPU's copies of the logical blocks that are stored in all groups."""
        ref, edit = offload.operation.ref, offload.operation.edit
        if all(present):
            self._sam.demoted(ref, edit.blocks)
            return
        logical = [one.index // self._scales[one.group] for one in offload.blocks]
        lost = {at for at, there in zip(logical, present, strict=True) if not there}
        for span in _runs(sorted(set(logical) - lost)):
            self._sam.demoted(ref, span)

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
            self._queue.cancel(offload.operation)
            if offload.check is not None:
                del self._checks[offload.check]
            self._end(offload, Status.FAILED, "the session gave its blocks up")

    def cancel_all(self) -> None:
        """The cache was reset."""
        for ref in {operation.ref for operation in self._offloads}:
            self.release(ref)

    def _of(self, ref: SessionRef) -> list[_Offload]:
        return [one for one in self._offloads.values() if one.operation.ref == ref]

    @property
    def is_asking(self) -> bool:
        """Whether the store's answer is being waited for."""
        return bool(self._checks)

    @property
    def operations(self) -> Iterable[Operation]:
        """Those that go on."""
        return self._offloads

    def check_integrity(self, *, idle: bool) -> None:
        """Raise :class:`IntegrityError` if an offload waits for nothing; with ``idle`` also if
        any is left over."""
        stuck = [o for o in self._offloads.values() if not o.unsaved and o.check is None]
        if stuck or any(operation.done for operation in self._offloads):
            raise IntegrityError("an offload waits for nothing")
        if idle and self._offloads:
            raise IntegrityError(f"idle, but {len(self._offloads)} offloads go on")


def _runs(indexes: Sequence[int]) -> list[BlockRange]:
    """Consecutive indexes as half-open ranges."""
    runs: list[BlockRange] = []
    for index in indexes:
        if runs and runs[-1].stop == index:
            runs[-1] = BlockRange(runs[-1].start, index + 1)
        else:
            runs.append(BlockRange(index, index + 1))
    return runs
