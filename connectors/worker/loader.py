"""Loads blocks from the stores into vLLM's KV memory, or the host tier, on threads of its own.

A load is cut into batches of one round trip each. With two threads one batch is verified
and copied while the next is still on the wire. Loads that requests wait for come before
prefetches. Whatever goes wrong, a load ends with an answer before its deadline and never
writes after it.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from connectors.metadata import NO_BLOCK_ID, BlockMove, LoadCommand, LoadFailure, LoadResult
from connectors.stores.base import StoreKey
from connectors.stores.tiered import TieredStore
from connectors.worker.batch_queue import Batch, BatchQueue
from connectors.worker.batch_reader import BatchReader
from connectors.worker.block_mover import BlockMover
from connectors.worker.load_job import LoadJob
from connectors.worker.values import ValueCodec
from spm.config import SpmConfig
from spm.errors import IntegrityError
from spm.keys import KeySpace
from spm.metrics import Counters, Metric
from spm.residency import Tier
from spm.work import WorkClass

logger = logging.getLogger(__name__)


class Loader:
    """``submit``, ``cancel`` and ``collect`` belong to the worker's main thread."""

    def __init__(
        self,
        stores: TieredStore,
        mover: BlockMover,
        codec: ValueCodec,
        config: SpmConfig,
        counters: Counters,
        on_promoted: Callable[[StoreKey], None],
        progress: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stores = stores
        self._reader = BatchReader(
            stores, mover, codec, config.batch_deadline_s, on_promoted, clock
        )
        self._codec = codec
        self._config = config
        self._counters = counters
        self._clock = clock
        self._batches = BatchQueue()
        self._jobs: dict[int, LoadJob] = {}
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._progress = progress
        self._threads = [
            threading.Thread(target=self._run, name=f"spm-load-{index}", daemon=True)
            for index in range(config.load_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def busy(self) -> bool:
        """Whether any load is open."""
        return bool(self._jobs)

    def submit(self, command: LoadCommand, key_space: KeySpace) -> None:
        """Queue one load; it will be answered by :meth:`collect` exactly once."""
        batches = list(self._cut(command.moves))
        now_s = self._clock()
        patience_s = min(command.patience_s, self._config.load_deadline_s)
        job = LoadJob(command, len(batches), now_s, now_s + patience_s)
        self._jobs[command.job_id] = job
        if batches:
            self._batches.put(job, [Batch(job, moves, key_space) for moves in batches])
        else:
            self._ended.put(command.job_id)

    def cancel(self, job_id: int) -> None:
        """Nobody wants the load any more: end it at once, with nothing loaded (it is still
        answered)."""
        job = self._jobs.get(job_id)
        if job is not None:
            job.cancel()
            self._ended.put(job_id)

    def promote(self, job_id: int) -> None:
        """A request waits for the load by now."""
        job = self._jobs.get(job_id)
        if job is not None:
            self._batches.promote(job)

    def collect(self) -> list[LoadResult]:
        """Loads that ended since the last call, or whose deadline has passed."""
        results: list[LoadResult] = []
        while not self._ended.empty():
            self._end(self._ended.get(), LoadFailure.CANCELLED, results)
        now_s = self._clock()
        for job_id in [i for i, job in self._jobs.items() if now_s >= job.deadline_s]:
            self._blame(self._jobs[job_id])
            self._end(job_id, LoadFailure.DEADLINE, results)
        return results

    def _blame(self, job: LoadJob) -> None:
        """A load took too long. If the store is why, do not let the next one wait too: it is
        if it has brought nothing to anybody for longer than a round trip may take. If only for
        longer than this load could wait, a probe finds out whether it answers; how slow it is
        is the scheduler half's to judge. A prefetch may only have waited for its turn."""
        if job.command.work is not WorkClass.LOAD:
            return
        silent_s = self._stores.silent_s
        if silent_s >= self._config.batch_deadline_s:
            self._stores.breaker.trip()
        elif silent_s > 0:
            self._stores.breaker.suspect()

    def _end(self, job_id: int, reason: LoadFailure, results: list[LoadResult]) -> None:
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        result = job.close(reason)
        self._batches.drop(job)
        results.append(result)
        if job.command.work is WorkClass.LOAD:  # of a prefetch it would be the time it waited
            self._counters.add(Metric.LOAD_SECONDS, self._clock() - job.started_s)
        self._count_blocks(job.command, result)

    def _count_blocks(self, command: LoadCommand, result: LoadResult) -> None:
        stay = {move.key for move in command.moves if move.block_id == NO_BLOCK_ID}
        came_from = {
            Tier.HOST: [key for key in result.host_keys if key not in stay],
            Tier.REMOTE: result.remote_keys,
        }
        for tier, keys in came_from.items():
            self._counters.add(Metric.LOADED_BLOCKS, len(keys), tier.value)
            size = sum(self._codec.value_bytes(key) for key in keys)
            self._counters.add(Metric.LOADED_BYTES, size, tier.value)
        for why in result.failed.values():
            self._counters.add(Metric.LOAD_FAILED_BLOCKS, label=why.value)

    def _cut(self, moves: Sequence[BlockMove]) -> Iterator[list[BlockMove]]:
        """Consecutive moves of at most ``batch_bytes`` (at least one move)."""
        batch: list[BlockMove] = []
        size = 0
        for move in moves:
            move_bytes = self._codec.value_bytes(move.key)
            if batch and size + move_bytes > self._config.batch_bytes:
                yield batch
                batch, size = [], 0
            batch.append(move)
            size += move_bytes
        if batch:
            yield batch

    # --- load threads ------------------------------------------------------------------

    def _run(self) -> None:
        while (batch := self._batches.take()) is not None:
            batch.job.begin(self._clock())
            try:
                self._reader.load(batch)
            except Exception:  # thread boundary: the load fails, the thread lives on
                logger.exception("unexpected error in a load; its blocks are recomputed")
                self._counters.add(Metric.INTERNAL_ERRORS, label="loader")
                batch.job.fail(batch.moves, LoadFailure.STORE)
            if batch.job.batch_done():
                self._ended.put(batch.job.command.job_id)
                self._progress.set()
            self._batches.done()

    def close(self) -> None:
        """Stop the threads; each finishes at most the batch it is in."""
        self._batches.close()
        for job in self._jobs.values():
            job.close(LoadFailure.CANCELLED)
        for thread in self._threads:
            thread.join()
        self._jobs.clear()

    def check_integrity(self, *, idle: bool) -> None:
        """Raise :class:`IntegrityError` if a thread died or, idle, a load is left over."""
        dead = [thread.name for thread in self._threads if not thread.is_alive()]
        if dead:
            raise IntegrityError(f"load threads ended: {dead}")
        if idle and self._jobs:
            raise IntegrityError(f"idle, but {len(self._jobs)} loads are open")
        # A load that was given up is over at once; its thread may still be reading.
        patience_s = 2 * self._config.batch_deadline_s
        if idle and (num_open := self._batches.wait_until_empty(patience_s)):
            raise IntegrityError(f"idle, but {num_open} batches are being read")
