"""Loads of prefetches on their way: from blocks that were taken to every rank's answer.

Blocks belong to a job until its last answer, whatever becomes of the prefetch, because workers
may write into them until then. Scheduler thread only.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from connectors.metadata import NO_BLOCK_ID, BlockMove, LoadCommand, LoadFailure, LoadResult
from connectors.scheduler.gpu_pool import GpuPool
from connectors.scheduler.hit_planner import Presence
from connectors.scheduler.transfer_queue import Transfer
from spm.errors import IntegrityError
from spm.sam.restoring import RestoredBlock
from spm.work import WorkClass
from tracker.ids import BlockKey


@dataclass(slots=True, eq=False)
class PrefetchJob:
    """One load, waiting for every rank's answer."""

    job_id: int
    works: Sequence[Transfer]
    block_ids: Sequence[int]
    """Of the pool, in the order of ``works``; NO_BLOCK_ID for the host tier."""
    ranks_left: int
    failed: dict[BlockKey, LoadFailure] = field(default_factory=dict)
    remote_keys: set[BlockKey] = field(default_factory=set)
    """Those that some rank had to ask the remote store for."""
    cancelled: bool = False
    promoted: bool = False

    @property
    def to_gpu(self) -> bool:
        """Whether it fills blocks of the GPU pool: all of it does, or nothing."""
        return self.block_ids[0] != NO_BLOCK_ID

    def arrived(self) -> list[Transfer]:
        """What every rank has, when all have answered."""
        return [w for w in self.works if not self.cancelled and w.key not in self.failed]


class PrefetchJobs:
    """All of one engine."""

    def __init__(self, world_size: int, job_ids: Iterator[int]) -> None:
        self._world_size = world_size
        self._job_ids = job_ids
        self.pool: GpuPool | None = None
        """None: nothing can be put into vLLM's pool; set before the first step."""
        self._jobs: dict[int, PrefetchJob] = {}
        self._filling: dict[BlockKey, int] = {}
        """Keys on their way into the GPU pool, by job."""
        self._cancelled: list[int] = []
        self._promoted: list[int] = []

    def start(self, works: Sequence[Transfer], block_ids: Sequence[int]) -> LoadCommand:
        """Command a load of ``works`` into blocks taken for them, or into the host tier."""
        job = PrefetchJob(next(self._job_ids), works, block_ids, self._world_size)
        self._jobs[job.job_id] = job
        if job.to_gpu:
            self._filling.update((work.key, job.job_id) for work in works)
        moves = [BlockMove(w.key, at) for w, at in zip(works, block_ids, strict=True)]
        return LoadCommand(job.job_id, None, tuple(moves), WorkClass.PREFETCH)

    def take_result(self, result: LoadResult, *, stale: bool) -> PrefetchJob | None:
        """One rank's answer to one of our loads; the job if it was the last. ``stale``: it says
        nothing about the current key space."""
        job = self._jobs[result.job_id]
        job.ranks_left -= 1
        job.failed.update(result.failed)
        job.remote_keys.update(result.remote_keys)
        job.cancelled |= stale
        if job.ranks_left:
            return None
        del self._jobs[result.job_id]
        for work in job.works:
            self._filling.pop(work.key, None)
        return job

    def publish(
        self, job: PrefetchJob, on_published: Callable[[BlockKey], None]
    ) -> list[RestoredBlock]:
        """What arrived becomes ordinary cached blocks, still taken: see :meth:`give_back`."""
        restored: list[RestoredBlock] = []
        if self.pool is None or not job.to_gpu:
            return restored
        block_ids = dict(zip((work.key for work in job.works), job.block_ids, strict=True))
        for work in job.arrived():
            place = work.payload.place
            assert place is not None
            block = self.pool.publish(work.key, block_ids[work.key], place.end_tokens)
            restored.append(RestoredBlock(place.group, place.index, block))
            if block.block_id == block_ids[work.key]:
                on_published(work.key)
        return restored

    def give_back(self, job: PrefetchJob) -> None:
        """The job's blocks are free, published or not."""
        if self.pool is not None and job.to_gpu:
            self.pool.give_back(job.block_ids)

    # --- while they are on their way ---------------------------------------------------

    def cancel_fills(self) -> None:
        """Nothing is to come into the GPU pool any more."""
        self._cancel(job for job in self._jobs.values() if job.to_gpu)

    def cancel_all(self) -> None:
        """Nothing that is on its way may be used."""
        self._cancel(self._jobs.values())

    def _cancel(self, jobs: Iterable[PrefetchJob]) -> None:
        for job in jobs:
            if not job.cancelled:
                job.cancelled = True
                self._cancelled.append(job.job_id)

    def take_cancelled(self) -> list[int]:
        """Jobs that workers are to end at once. They are answered all the same, and only then
        are their blocks free."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def promote(self, keys: Iterable[BlockKey]) -> bool:
        """A request wants these: what of them is on its way is to arrive as soon as if it
        loaded it itself. False if nothing is."""
        wanted = {self._filling[key] for key in keys if key in self._filling}
        for job_id in wanted:
            job = self._jobs[job_id]
            if not job.promoted:
                job.promoted = True
                self._promoted.append(job_id)
        return bool(wanted)

    def take_promoted(self) -> list[int]:
        """Jobs that go with the loads of requests from now on."""
        promoted, self._promoted = self._promoted, []
        return promoted

    # --- questions ---------------------------------------------------------------------

    @property
    def is_filling(self) -> bool:
        """Whether anything is on its way into the GPU pool now."""
        return bool(self._filling)

    def presence(self, key: BlockKey) -> Presence:
        """Whether a request could hit the block in the GPU pool once what is on its way has
        arrived."""
        there = key in self._filling or (self.pool is not None and self.pool.find(key) is not None)
        return Presence.HELD if there else Presence.ABSENT

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._jobs

    def __len__(self) -> int:
        return len(self._jobs)

    def check_integrity(self) -> None:
        """Raise :class:`IntegrityError` if blocks were lost."""
        if self.pool is None:
            return
        self.pool.check_integrity()
        ours = sum(len(job.block_ids) for job in self._jobs.values() if job.to_gpu)
        if ours != self.pool.num_taken:
            raise IntegrityError(f"{self.pool.num_taken} blocks taken, {ours} being filled")
