"""Loads blocks from the stores into vLLM's KV memory on threads of its own.

A load is cut into batches of one round trip each. With two threads one batch is verified
and copied while the next is still on the wire. Whatever goes wrong, a load ends with an
answer before its deadline and never writes after it.
"""

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from connectors.metadata import BlockMove, LoadCommand, LoadFailure, LoadResult
from connectors.stores.base import ReadRequest, StoreKey
from connectors.stores.tiered import TieredStore, TierHit
from connectors.worker.block_mover import BlockMover, Place
from connectors.worker.load_job import LoadJob
from connectors.worker.values import ValueCodec, payload_of
from spm.config import SpmConfig
from spm.errors import BadValueError, IntegrityError, StoreError
from spm.keys import KeySpace
from spm.metrics import Counters, Metric
from spm.residency import Tier
from spm.value_format import check_value
from tracker.ids import GroupId, split_block_key

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Batch:
    job: LoadJob
    moves: Sequence[BlockMove]
    key_space: KeySpace


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
        self._mover = mover
        self._codec = codec
        self._config = config
        self._counters = counters
        self._on_promoted = on_promoted
        self._clock = clock
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._open_batches = 0
        self._batch_over = threading.Condition()
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
        job = LoadJob(command, len(batches), now_s, now_s + self._config.load_deadline_s)
        self._jobs[command.job_id] = job
        if not batches:
            self._ended.put(command.job_id)
        with self._batch_over:
            self._open_batches += len(batches)
        for moves in batches:
            self._batches.put(_Batch(job, moves, key_space))

    def cancel(self, job_id: int) -> None:
        """Nobody wants the load any more: end it at once, with nothing loaded (it is still
        answered)."""
        job = self._jobs.get(job_id)
        if job is not None:
            job.cancel()
            self._ended.put(job_id)

    def collect(self) -> list[LoadResult]:
        """Loads that ended since the last call, or whose deadline has passed."""
        results: list[LoadResult] = []
        while not self._ended.empty():
            self._end(self._ended.get(), LoadFailure.CANCELLED, results)
        now_s = self._clock()
        for job_id in [i for i, job in self._jobs.items() if now_s >= job.deadline_s]:
            self._end(job_id, LoadFailure.DEADLINE, results)
            self._stores.breaker.trip()  # slower than computing: do not let the next one wait too
        return results

    def _end(self, job_id: int, reason: LoadFailure, results: list[LoadResult]) -> None:
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        result = job.close(reason)
        results.append(result)
        self._counters.add(Metric.LOAD_SECONDS, self._clock() - job.started_s)
        for tier, keys in ((Tier.HOST, result.host_keys), (Tier.REMOTE, result.remote_keys)):
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
        while (batch := self._batches.get()) is not None:
            try:
                self._load(batch)
            except Exception:  # thread boundary: the load fails, the thread lives on
                logger.exception("unexpected error in a load; its blocks are recomputed")
                self._counters.add(Metric.INTERNAL_ERRORS, label="loader")
                batch.job.fail(batch.moves, LoadFailure.STORE)
            if batch.job.batch_done():
                self._ended.put(batch.job.command.job_id)
                self._progress.set()
            with self._batch_over:
                self._open_batches -= 1
                self._batch_over.notify_all()

    def _load(self, batch: _Batch) -> None:
        job = batch.job
        if job.closed or job.broken:
            job.fail(batch.moves, LoadFailure.SKIPPED)
            return
        reads = [
            ReadRequest(
                self._codec.store_key(move.key, batch.key_space),
                self._codec.value_bytes(move.key),
            )
            for move in batch.moves
        ]
        deadline_s = min(job.deadline_s, self._clock() + self._config.batch_deadline_s)
        try:
            hits = self._stores.get_many_by_tier(reads, deadline_s)
        except StoreError as error:
            logger.info("load of %d blocks failed: %s", len(reads), error)
            job.fail(batch.moves, LoadFailure.STORE)
            return
        try:
            self._place(batch, reads, hits)
        finally:
            for hit in hits:
                if hit is not None:
                    hit.buffer.release()

    def _place(
        self, batch: _Batch, reads: Sequence[ReadRequest], hits: Sequence[TierHit | None]
    ) -> None:
        """Verify and copy the leading good blocks; the rest of the batch has failed."""
        good: list[tuple[BlockMove, ReadRequest, TierHit]] = []
        failure: LoadFailure | None = None
        for move, read, hit in zip(batch.moves, reads, hits, strict=True):
            failure = self._check(move, hit, batch.key_space)
            if failure is not None or hit is None:
                break
            good.append((move, read, hit))
        places: defaultdict[GroupId, list[Place]] = defaultdict(list)
        for move, _, hit in good:
            places[split_block_key(move.key)[1]].append((move.block_id, payload_of(hit.buffer)))
        arrived = {move.key: hit.tier for move, _, hit in good}
        if batch.job.write(lambda: self._scatter(places), arrived):
            self._promote(good)
        if failure is not None:
            batch.job.fail(batch.moves[len(good) : len(good) + 1], failure)
            batch.job.fail(batch.moves[len(good) + 1 :], LoadFailure.SKIPPED)

    def _check(
        self, move: BlockMove, hit: TierHit | None, key_space: KeySpace
    ) -> LoadFailure | None:
        if hit is None:
            return LoadFailure.MISSING
        identity = self._codec.identity(move.key, key_space)
        try:
            if hit.buffer.size_bytes != self._codec.value_bytes(move.key):
                raise BadValueError(f"a value of {hit.buffer.size_bytes} bytes was not asked for")
            check_value(hit.buffer.view, identity, checksum=not hit.buffer.verified)
        except BadValueError as error:
            logger.warning("a stored value was refused: %s", error)
            return LoadFailure.CORRUPT
        hit.buffer.verified = True
        return None

    def _scatter(self, places: dict[GroupId, list[Place]]) -> None:
        for group, group_places in places.items():
            self._mover.scatter(self._codec.layouts[group], group_places)

    def _promote(self, good: Sequence[tuple[BlockMove, ReadRequest, TierHit]]) -> None:
        for _, read, hit in good:
            if hit.tier is Tier.REMOTE and self._stores.promote(read.key, hit.buffer):
                self._on_promoted(read.key)

    def close(self) -> None:
        """Stop the threads; each finishes at most the batch it is in."""
        for _ in self._threads:
            self._batches.put(None)
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
        with self._batch_over:
            if idle and not self._batch_over.wait_for(lambda: not self._open_batches, patience_s):
                raise IntegrityError(f"idle, but {self._open_batches} batches are being read")
