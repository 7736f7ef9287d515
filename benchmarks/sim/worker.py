"""A worker without a model: a host tier in virtual time, told what to do by our real scheduler
half, and answering as the real worker half does."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm.v1.outputs import KVConnectorOutput

from benchmarks.sim.costs import CostModel
from benchmarks.sim.links import Batch, Link
from connectors.metadata import (
    NO_BLOCK_ID,
    BlockMove,
    LoadCommand,
    LoadFailure,
    LoadResult,
    RankReport,
    StepCommands,
    WorkerReport,
)
from spm.keys import Rank
from spm.residency import Tier
from spm.work import WorkClass
from tracker.ids import BlockKey

_RANK = Rank(0)


@dataclass(slots=True)
class _Job:
    """A load on its way."""

    command: LoadCommand
    asked_s: float
    result: LoadResult
    batches: list[Batch] = field(default_factory=list)
    batches_left: int = 0


class SimulatedWorker:
    """The worker's side of the connector. ``batch_bytes``: of one transfer on the link."""

    def __init__(self, costs: CostModel, batch_bytes: int) -> None:
        self._costs = costs
        self._batch_blocks = max(1, batch_bytes // costs.block_bytes)
        self._capacity = costs.host_bytes // costs.block_bytes
        self.host: OrderedDict[BlockKey, None] = OrderedDict()
        self.loads = Link(costs.link_bytes_per_s, costs.link_latency_s)
        self.saves = Link(costs.link_bytes_per_s, costs.link_latency_s)
        self._jobs: dict[int, _Job] = {}
        self._outbox = RankReport(_RANK, b"")
        self._received: set[str] = set()
        self._invalid: set[int] = set()

    # --- a step ------------------------------------------------------------------------

    def take(self, commands: StepCommands, now_s: float) -> None:
        """Begin what a step commands."""
        self._outbox.epoch = commands.key_space.epoch
        for command in commands.loads:
            self._begin(command, now_s)
        for job_id in commands.promoted_jobs:
            if job_id in self._jobs:
                self.loads.hasten({id(b) for b in self._jobs[job_id].batches}, WorkClass.LOAD)
        for job_id in commands.cancelled_jobs:
            self._cancel(job_id, now_s)
        for moves in _batches(commands.saves, self._batch_blocks):
            self._save(moves, now_s)

    def advance(self, now_s: float) -> None:
        """Let transfers go on up to ``now_s``."""
        self.loads.advance(now_s)
        self.saves.advance(now_s)

    def next_s(self) -> float | None:
        """When the next transfer ends."""
        times = [at for at in (self.loads.next_s(), self.saves.next_s()) if at is not None]
        return min(times, default=None)

    def report(self) -> KVConnectorOutput:
        """What has happened since the last report."""
        outbox, self._outbox = self._outbox, RankReport(_RANK, self._outbox.epoch)
        received, self._received = self._received, set()
        invalid, self._invalid = self._invalid, set()
        return KVConnectorOutput(
            finished_recving=received or None,
            invalid_block_ids=invalid,
            kv_connector_worker_meta=None if outbox.is_empty() else WorkerReport([outbox]),
        )

    # --- loads -------------------------------------------------------------------------

    def _begin(self, command: LoadCommand, now_s: float) -> None:
        job = _Job(command, now_s, LoadResult(command.job_id, command.request_id))
        self._jobs[command.job_id] = job
        runs = list(_batches(command.moves, self._batch_blocks))
        job.batches_left = len(runs)
        for run in runs:
            batch = Batch(len(run) * self._costs.block_bytes, self._arrival(job, run))
            job.batches.append(batch)
            self.loads.submit(batch, command.work, now_s)

    def _arrival(self, job: _Job, run: Sequence[BlockMove]) -> Callable[[float], None]:
        def arrived(at_s: float) -> None:
            if job.command.job_id not in self._jobs:
                return  # cancelled while it was moving
            for move in run:
                self._note(job, move)
            job.batches_left -= 1
            if not job.batches_left:
                self._end(job, at_s)

        return arrived

    def _note(self, job: _Job, move: BlockMove) -> None:
        result = job.result
        if move.key in self.host and not result.failed:
            self.host.move_to_end(move.key)
            result.host_keys.append(move.key)
            return
        why = LoadFailure.SKIPPED if result.failed else LoadFailure.MISSING
        self._fail(result, move, why)

    def _fail(self, result: LoadResult, move: BlockMove, why: LoadFailure) -> None:
        result.failed[move.key] = why
        if move.block_id != NO_BLOCK_ID:
            result.failed_block_ids.append(move.block_id)

    def _end(self, job: _Job, at_s: float) -> None:
        del self._jobs[job.command.job_id]
        result = job.result
        size_bytes = len(result.host_keys) * self._costs.block_bytes
        if size_bytes:
            result.speeds[Tier.HOST] = (size_bytes, max(1e-9, at_s - job.asked_s))
        if job.command.request_id is not None:
            self._received.add(job.command.request_id)
            self._invalid.update(result.failed_block_ids)
        self._outbox.loads.append(result)

    def _cancel(self, job_id: int, now_s: float) -> None:
        job = self._jobs.get(job_id)
        if job is None:
            return
        for batch in job.batches:
            batch.cancelled = True
        there = {*job.result.host_keys, *job.result.failed}
        for move in job.command.moves:
            if move.key not in there:
                self._fail(job.result, move, LoadFailure.CANCELLED)
        self._end(job, now_s)

    # --- saves -------------------------------------------------------------------------

    def _save(self, moves: Sequence[BlockMove], now_s: float) -> None:
        def arrived(_at_s: float) -> None:
            for move in moves:
                self._keep(move.key)
                self._outbox.saves_done.append(move.key)

        size_bytes = len(moves) * self._costs.block_bytes
        self.saves.submit(Batch(size_bytes, arrived), WorkClass.SAVE, now_s)

    def _keep(self, key: BlockKey) -> None:
        self.host[key] = None
        self.host.move_to_end(key)
        self._outbox.host_changes[key] = True
        while len(self.host) > self._capacity:
            gone, _ = self.host.popitem(last=False)
            self._outbox.host_changes[gone] = False


def _batches(moves: Sequence[BlockMove], size: int) -> list[Sequence[BlockMove]]:
    return [moves[at : at + size] for at in range(0, len(moves), size)]
