"""Loads in flight: from allocated blocks to every rank's answer. Scheduler thread only."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from connectors.groups import CacheGeometry
from connectors.metadata import BlockMove, LoadCommand, LoadFailure, LoadResult
from connectors.scheduler.hit_planner import Hit
from connectors.scheduler.records import LoadJob, RequestRecord
from connectors.scheduler.reload_choice import ReloadChoice
from connectors.scheduler.transfer_queue import Transfer, TransferQueue
from spm.errors import IntegrityError
from spm.events import BlocksConfirmed, BlocksDoubted, BlocksLoaded, BlocksMissing
from spm.manager import SessionAwarePoolingManager
from spm.metrics import Counters, Metric
from spm.residency import Tier
from spm.work import WorkClass
from tracker.ids import BlockKey, GroupId

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

logger = logging.getLogger(__name__)

_GONE = (LoadFailure.MISSING, LoadFailure.CORRUPT)
_OWNER = "loads"


def tell_residency(manager: SessionAwarePoolingManager, result: LoadResult) -> None:
    """What one rank's answer says of where blocks are."""
    manager.handle(BlocksConfirmed(result.remote_keys))
    gone = [key for key, why in result.failed.items() if why in _GONE]
    manager.handle(BlocksMissing(gone))
    if gone:
        manager.handle(BlocksDoubted(list(result.failed)))


