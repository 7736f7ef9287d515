"""What the two halves tell each other, once a step. Plain data: it crosses processes."""

import math
from dataclasses import dataclass, field
from enum import Enum

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from spm.breaker import BreakerState
from spm.keys import KeySpace, Rank
from spm.residency import Tier
from spm.work import WorkClass
from tracker.ids import BlockKey

NO_BLOCK_ID = -1
"""In place of a block id: the value has no place in the GPU pool."""


class LoadFailure(str, Enum):
    """Why a block of a load did not arrive. Closed set: it is a metric label."""

    MISSING = "missing"
    """Asked for and not there: residency is corrected."""
    CORRUPT = "corrupt"
    """There, but not what was asked for; treated as not there."""
    STORE = "store"
    """The store could not answer, or the value was to be kept in the host tier and cannot
    be: there is none, or it is too small. Says nothing about where the value is."""
    DEADLINE = "deadline"
    SKIPPED = "skipped"
    """An earlier block of the same prefix had already failed."""
    CANCELLED = "cancelled"
    """Nobody wants it any more."""


@dataclass(frozen=True, slots=True)
class BlockMove:
    """One stored block and its place in the GPU pool.

    ``NO_BLOCK_ID`` in a load: only have it in the host tier, which costs nothing but its
    recency if it is there already. In a save: it is in the host tier, write it to the
    remote.
    """

    key: BlockKey
    block_id: int


@dataclass(frozen=True, slots=True)
class LoadCommand:
    """Fill these blocks, in prefix order. Always answered, whatever happens."""

    job_id: int
    request_id: str | None
    """``None``: no request of vLLM's waits for it, nor is vLLM told how it ended."""
    moves: tuple[BlockMove, ...]
    work: WorkClass = WorkClass.LOAD
    """``LOAD`` or ``PREFETCH``: all loads of a lower class are served first."""
    patience_s: float = math.inf
    """What has not arrived so many seconds after the command is computed instead."""


@dataclass(frozen=True, slots=True)
class LayoutHandshake(KVConnectorHandshakeMetadata):
    """A worker's KV layout, sent once at start and folded into the fingerprint."""

    rank: Rank
    layout_digest: str
    value_bytes: tuple[int, ...]
    """Size of one stored value by group; 0 for a group without layers on this rank."""


@dataclass(slots=True)
class NoCommands(KVConnectorMetadata):
    """Of an engine without a tier behind its GPU pool: workers have nothing to do, ever."""


@dataclass(slots=True)
class StepCommands(KVConnectorMetadata):
    """Scheduler half to every worker half, once a step."""

    key_space: KeySpace
    has_forward: bool
    """False: nothing is computed this step, the worker may wait briefly for I/O."""
    loads: list[LoadCommand] = field(default_factory=list)
    cancelled_jobs: list[int] = field(default_factory=list)
    saves: list[BlockMove] = field(default_factory=list)
    """Copied out of the GPU pool at the end of this very step, before any later step can
    reuse the blocks: no pins are needed and an abort or preemption changes nothing. What
    has no block is written to the remote from the host tier, if it is still there then."""
    linger: bool = False
    """The scheduler half waits for somebody else than its workers: a step that computes
    nothing waits briefly even if nothing moves on a rank."""
    promoted_jobs: list[int] = field(default_factory=list)
    """Prefetches that a request waits for by now."""


@dataclass(slots=True)
class LoadResult:
    """How one rank's part of a load ended."""

    job_id: int
    request_id: str | None
    host_keys: list[BlockKey] = field(default_factory=list)
    remote_keys: list[BlockKey] = field(default_factory=list)
    failed: dict[BlockKey, LoadFailure] = field(default_factory=dict)
    failed_block_ids: list[int] = field(default_factory=list)
    """Places in the GPU pool of the failed blocks that have one."""
    speeds: dict[Tier, tuple[int, float]] = field(default_factory=dict)
    """Bytes and seconds, from asking to being in place, of the batches that arrived whole
    from one tier. Seconds are summed over batches even if these ran at the same time; a
    value that only had to stay in the host tier is no measure of its speed."""
    waited_s: float = 0.0
    """Until the first of its batches had its turn; infinity: none had."""


@dataclass(slots=True)
class RankReport:
    """One worker half to the scheduler half: what changed since the last report."""

    rank: Rank
    epoch: bytes
    """Key space epoch the changes belong to; reports of an older epoch are dropped."""
    host_changes: dict[BlockKey, bool] = field(default_factory=dict)
    """Last known presence in this rank's host tier: True inserted, False evicted."""
    remote_stored: list[BlockKey] = field(default_factory=list)
    saves_done: list[BlockKey] = field(default_factory=list)
    """Saves that ended, well or badly; every save command is answered exactly once."""
    loads: list[LoadResult] = field(default_factory=list)
    breaker: BreakerState | None = None
    """Of this rank's remote store. Told with every report while it is not closed, and once
    when it is closed again; None: it is closed as before."""

    def is_empty(self) -> bool:
        news = self.host_changes or self.remote_stored or self.saves_done or self.loads
        return not news and self.breaker is None


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """Reports of all ranks of one step."""

    ranks: list[RankReport]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """Join two workers' reports (vLLM calls this on the scheduler's process)."""
        assert isinstance(other, WorkerReport)
        return WorkerReport([*self.ranks, *other.ranks])
