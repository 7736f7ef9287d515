"""The one scheduler of store work: what waits, what may start now, what is under way.

Pure and synchronous, no I/O; owned by the scheduler thread. It hands work out and is told of
its end; doing it is the caller's business.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Generic

from spm.errors import IntegrityError
from spm.work import WorkClass
from spm.work_in_flight import NO_DEADLINE_S, ClassLimits, O, T, Work, WorkInFlight, find_alike
from tracker.ids import BlockKey
from tracker.ttl_wheel import TtlWheel

__all__ = ["NO_DEADLINE_S", "ClassLimits", "Offer", "Work", "WorkQueue"]


class Offer(Enum):
    """What became of an offer."""

    ACCEPTED = "accepted"
    COALESCED = "coalesced"
    """The same is waiting or in flight already; the owner was added to it."""
    REJECTED = "rejected"
    """The class is full; nothing changed."""


class WorkQueue(Generic[T, O]):
    """Bounded queue with strict classes: lower :class:`WorkClass` first, then first come.

    Two pieces of work are the same if they do the same to the same key: LOAD and PREFETCH
    bring it in, SAVE and OFFLOAD copy it out, KEEP_ALIVE and DELETE stand alone. The same
    never waits twice, and does not wait while it is in flight.

    What holds a piece of work back, and for how long:

    - Its class's ``max_inflight_bytes``. One entry is always let through when nothing of the
      class is in flight, however large. A class at this bound holds nobody else back, so
      without a LOAD in flight no class starves: each has its own bytes.
    - While a LOAD is in flight, all other classes together start something only if they then
      have at most ``background_share`` of the bytes in flight, or it is their only entry. What
      this bound holds back holds back everything after it, small entries too: lower classes
      cannot keep it waiting for longer than what they have in flight. Under loads that never
      pause, a lower class may wait as long as higher background classes have work: that is
      what strict means. Deadlines and ``max_waiting`` turn such waiting into an answer.

    ``T`` is the payload, which the queue does not look at; ``O`` stands for who wants the work:
    an operation, a request, None for nobody in particular. Owners are not bounded here, their
    number is the caller's. Every method is O(1) or O(keys given and works returned), except
    ``expire`` and ``check_integrity``.
    """

    def __init__(
        self,
        limits: Mapping[WorkClass, ClassLimits],
        background_share: float,
        clock: Callable[[], float],
    ) -> None:
        """``limits`` names the classes that may wait; for others :meth:`offer` and
        :meth:`promote` raise KeyError. ``clock`` gives monotonic seconds.

        Raises ValueError if ``background_share`` is not from 0 to 1.
        """
        self._limits = dict(limits)
        self._clock = clock
        self._waiting: dict[WorkClass, OrderedDict[BlockKey, Work[T, O]]] = {
            work_class: OrderedDict() for work_class in WorkClass
        }
        self._flight: WorkInFlight[T, O] = WorkInFlight(self._limits, background_share)
        self._owned: dict[O, dict[Work[T, O], None]] = {}
        self._deadlines: TtlWheel[Work[T, O]] = TtlWheel(clock)

    def offer(
        self,
        work_class: WorkClass,
        key: BlockKey,
        size_bytes: int,
        payload: T,
        owner: O,
        deadline_s: float = NO_DEADLINE_S,
    ) -> Offer:
        """Let work wait for its turn.

        If the same waits already: it moves to the stronger of both classes (if that has room),
        the later deadline and the newest size and payload hold. If it is in flight, nothing
        but its owners changes. Raises ValueError for a size that is not positive (work on
        keys only has size 1, say, which makes the byte bound one of entries) and for a
        deadline that is no time.
        """
        max_waiting = self._limits[work_class].max_waiting
        _check_size(size_bytes)
        if not deadline_s > -NO_DEADLINE_S:
            raise ValueError(f"deadline_s must be a time, got {deadline_s}")
        running = find_alike(self._flight.works, work_class, key)
        if running is not None:
            self._own(running, owner)
            return Offer.COALESCED
        work = find_alike(self._waiting, work_class, key)
        if work is not None:
            work.size_bytes, work.payload = size_bytes, payload
            self._set_deadline(work, max(work.deadline_s, deadline_s))
            self._own(work, owner)
            self._move_up(work, work_class)
            return Offer.COALESCED
        if len(self._waiting[work_class]) >= max_waiting:
            return Offer.REJECTED
        work = Work(work_class, key, size_bytes, payload)
        self._waiting[work_class][key] = work
        self._set_deadline(work, deadline_s)
        self._own(work, owner)
        return Offer.ACCEPTED

    def start(
        self, work_class: WorkClass, key: BlockKey, size_bytes: int, payload: T, owner: O
    ) -> Work[T, O]:
        """Count work that cannot wait, such as a request's load, as in flight now; no bound
        holds it back.

        If the same waits, this takes its place and its owners with it. If it is in flight
        under this class, it is so once more, with the size it had, and needs one more
        :meth:`done`; if under another class, the two are apart. ValueError as in offer.
        """
        _check_size(size_bytes)
        work = self._flight.works[work_class].get(key)
        waiting = find_alike(self._waiting, work_class, key)
        if waiting is not None:
            self._drop_waiting(waiting)
            waiting.work_class, waiting.size_bytes, waiting.payload = (
                work_class,
                size_bytes,
                payload,
            )
            work = waiting
        elif work is None:
            work = Work(work_class, key, size_bytes, payload)
        self._own(work, owner)
        self._flight.begin(work)
        return work

    def cancel(self, owner: O) -> list[Work[T, O]]:
        """``owner`` wants nothing any more. Drops and returns what waits for nobody now; what
        is in flight stays so, and its end is told to those who are left."""
        dropped = []
        for work in self._owned.pop(owner, {}):
            work.owners.discard(owner)
            if not work.owners and not work.transfers:
                self._drop_waiting(work)
                dropped.append(work)
        return dropped

    def promote(self, keys: Iterable[BlockKey], work_class: WorkClass) -> int:
        """Move waiting work of weaker classes that does the same up to the end of
        ``work_class``, as long as that has room; returns how many moved."""
        moved = 0
        for key in keys:
            work = find_alike(self._waiting, work_class, key)
            if work is not None and self._move_up(work, work_class):
                moved += 1
        return moved

    def take(self) -> list[Work[T, O]]:
        """Hand out what may start now, in order; it counts as in flight until :meth:`done`.

        Does not look at deadlines: call :meth:`expire` first.
        """
        taken: list[Work[T, O]] = []
        for waiting in self._waiting.values():  # in the order of the classes
            while waiting:
                work = next(iter(waiting.values()))
                if not self._flight.class_allows(work):
                    break
                if not self._flight.share_allows(work):
                    return taken
                self._drop_waiting(work)
                self._flight.begin(work)
                taken.append(work)
        return taken

    def done(self, work_class: WorkClass, key: BlockKey) -> Work[T, O] | None:
        """One transfer of this class has ended, well or not.

        Returns the work, with those who want to know, if that was its last transfer; None if
        another one goes on or none is known.
        """
        work = self._flight.works[work_class].get(key)
        if work is None or not self._flight.end(work):
            return None
        self._disown(work)
        return work

    def expire(self) -> list[Work[T, O]]:
        """Drop and return waiting work whose deadline has passed, within a second of it.

        Costs a look at each second since the last call, at most an hour's.
        """
        expired = self._deadlines.advance()
        for work in expired:
            self._drop_waiting(work)
            self._disown(work)
        return expired

    def clear_waiting(self, work_class: WorkClass) -> list[Work[T, O]]:
        """Drop and return all that waits in this class."""
        cleared = list(self._waiting[work_class].values())
        for work in cleared:
            self._drop_waiting(work)
            self._disown(work)
        return cleared

    def is_waiting(self, work_class: WorkClass, key: BlockKey) -> bool:
        """Whether work that does the same to ``key`` as ``work_class`` waits."""
        return find_alike(self._waiting, work_class, key) is not None

    def is_in_flight(self, work_class: WorkClass, key: BlockKey) -> bool:
        """Whether work that does the same to ``key`` as ``work_class`` is in flight."""
        return find_alike(self._flight.works, work_class, key) is not None

    def num_waiting(self, work_class: WorkClass) -> int:
        return len(self._waiting[work_class])

    def num_inflight(self, work_class: WorkClass) -> int:
        """Transfers in flight."""
        return self._flight.transfers[work_class]

    def inflight_bytes(self, work_class: WorkClass) -> int:
        return self._flight.size_bytes[work_class]

    @property
    def has_waiting(self) -> bool:
        """Whether anything waits."""
        return any(self._waiting.values())

    @property
    def busy(self) -> bool:
        """Whether anything waits or is in flight."""
        return bool(self._flight.total_bytes) or any(self._waiting.values())

    def check_integrity(self) -> None:
        """Re-derive every index. O(entries). Raises :class:`spm.errors.IntegrityError`."""
        self._flight.check_integrity()
        self._deadlines.check_integrity()
        known = [work for works in self._flight.works.values() for work in works.values()]
        for work_class, waiting in self._waiting.items():
            if waiting and len(waiting) > self._limits[work_class].max_waiting:
                raise IntegrityError(f"{len(waiting)} entries of {work_class.name} wait")
            for key, work in waiting.items():
                if (work.work_class, work.key, work.transfers) != (work_class, key, 0):
                    raise IntegrityError(f"{work_class.name}: waiting work is in the wrong place")
                if self.is_in_flight(work_class, key):
                    raise IntegrityError(f"{work_class.name}: work waits and is in flight")
                if (work in self._deadlines) != (work.deadline_s < NO_DEADLINE_S):
                    raise IntegrityError(f"{work_class.name}: a deadline is lost or left over")
            known += waiting.values()
        owned = {(owner, work) for owner, works in self._owned.items() for work in works}
        if owned != {(owner, work) for work in known for owner in work.owners}:
            raise IntegrityError("works and their owners do not agree")
        if not all(self._owned.values()):
            raise IntegrityError("an owner of nothing is remembered")
        if len(self._deadlines) > sum(map(len, self._waiting.values())):
            raise IntegrityError("a deadline is kept for work that does not wait")

    def _own(self, work: Work[T, O], owner: O) -> None:
        work.owners.add(owner)
        self._owned.setdefault(owner, {})[work] = None

    def _disown(self, work: Work[T, O]) -> None:
        """Forget who owns it; ``work.owners`` stays for the caller to read."""
        for owner in work.owners:
            works = self._owned[owner]
            del works[work]
            if not works:
                del self._owned[owner]

    def _set_deadline(self, work: Work[T, O], deadline_s: float) -> None:
        work.deadline_s = deadline_s
        if deadline_s == NO_DEADLINE_S:
            self._deadlines.remove(work)
        else:
            self._deadlines.register(work, deadline_s - self._clock())

    def _move_up(self, work: Work[T, O], work_class: WorkClass) -> bool:
        waiting = self._waiting[work_class]
        if work_class >= work.work_class or len(waiting) >= self._limits[work_class].max_waiting:
            return False
        del self._waiting[work.work_class][work.key]
        work.work_class = work_class
        waiting[work.key] = work
        return True

    def _drop_waiting(self, work: Work[T, O]) -> None:
        del self._waiting[work.work_class][work.key]
        self._deadlines.remove(work)


def _check_size(size_bytes: int) -> None:
    if size_bytes < 1:
        raise ValueError(f"size_bytes must be positive, got {size_bytes}")
