"""Prefetches: a session's missing blocks are loaded into free blocks before it resumes.

Blocks are taken from the pool only in the step in which the load is commanded, a batch at a
time, and become ordinary cached blocks the moment they arrive. So inference never waits for
more than what is in flight, and what did arrive is a usable prefix whatever happens to the
rest. Scheduler thread only.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from connectors.metadata import NO_BLOCK_ID, LoadCommand, LoadFailure, LoadResult
from connectors.scheduler.gpu_pool import GpuPool
from connectors.scheduler.pool_room import PoolRoom
from connectors.scheduler.prefetch_jobs import PrefetchJob, PrefetchJobs
from connectors.scheduler.session_blocks import SessionBlock
from connectors.scheduler.transfer_queue import Payload, Transfer, TransferQueue
from spm.agent_hint import Edit, PrefetchTarget
from spm.config import SpmConfig
from spm.errors import IntegrityError
from spm.events import BlocksLoaded
from spm.manager import SessionAwarePoolingManager
from spm.metrics import Counters, Metric
from spm.operation import Operation, Status
from spm.residency import Tier
from spm.sam.manager import SessionAwareManager
from spm.sam.restoring import RestoredBlock
from spm.work import WorkClass
from spm.work_queue import Offer
from tracker.ids import BlockKey, SessionRef

PATIENCE_S = 60.0
"""After so long in the queue a block is not worth prefetching any more."""


@dataclass(slots=True, eq=False)
class _Prefetch:
    """One operation. Its blocks wait in the queue, are in flight, or are through."""

    operation: Operation
    left: set[BlockKey]
    room: int
    """Blocks of the pool it may still take."""
    asked_s: float
    handed_out: bool = False
    why: Status = Status.NOT_FOUND
    """What it ends as if nothing at all arrives."""
    to_gpu: bool = False
    """Some of it is to go into the GPU pool."""
    diverted: bool = False
    """Some of it went, or would have to go, where it was not asked for."""
    detail: str = ""


class Prefetcher:
    """All prefetches of one engine."""

    def __init__(
        self,
        config: SpmConfig,
        queue: TransferQueue,
        sam: SessionAwareManager,
        manager: SessionAwarePoolingManager,
        world_size: int,
        job_ids: Iterator[int],
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._queue = queue
        self._sam = sam
        self._room = PoolRoom(config.prefetch_reserve_share, sam)
        self._manager = manager
        self._residency = manager.residency
        self._counters = counters
        self._clock = clock
        self.on_published: Callable[[BlockKey, SessionRef | None], None] = lambda key, ref: None
        """Told of every block put into the GPU pool, and for whom; set before the first step."""
        self._prefetches: dict[Operation, _Prefetch] = {}
        self.jobs = PrefetchJobs(world_size, job_ids)

    @property
    def _pool(self) -> GpuPool | None:
        return self.jobs.pool

    # --- asking ------------------------------------------------------------------------

    def start(
        self, ref: SessionRef, edit: Edit, blocks: Sequence[SessionBlock], cut: str = ""
    ) -> Operation:
        """Bring ``blocks``, in prefix order, as near as was asked for. What is in the GPU pool
        already is protected at once. ``cut``: why they are not all that was asked for."""
        operation = Operation(ref, edit, len(blocks))
        operation.cut = cut
        to_gpu = edit.target is PrefetchTarget.GPU and self._pool is not None
        if to_gpu:
            blocks = self._protect_present(operation, blocks)
        missing = [one for one in blocks if to_gpu or not self._in_host(one.key)]
        operation.done_blocks += len(blocks) - len(missing)
        if not missing:
            return operation.end(Status.OK)
        room = self._offered(len(missing)) if to_gpu else 0
        prefetch = _Prefetch(operation, set(), room, self._clock())
        self._enqueue(prefetch, missing)
        return operation

    def _protect_present(
        self, operation: Operation, blocks: Sequence[SessionBlock]
    ) -> list[SessionBlock]:
        """What the pool still has is claimed, so that it stays; returns the others."""
        assert self._pool is not None
        present, missing = [], []
        for one in blocks:
            block = self._pool.find(one.key)
            if block is not None:
                present.append(RestoredBlock(one.group, one.index, block))
            else:
                missing.append(one)
        self._sam.restored(operation.ref, present)
        operation.done_blocks += len(present)
        return missing

    def _in_host(self, key: BlockKey) -> bool:
        return self._residency.is_stored(key, Tier.HOST)

    def _offered(self, wanted: int) -> int:
        assert self._pool is not None
        promised = sum(one.room for one in self._prefetches.values())
        return self._room.offer(self._pool, wanted, promised)

    def _enqueue(self, prefetch: _Prefetch, missing: Sequence[SessionBlock]) -> None:
        operation, to_host = prefetch.operation, missing[prefetch.room :]
        prefetch.room = min(prefetch.room, len(missing))
        self._prefetches[operation] = prefetch
        prefetch.to_gpu = prefetch.room > 0
        rows = [(one, False) for one in missing[: prefetch.room]]
        if to_host and operation.edit.target is PrefetchTarget.GPU:
            prefetch.diverted = True
            prefetch.why = Status.REJECTED
            prefetch.detail = "the GPU pool has no room for all of it"
        if self._config.host_bytes:
            there = [self._in_host(one.key) for one in to_host]
            operation.done_blocks += sum(there)
            rows += [(one, True) for one, kept in zip(to_host, there, strict=True) if not kept]
        for one, host_only in rows:
            if not self._available(one.key, host_only):
                break
            if not self._offer(prefetch, one, host_only):
                self._queue.cancel(operation)
                del self._prefetches[operation]
                operation.end(Status.REJECTED, "too many blocks wait: try again later")
                return
            prefetch.left.add(one.key)
        self._finish_if_through(prefetch)

    def _available(self, key: BlockKey, host_only: bool) -> bool:
        """Whether a load has a chance. Without a remote store everything is known."""
        if self._config.remote is not None:
            return True
        return not host_only and self._in_host(key)

    def _offer(self, prefetch: _Prefetch, one: SessionBlock, host_only: bool) -> bool:
        # What somebody wants in the GPU pool is not diverted to the host tier.
        host_only = host_only and not self._queue.is_waiting(WorkClass.PREFETCH, one.key)
        payload = Payload(one, host_only=host_only)
        offer = self._queue.offer(
            WorkClass.PREFETCH, one.key, payload, prefetch.operation, PATIENCE_S
        )
        return offer is not Offer.REJECTED

    # --- a step ------------------------------------------------------------------------

    def hand_out(self, works: Sequence[Transfer]) -> list[LoadCommand]:
        """Loads to command in this step for what the queue let go."""
        commands = []
        for run in _runs(works, self._config.batch_bytes):
            if not self._owners(run):  # given up since the queue let it go
                for work in run:
                    self._queue.done(WorkClass.PREFETCH, work.key)
                continue
            block_ids = self._places(run)
            if block_ids is None:
                for work in run:
                    self._queue.done(WorkClass.PREFETCH, work.key)
                self._fail(run, "inference needs the room in the GPU pool", Status.REJECTED)
                continue
            self._note_wait(run)
            commands.append(self.jobs.start(run, block_ids))
        return commands

    def _note_wait(self, run: Sequence[Transfer]) -> None:
        for prefetch in self._owners(run):
            if not prefetch.handed_out:
                prefetch.handed_out = True
                self._counters.add(Metric.PREFETCH_WAITS)
                self._counters.add(Metric.PREFETCH_WAIT_SECONDS, self._clock() - prefetch.asked_s)

    def _places(self, run: Sequence[Transfer]) -> list[int] | None:
        """Where a run's blocks go; None if the pool has no room for it any more."""
        if run[0].payload.host_only:
            return [NO_BLOCK_ID] * len(run)
        if self._pool is None or not self._room.has(self._pool, len(run)):
            return None
        for owner in self._owners(run):
            owner.room -= min(owner.room, len(run))
        return [block.block_id for block in self._pool.take(len(run))]

    def relieve(self, *, pressed: bool) -> None:
        """Once a step, after vLLM has scheduled it: if requests did not get the blocks they
        need, everything on its way into the pool is given up."""
        filling = self.jobs.is_filling
        if self._pool is None or not (self._prefetches or filling):
            return
        if pressed or (filling and self._room.is_short(self._pool)):
            for prefetch in [one for one in self._prefetches.values() if one.to_gpu]:
                prefetch.why = Status.REJECTED
                self._give_up(prefetch, "given up: inference needs the room")
            self.jobs.cancel_fills()

    def take_result(self, result: LoadResult, *, stale: bool) -> None:
        """One rank's answer to one of our loads."""
        job = self.jobs.take_result(result, stale=stale)
        if job is not None:
            self._end(job)

    def _end(self, job: PrefetchJob) -> None:
        """Every rank has answered: what arrived becomes ordinary cached blocks."""
        for work in job.works:
            self._queue.done(WorkClass.PREFETCH, work.key)
        arrived = job.arrived()
        owners = self._owners(arrived)
        ref = owners[0].operation.ref if owners else None
        restored = self.jobs.publish(job, lambda key: self.on_published(key, ref))
        if restored:
            for prefetch in owners:
                self._sam.restored(prefetch.operation.ref, restored, renew=False)
        self.jobs.give_back(job)
        self._tell(job, arrived, ref)
        self._settle(job, arrived)

    def _tell(self, job: PrefetchJob, arrived: Sequence[Transfer], ref: SessionRef | None) -> None:
        """Counters, and whoever listens."""
        target = "gpu" if job.to_gpu else "host"
        self._counters.add(Metric.PREFETCHED_BLOCKS, len(arrived), target)
        if job.to_gpu:
            keys = [work.key for work in arrived]
            remote = [key for key in keys if key in job.remote_keys]
            self._manager.handle(BlocksLoaded(Tier.REMOTE, remote, ref))
            host = [key for key in keys if key not in job.remote_keys]
            self._manager.handle(BlocksLoaded(Tier.HOST, host, ref))

    def _settle(self, job: PrefetchJob, arrived: Sequence[Transfer]) -> None:
        for work in arrived:
            for prefetch in self._owners((work,)):
                prefetch.left.discard(work.key)
                prefetch.operation.done_blocks += 1
        lost = [work for work in job.works if work not in arrived]
        if lost:
            if LoadFailure.MISSING in job.failed.values():
                self._fail(lost, "", Status.NOT_FOUND)
            else:
                self._fail(lost, "the store did not deliver all of it", Status.FAILED)
        for prefetch in self._owners(job.works):
            self._finish_if_through(prefetch)

    # --- ends --------------------------------------------------------------------------

    def request_arrived(self, ref: SessionRef) -> None:
        """The session is back: what is still waiting is for its request to load, which goes
        before everything else."""
        for prefetch in self._of(ref):
            prefetch.why = Status.PARTIAL
            self._give_up(prefetch, "a request of the session came first and loads the rest")

    def release(self, ref: SessionRef) -> None:
        """The session has ended, or gave its blocks up."""
        for prefetch in self._of(ref):
            self._give_up(prefetch, "the session gave its blocks up")

    def cancel_all(self) -> None:
        """The cache was reset: nothing that is on its way may be used."""
        for prefetch in list(self._prefetches.values()):
            self._give_up(prefetch, "the cache was reset")
        self.jobs.cancel_all()

    def expire(self, works: Iterable[Transfer]) -> None:
        """These waited too long."""
        self._fail(list(works), "the store is too busy", Status.FAILED)

    def loaded(self, work: Transfer, arrived: bool) -> None:
        """A request's load of a block has ended that a prefetch wanted too."""
        for prefetch in self._owners((work,)):
            prefetch.left.discard(work.key)
            prefetch.operation.done_blocks += arrived
            self._finish_if_through(prefetch)

    @property
    def busy(self) -> bool:
        """Whether something is waiting or in flight."""
        return bool(self._prefetches or self.jobs)

    def _of(self, ref: SessionRef) -> list[_Prefetch]:
        return [one for one in self._prefetches.values() if one.operation.ref == ref]

    def _owners(self, works: Iterable[Transfer]) -> list[_Prefetch]:
        owners = dict.fromkeys(owner for work in works for owner in work.owners)
        found = (self._prefetches.get(o) for o in owners if isinstance(o, Operation))
        return [one for one in found if one is not None]

    def _fail(self, works: Sequence[Transfer], detail: str, why: Status) -> None:
        """These will not arrive, and what lies behind them in the prefix is not asked for."""
        for prefetch in self._owners(works):
            prefetch.why = why
            self._give_up(prefetch, detail)

    def _give_up(self, prefetch: _Prefetch, detail: str) -> None:
        """It ends with what has arrived. What is in flight still becomes cached blocks, but
        nobody's."""
        prefetch.detail = prefetch.detail or detail
        self._queue.cancel(prefetch.operation)
        prefetch.left.clear()
        self._finish_if_through(prefetch)

    def _finish_if_through(self, prefetch: _Prefetch) -> None:
        if prefetch.left or prefetch.operation not in self._prefetches:
            return
        operation = prefetch.operation
        del self._prefetches[operation]
        if operation.done_blocks >= operation.blocks and not prefetch.diverted:
            operation.end(Status.OK)
        elif operation.done_blocks:
            operation.end(Status.PARTIAL, prefetch.detail or "the rest is not stored")
        else:
            operation.end(prefetch.why, prefetch.detail or "none of it is stored")

    def check_integrity(self, *, idle: bool) -> None:
        """Raise :class:`IntegrityError` if blocks or operations are lost; with ``idle`` also if
        any is left over."""
        self.jobs.check_integrity()
        waiting = [one for one in self._prefetches.values() if one.operation.done or not one.left]
        if waiting:
            raise IntegrityError(f"{len(waiting)} prefetches have nothing left to do")
        if idle and self.busy:
            raise IntegrityError(
                f"idle, but {len(self._prefetches)} prefetches and {len(self.jobs)} loads"
            )


def _runs(works: Sequence[Transfer], limit_bytes: int) -> Iterator[list[Transfer]]:
    """Consecutive works of the same operations and tier, at most ``limit_bytes`` each: a failed
    block ends its load, and must not end another session's."""
    run: list[Transfer] = []
    size = 0
    for work in works:
        same = bool(run) and (
            run[0].owners == work.owners and run[0].payload.host_only == work.payload.host_only
        )
        if run and (not same or size + work.size_bytes > limit_bytes):
            yield run
            run, size = [], 0
        run.append(work)
        size += work.size_bytes
    if run:
        yield run
