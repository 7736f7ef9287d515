"""One load on one worker: which blocks arrived, and when it is over.

The lock makes "give up" and "write into the GPU pool" exclusive: once a job is closed its
blocks may belong to somebody else, and no late batch may touch them.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence

from connectors.metadata import (
    NO_BLOCK_ID,
    BlockMove,
    LoadCommand,
    LoadFailure,
    LoadResult,
)
from spm.residency import Tier
from tracker.ids import BlockKey


class LoadJob:
    """Shared by the worker's main thread and the load threads; guarded by ``lock``."""

    def __init__(
        self, command: LoadCommand, num_batches: int, started_s: float, deadline_s: float
    ) -> None:
        self.command = command
        self.work = command.work
        """Its class by now; owned by the queue of batches."""
        self.started_s = started_s
        self.deadline_s = deadline_s
        self.lock = threading.Lock()
        self._begun_s = math.inf
        self._batches_left = num_batches
        self._outcome: dict[BlockKey, Tier | LoadFailure] = {}
        self._speeds: dict[Tier, tuple[int, float]] = {}
        self._closed = False
        self._broken = False

    @property
    def closed(self) -> bool:
        """Nothing may be written for this job any more."""
        return self._closed

    @property
    def broken(self) -> bool:
        """An earlier block failed: what lies behind it in the prefix is of no use."""
        return self._broken

    def begin(self, now_s: float) -> None:
        """One of its batches has had its turn. Load threads."""
        with self.lock:
            self._begun_s = min(self._begun_s, now_s)

    def write(self, deliver: Callable[[], Mapping[BlockKey, Tier]]) -> Mapping[BlockKey, Tier]:
        """Run ``deliver`` unless the job is closed. What it returns, and this too, are the
        values that arrived, and from where. Load threads."""
        with self.lock:
            if self._closed:
                return {}
            arrived = deliver()
            for key, tier in arrived.items():
                self._outcome.setdefault(key, tier)
            return arrived

    def note_speed(self, tier: Tier, size_bytes: int, seconds: float) -> None:
        """So long took a batch that arrived whole from one tier. Load threads."""
        with self.lock:
            known_bytes, known_s = self._speeds.get(tier, (0, 0.0))
            self._speeds[tier] = (known_bytes + size_bytes, known_s + seconds)

    def fail(self, moves: Sequence[BlockMove], reason: LoadFailure) -> None:
        """These did not arrive. Load threads."""
        with self.lock:
            self._broken = True
            for move in moves:
                self._outcome.setdefault(move.key, reason)

    def cancel(self) -> None:
        """Nothing of it counts, not even what has arrived. Main thread."""
        with self.lock:
            self._broken = True
            for move in self.command.moves:
                self._outcome[move.key] = LoadFailure.CANCELLED

    def batch_done(self) -> bool:
        """One batch less; True for the last one of a job that is still open."""
        with self.lock:
            self._batches_left -= 1
            return self._batches_left == 0 and not self._closed

    def close(self, reason: LoadFailure) -> LoadResult:
        """End the job; blocks without an outcome failed for ``reason``. Idempotent in
        effect: only the caller that removes the job from the table reports it."""
        with self.lock:
            self._closed = True
            result = LoadResult(self.command.job_id, self.command.request_id)
            result.speeds = dict(self._speeds)
            result.waited_s = self._begun_s - self.started_s
            for move in self.command.moves:
                outcome = self._outcome.get(move.key, reason)
                if outcome is Tier.HOST:
                    result.host_keys.append(move.key)
                elif outcome is Tier.REMOTE:
                    result.remote_keys.append(move.key)
                else:
                    assert isinstance(outcome, LoadFailure)
                    result.failed[move.key] = outcome
                    if move.block_id != NO_BLOCK_ID:
                        result.failed_block_ids.append(move.block_id)
            return result
