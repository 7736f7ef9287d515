"""One batch of a load: one round trip, then each value verified and put where it is wanted.

Load threads only, any number of them.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from connectors.metadata import NO_BLOCK_ID, BlockMove, LoadFailure
from connectors.stores.base import ReadRequest, StoreKey
from connectors.stores.tiered import TieredStore, TierHit
from connectors.worker.batch_queue import Batch
from connectors.worker.block_mover import BlockMover, Place
from connectors.worker.values import ValueCodec, payload_of
from spm.errors import BadValueError, StoreError
from spm.keys import KeySpace
from spm.residency import Tier
from spm.value_format import check_value
from tracker.ids import BlockKey, GroupId, split_block_key

logger = logging.getLogger(__name__)

_Good = tuple[BlockMove, ReadRequest, TierHit]
"""A value that was found and is what was asked for."""


class BatchReader:
    """What load threads do; holds no state of its own."""

    def __init__(
        self,
        stores: TieredStore,
        mover: BlockMover,
        codec: ValueCodec,
        batch_deadline_s: float,
        on_promoted: Callable[[StoreKey], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_promoted`` is told what was put into the host tier. ``clock`` gives
        monotonic seconds; no read goes on longer than ``batch_deadline_s``."""
        self._stores = stores
        self._mover = mover
        self._codec = codec
        self._batch_deadline_s = batch_deadline_s
        self._on_promoted = on_promoted
        self._clock = clock

    def load(self, batch: Batch) -> None:
        """Read a batch and tell its job what arrived and what did not."""
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
        started_s = self._clock()
        latest_s = started_s + self._batch_deadline_s
        deadline_s, hurried = min(job.deadline_s, latest_s), job.deadline_s < latest_s
        try:
            hits = self._stores.get_many_by_tier(reads, deadline_s, hurried=hurried)
        except StoreError as error:
            logger.info("load of %d blocks failed: %s", len(reads), error)
            job.fail(batch.moves, LoadFailure.STORE)
            return
        try:
            if self._place(batch, reads, hits):
                self._note_speed(batch, reads, hits, self._clock() - started_s)
        finally:
            for hit in hits:
                if hit is not None:
                    hit.buffer.release()

    def _place(
        self, batch: Batch, reads: Sequence[ReadRequest], hits: Sequence[TierHit | None]
    ) -> bool:
        """Verify and deliver the leading good blocks; the rest of the batch has failed.
        True if all arrived."""
        good: list[_Good] = []
        failure: LoadFailure | None = None
        for move, read, hit in zip(batch.moves, reads, hits, strict=True):
            failure = self._check(move, hit, batch.key_space)
            if failure is not None or hit is None:
                break
            good.append((move, read, hit))
        arrived = batch.job.write(lambda: self._deliver(good))
        homeless = [move for move, _, _ in good if move.key not in arrived]
        if homeless:
            batch.job.fail(homeless, LoadFailure.STORE)
        if failure is not None:
            batch.job.fail(batch.moves[len(good) : len(good) + 1], failure)
            batch.job.fail(batch.moves[len(good) + 1 :], LoadFailure.SKIPPED)
        return len(arrived) == len(batch.moves)

    def _check(
        self, move: BlockMove, hit: TierHit | None, key_space: KeySpace
    ) -> LoadFailure | None:
        if hit is None:  # a store that is left alone was not asked
            return LoadFailure.MISSING if self._stores.breaker.allow() else LoadFailure.STORE
        identity = self._codec.identity(move.key, key_space)
        try:
            if hit.buffer.size_bytes != self._codec.value_bytes(move.key):
                raise BadValueError(f"its length is wrong: {hit.buffer.size_bytes} bytes")
            check_value(
                hit.buffer.view,
                identity,
                checksum=not hit.buffer.verified,
                auth=self._codec.auth,
            )
        except BadValueError as error:
            logger.warning("a stored value was refused: %s", error)
            return LoadFailure.CORRUPT
        hit.buffer.verified = True
        return None

    def _deliver(self, good: Sequence[_Good]) -> dict[BlockKey, Tier]:
        """Copy into the GPU pool what has a place there, keep in the host tier what came
        from afar. Returns what is now where it was wanted."""
        places: defaultdict[GroupId, list[Place]] = defaultdict(list)
        for move, _, hit in good:
            if move.block_id != NO_BLOCK_ID:
                group = split_block_key(move.key)[1]
                places[group].append((move.block_id, payload_of(hit.buffer)))
        for group, group_places in places.items():
            self._mover.scatter(self._codec.layouts[group], group_places)
        arrived: dict[BlockKey, Tier] = {}
        for move, read, hit in good:
            in_host = hit.tier is Tier.HOST or self._promote(read.key, hit)
            if in_host or move.block_id != NO_BLOCK_ID:
                arrived[move.key] = hit.tier
        return arrived

    def _promote(self, name: StoreKey, hit: TierHit) -> bool:
        kept = self._stores.promote(name, hit.buffer)
        if kept:
            self._on_promoted(name)
        return kept

    def _note_speed(
        self,
        batch: Batch,
        reads: Sequence[ReadRequest],
        hits: Sequence[TierHit | None],
        seconds: float,
    ) -> None:
        tiers = {hit.tier for hit in hits if hit is not None}
        stayed = Tier.HOST in tiers and any(move.block_id == NO_BLOCK_ID for move in batch.moves)
        if len(tiers) == 1 and not stayed:
            size_bytes = sum(read.size_bytes for read in reads)
            batch.job.note_speed(tiers.pop(), size_bytes, seconds)
