"""The engine's queue of transfers: sizes and bounds for :class:`spm.work_queue.WorkQueue`.

Scheduler thread only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from connectors.scheduler.session_blocks import SessionBlock
from spm.config import SpmConfig
from spm.operation import Operation
from spm.work import TRANSFERS, WorkClass
from spm.work_queue import ClassLimits, Offer, Work, WorkQueue
from tracker.ids import BlockKey, GroupId, split_block_key

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

MAX_SAVES = 16_384
"""Blocks of requests that wait to be saved; what comes then is not saved."""
MAX_ASKED_FOR = 65_536
"""Blocks that wait to be prefetched, and to be offloaded; what comes then is rejected."""
_MIN_SAVES = 64
_PENDING_OVER_INFLIGHT = 4
_UNBOUNDED = 1 << 62

Owner = Operation | str
"""Who is told of a transfer's end: an operation, or by name a part of the scheduler half."""


@dataclass(frozen=True, slots=True)
class Payload:
    """What is needed to carry a transfer out."""

    place: SessionBlock | None = None
    """Of a prefetch: which block of a session it is."""
    host_only: bool = False
    """A prefetch ends in the host tier."""
    block: "KVCacheBlock | None" = None
    """Of a save: where the content is in the GPU pool; None: in the host tier."""
    published: bytes = b""
    """Hash that ``block`` has as long as the content is there."""


Transfer = Work[Payload, Owner]


class TransferQueue:
    """Loads, prefetches, saves and offloads of one engine."""

    def __init__(self, config: SpmConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._value_bytes: Mapping[GroupId, int] = {}
        self._works = self._make()

    def set_value_bytes(self, value_bytes: Mapping[GroupId, int]) -> None:
        """Largest stored size of a block by group, over ranks. Before any work is offered."""
        self._value_bytes = value_bytes
        self._works = self._make()

    def _make(self) -> WorkQueue[Payload, Owner]:
        saves_bytes = self._config.save_inflight_bytes
        max_saves = MAX_SAVES
        largest = max(self._value_bytes.values(), default=0)
        if largest:  # what waits is bounded by bytes too, or a slow store keeps us busy for hours
            max_saves = max(_MIN_SAVES, _PENDING_OVER_INFLIGHT * saves_bytes // largest)
        limits = {
            WorkClass.LOAD: ClassLimits(1, _UNBOUNDED),
            WorkClass.PREFETCH: ClassLimits(MAX_ASKED_FOR, self._config.prefetch_inflight_bytes),
            WorkClass.SAVE: ClassLimits(min(MAX_SAVES, max_saves), saves_bytes),
            WorkClass.OFFLOAD: ClassLimits(MAX_ASKED_FOR, saves_bytes),
        }
        return WorkQueue(limits, self._config.background_share, self._clock)

    def size_bytes(self, key: BlockKey) -> int:
        """Stored size of a block, at least 1."""
        return max(1, self._value_bytes.get(split_block_key(key)[1], 0))

    def offer(
        self,
        work_class: WorkClass,
        key: BlockKey,
        payload: Payload,
        owner: Owner,
        patience_s: float = float("inf"),
    ) -> Offer:
        """See :meth:`spm.work_queue.WorkQueue.offer`."""
        deadline_s = self._clock() + patience_s
        return self._works.offer(work_class, key, self.size_bytes(key), payload, owner, deadline_s)

    def start_load(self, key: BlockKey, owner: Owner) -> None:
        """A request's load of a block: it does not wait."""
        self._works.start(WorkClass.LOAD, key, self.size_bytes(key), Payload(), owner)

    def cancel(self, owner: Owner) -> list[Transfer]:
        """See :meth:`spm.work_queue.WorkQueue.cancel`."""
        return self._works.cancel(owner)

    @property
    def has_waiting(self) -> bool:
        """Whether anything waits: most steps have nothing to hand out."""
        return self._works.has_waiting

    @property
    def busy(self) -> bool:
        """Whether anything waits or is in flight."""
        return self._works.busy

    def take(self) -> dict[WorkClass, list[Transfer]]:
        """What may start with this step, by class."""
        taken: dict[WorkClass, list[Transfer]] = {}
        for work in self._works.take():
            taken.setdefault(work.work_class, []).append(work)
        return taken

    def done(self, work_class: WorkClass, key: BlockKey) -> Transfer | None:
        """See :meth:`spm.work_queue.WorkQueue.done`."""
        return self._works.done(work_class, key)

    def expire(self) -> list[Transfer]:
        """What has waited too long, dropped."""
        return self._works.expire()

    def drop_waiting(self, work_class: WorkClass) -> list[Transfer]:
        """All that waits in a class, dropped."""
        return self._works.clear_waiting(work_class)

    def is_known(self, work_class: WorkClass, key: BlockKey) -> bool:
        """Whether the same waits or is in flight."""
        works = self._works
        return works.is_waiting(work_class, key) or works.is_in_flight(work_class, key)

    def is_waiting(self, work_class: WorkClass, key: BlockKey) -> bool:
        """Whether the same waits."""
        return self._works.is_waiting(work_class, key)

    def is_in_flight(self, work_class: WorkClass, key: BlockKey) -> bool:
        """Whether the same is on its way."""
        return self._works.is_in_flight(work_class, key)

    def is_busy(self, *classes: WorkClass) -> bool:
        """Whether anything of these waits or is in flight."""
        works = self._works
        return any(works.num_waiting(one) or works.num_inflight(one) for one in classes)

    def status(self) -> dict[str, dict[str, int]]:
        """Sizes by class, for the operation ``status``."""
        works = self._works
        return {
            one.name.lower(): {
                "waiting": works.num_waiting(one),
                "in_flight": works.num_inflight(one),
                "in_flight_bytes": works.inflight_bytes(one),
            }
            for one in TRANSFERS
        }

    def check_integrity(self) -> None:
        """Raise :class:`spm.errors.IntegrityError` if the queue's books are off."""
        self._works.check_integrity()