class LoadTracker:
    """A job ends when all ranks have answered; vLLM itself waits for the same."""

    def __init__(
        self,
        geometry: CacheGeometry,
        manager: SessionAwarePoolingManager,
        queue: TransferQueue,
        world_size: int,
        counters: Counters,
        job_ids: Iterator[int],
        on_end: Callable[[Transfer, bool], None] = lambda work, arrived: None,
        choice: ReloadChoice | None = None,
    ) -> None:
        """``on_end`` is told of every block's load that has ended, and whether it arrived.
        ``choice`` learns from loads and says how long each may take."""
        self._geometry = geometry
        self._queue = queue
        self._job_ids = job_ids
        self._on_end = on_end
        self._choice = choice
        self._manager = manager
        self._world_size = world_size
        self._counters = counters
        self._jobs: dict[int, LoadJob] = {}
        self._commands: list[LoadCommand] = []
        self._cancelled: list[int] = []
        # Token counts come from one group: a full-attention one if there is any.
        self._counted = next(
            (g for g in geometry.groups if g.window_tokens is None), geometry.groups[0]
        )

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    def start(
        self,
        record: RequestRecord,
        hit: Hit,
        external_tokens: int,
        blocks: Sequence[Sequence["KVCacheBlock"]],
    ) -> None:
        """Blocks were allocated for ``hit``: command the load with the next step."""
        if external_tokens != hit.external_tokens:
            hit = self._shorten(record, hit, external_tokens)
        moves = [
            (index * group.block_tokens, BlockMove(key, blocks[position][index].block_id))
            for position, group in enumerate(self._geometry.groups)
            for index, key in hit.keys[group.group].items()
            if not blocks[position][index].is_null
        ]
        moves.sort(key=lambda move: move[0])  # prefix order, groups side by side
        job_id = next(self._job_ids)
        request_id = record.request.request_id
        keys = list(hit.keys[self._counted.group].values())
        counted = dict.fromkeys(keys, self._counted.block_tokens)
        if keys:
            counted[keys[0]] += external_tokens - sum(counted.values())
        commanded = tuple(move for _, move in moves)
        self._jobs[job_id] = LoadJob(
            request_id, self._world_size, counted, tuple(move.key for move in commanded)
        )
        for move in commanded:
            self._queue.start_load(move.key, _OWNER)
        patience_s = self._begin(job_id, commanded, external_tokens)
        self._commands.append(
            LoadCommand(job_id, request_id, commanded, WorkClass.LOAD, patience_s)
        )
        record.job_id, record.loaded = job_id, False
        by_tier = dict.fromkeys(Tier, 0)
        for key, tokens in counted.items():
            by_tier[self._manager.residency.tier_of(key) or Tier.REMOTE] += tokens
        record.note_loaded(by_tier)

    def _begin(self, job_id: int, moves: Sequence[BlockMove], num_tokens: int) -> float:
        """Returns how long the load may take."""
        if self._choice is None:
            return math.inf
        tier_of, size_of = self._manager.residency.tier_of, self._queue.size_bytes
        far = (move.key for move in moves if tier_of(move.key) is not Tier.HOST)
        self._choice.started(job_id, sum(map(size_of, far)), num_tokens)
        return self._choice.patience_of(job_id)

    def _shorten(self, record: RequestRecord, hit: Hit, external_tokens: int) -> Hit:
        """vLLM took another length than was offered; needed blocks follow from it."""
        total = hit.local_tokens + external_tokens
        keys: dict[GroupId, Mapping[int, BlockKey]] = {}
        for group in self._geometry.groups:
            first = hit.local_tokens // group.block_tokens
            start = max(first, group.first_needed_block(total))
            stop = total // group.block_tokens
            found = self._geometry.keys_of(record.request, group, start, stop)
            keys[group.group] = dict(enumerate(found, start))
        return Hit(hit.local_tokens, total, keys)

    def cancel(self, job_id: int) -> None:
        """The request is gone; the load still has to be answered by every rank."""
        if job_id in self._jobs:
            self._cancelled.append(job_id)

    def cancel_all(self) -> None:
        """What is on its way must not be used any more; its requests recompute."""
        self._cancelled.extend(self._jobs)

    def take_commands(self) -> tuple[list[LoadCommand], list[int]]:
        """Loads to start and to cancel with this step."""
        commands, cancelled = self._commands, self._cancelled
        self._commands, self._cancelled = [], []
        return commands, cancelled

    def take_result(
        self, result: LoadResult, records: Mapping[str, RequestRecord], *, stale: bool
    ) -> None:
        """One rank's answer. ``stale``: it says nothing about the current key space."""
        job = self._jobs.get(result.job_id)
        if job is None:
            return
        job.ranks_left -= 1
        job.remote_keys.update(result.remote_keys)
        if result.failed:
            job.failed = True
            job.counted_keys = self._kept(job, result.failed)
        if not stale:
            tell_residency(self._manager, result)
        job.failed_keys.update(result.failed)
        if job.ranks_left == 0:
            del self._jobs[result.job_id]
            if self._choice is not None:
                self._choice.ended(result.job_id)
            for key in job.keys:
                work = self._queue.done(WorkClass.LOAD, key)
                if work is not None:
                    self._on_end(work, key not in job.failed_keys)
            self._finish(result.job_id, job, records.get(job.request_id))

    def _kept(self, job: LoadJob, failed: Mapping[BlockKey, LoadFailure]) -> dict[BlockKey, int]:
        """What vLLM keeps of a failed load: the blocks before the first that failed, or
        nothing."""
        kept: dict[BlockKey, int] = {}
        if not self._geometry.keeps_prefix_of_failed_load:
            return kept
        for key, tokens in job.counted_keys.items():
            if key in failed:
                break
            kept[key] = tokens
        return kept

    def _finish(self, job_id: int, job: LoadJob, record: RequestRecord | None) -> None:
        self._counters.add(Metric.LOADS, label="failed" if job.failed else "ok")
        counted = job.counted_keys.items()
        remote = sum(tokens for key, tokens in counted if key in job.remote_keys)
        host = sum(job.counted_keys.values()) - remote
        self._counters.add(Metric.LOADED_TOKENS, remote, Tier.REMOTE.value)
        self._counters.add(Metric.LOADED_TOKENS, host, Tier.HOST.value)
        ref = record.session if record is not None else None
        far = [key for key in job.counted_keys if key in job.remote_keys]
        near = [key for key in job.counted_keys if key not in job.remote_keys]
        self._manager.handle(BlocksLoaded(Tier.REMOTE, far, ref))
        self._manager.handle(BlocksLoaded(Tier.HOST, near, ref))
        if record is None or record.job_id != job_id:
            return
        record.job_id, record.loaded = None, True
        record.external_refused |= job.failed
        record.note_loaded({Tier.REMOTE: remote, Tier.HOST: host})

    def check_integrity(self, records: Mapping[str, RequestRecord]) -> None:
        """Raise :class:`IntegrityError` if a request waits for a load nobody is doing."""
        for record in records.values():
            if record.job_id is not None and record.job_id not in self._jobs:
                raise IntegrityError("a request waits for a load nobody is doing")
