"""Batches that wait for a load thread: strictly by class of work, then in order of arrival.

A load for a waiting request is so delayed by at most the batches being read already, one a
thread. A job's batches can be dropped at once, so that loads which were given up take no
room, however slow the store is.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from connectors.metadata import BlockMove
from connectors.worker.load_job import LoadJob
from spm.keys import KeySpace
from spm.work import WorkClass


@dataclass(frozen=True, slots=True)
class Batch:
    """What is read in one round trip."""

    job: LoadJob
    moves: Sequence[BlockMove]
    key_space: KeySpace


class BatchQueue:
    """``put``, ``drop``, ``promote`` and ``close`` belong to the worker's main thread, ``take`` and
    ``done`` to the load threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[WorkClass, OrderedDict[LoadJob, deque[Batch]]] = {
            work: OrderedDict() for work in sorted(WorkClass)
        }
        self._num_taken = 0
        self._closed = False

    def put(self, job: LoadJob, batches: Sequence[Batch]) -> None:
        """All batches of one job, at least one. They are taken in this order."""
        with self._changed:
            self._waiting[job.work][job] = deque(batches)
            self._changed.notify_all()

    def drop(self, job: LoadJob) -> None:
        """Forget what still waits of a job; batches that were taken go on."""
        with self._changed:
            self._waiting[job.work].pop(job, None)
            self._changed.notify_all()

    def promote(self, job: LoadJob) -> None:
        """A request waits for the job by now: what still waits of it goes with the loads."""
        with self._changed:
            batches = self._waiting[job.work].pop(job, None)
            job.work = WorkClass.LOAD
            if batches:
                self._waiting[job.work][job] = batches

    def take(self) -> Batch | None:
        """Wait for the next batch, to be followed by :meth:`done`; ``None``: closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or any(self._waiting.values()))
            if self._closed:
                return None
            jobs = next(jobs for jobs in self._waiting.values() if jobs)
            job, batches = next(iter(jobs.items()))
            batch = batches.popleft()
            if not batches:
                del jobs[job]
            self._num_taken += 1
            return batch

    def done(self) -> None:
        """A batch that was taken is finished with."""
        with self._changed:
            self._num_taken -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Forget everything that waits; from now on :meth:`take` answers ``None`` at once."""
        with self._changed:
            self._closed = True
            for jobs in self._waiting.values():
                jobs.clear()
            self._changed.notify_all()

    def wait_until_empty(self, patience_s: float) -> int:
        """Batches that wait or are being read, after waiting up to ``patience_s`` seconds
        for there to be none."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_open, patience_s)
            return self._num_open

    @property
    def _num_open(self) -> int:
        """Lock held."""
        waiting = (len(batches) for jobs in self._waiting.values() for batches in jobs.values())
        return self._num_taken + sum(waiting)
