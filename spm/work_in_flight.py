"""Store work under way, counted against the bounds that keep it from being in anybody's way.

A part of :class:`spm.work_queue.WorkQueue`, and like it pure and on the scheduler thread.
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from spm.errors import IntegrityError
from spm.work import WorkClass
from tracker.ids import BlockKey

T = TypeVar("T")
O = TypeVar("O", bound=Hashable)  # noqa: E741

NO_DEADLINE_S = float("inf")

_INWARD = (WorkClass.LOAD, WorkClass.PREFETCH)
_OUTWARD = (WorkClass.SAVE, WorkClass.OFFLOAD)
_ALIKE = {
    **dict.fromkeys(_INWARD, _INWARD),
    **dict.fromkeys(_OUTWARD, _OUTWARD),
    WorkClass.KEEP_ALIVE: (WorkClass.KEEP_ALIVE,),
    WorkClass.DELETE: (WorkClass.DELETE,),
}
"""Classes that do the same to a key, so that one piece of work serves them all."""


@dataclass(frozen=True, slots=True)
class ClassLimits:
    """Bounds of one class: entries waiting, bytes in flight. Raises ValueError if not positive."""

    max_waiting: int
    max_inflight_bytes: int

    def __post_init__(self) -> None:
        if self.max_waiting < 1 or self.max_inflight_bytes < 1:
            raise ValueError(f"limits must be positive: {self}")


@dataclass(slots=True, eq=False)
class Work(Generic[T, O]):
    """One piece of work. While a queue knows it, only the queue changes it.

    ``deadline_s`` (monotonic) is about waiting only. ``owners`` want to be told of its end.
    ``transfers`` is how often it is in flight: 0 while it waits, else mostly 1.
    """

    work_class: WorkClass
    key: BlockKey
    size_bytes: int
    payload: T
    deadline_s: float = NO_DEADLINE_S
    owners: set[O] = field(default_factory=set)
    transfers: int = 0


def find_alike(
    places: Mapping[WorkClass, Mapping[BlockKey, Work[T, O]]], work_class: WorkClass, key: BlockKey
) -> Work[T, O] | None:
    """Work that does the same to ``key`` as ``work_class``, the strongest class first."""
    for alike in _ALIKE[work_class]:
        work = places[alike].get(key)
        if work is not None:
            return work
    return None


class WorkInFlight(Generic[T, O]):
    """What is in flight by class and key, its bytes, and what may still join it."""

    def __init__(self, limits: Mapping[WorkClass, ClassLimits], background_share: float) -> None:
        """Raises ValueError if ``background_share`` is not from 0 to 1."""
        if not 0.0 <= background_share <= 1.0:
            raise ValueError(f"background_share must be from 0 to 1, got {background_share}")
        self._limits = limits
        self._background_share = background_share
        self.works: dict[WorkClass, dict[BlockKey, Work[T, O]]] = {
            work_class: {} for work_class in WorkClass
        }
        """To read only."""
        self.size_bytes: Counter[WorkClass] = Counter()
        self.transfers: Counter[WorkClass] = Counter()
        self.total_bytes = 0

    def begin(self, work: Work[T, O]) -> None:
        """Count one transfer more of this work."""
        self.works[work.work_class][work.key] = work
        self._count(work, 1)

    def end(self, work: Work[T, O]) -> bool:
        """Count one transfer less; whether it was the last."""
        self._count(work, -1)
        if work.transfers:
            return False
        del self.works[work.work_class][work.key]
        return True

    def class_allows(self, work: Work[T, O]) -> bool:
        """Whether ``work`` keeps its class's bound; the only one of a class always does."""
        in_flight_bytes = self.size_bytes[work.work_class]
        after_bytes = in_flight_bytes + work.size_bytes
        limit_bytes = self._limits[work.work_class].max_inflight_bytes
        return not in_flight_bytes or after_bytes <= limit_bytes

    def share_allows(self, work: Work[T, O]) -> bool:
        """Whether ``work`` keeps the share that background classes have beside loads."""
        load_bytes = self.size_bytes[WorkClass.LOAD]
        background_bytes = self.total_bytes - load_bytes
        if work.work_class is WorkClass.LOAD or not load_bytes or not background_bytes:
            return True
        after_bytes = self.total_bytes + work.size_bytes
        return background_bytes + work.size_bytes <= self._background_share * after_bytes

    def _count(self, work: Work[T, O], transfers: int) -> None:
        size_bytes = transfers * work.size_bytes
        work.transfers += transfers
        self.transfers[work.work_class] += transfers
        self.size_bytes[work.work_class] += size_bytes
        self.total_bytes += size_bytes

    def check_integrity(self) -> None:
        """Re-derive every count. O(entries). Raises :class:`spm.errors.IntegrityError`."""
        for work_class, works in self.works.items():
            for key, work in works.items():
                if (work.work_class, work.key) != (work_class, key) or work.transfers < 1:
                    raise IntegrityError(f"{work_class.name}: work in flight is in the wrong place")
            transfers = sum(work.transfers for work in works.values())
            size_bytes = sum(work.transfers * work.size_bytes for work in works.values())
            if (self.transfers[work_class], self.size_bytes[work_class]) != (transfers, size_bytes):
                raise IntegrityError(f"{work_class.name}: counts of what is in flight are off")
        if self.total_bytes != self.size_bytes.total():
            raise IntegrityError(f"{self.total_bytes} bytes in flight are not the classes' sum")
