"""Which freshly computed blocks to copy out, and when. Owned by the scheduler thread.

A block is handed to the workers only in a step at whose end vLLM's pool still says it
holds the expected hash. Workers copy it at the end of that same step, before anything of
a later step can overwrite it. So a save needs no pin and no reference, and an abort, a
preemption or an eviction between steps simply makes the hash disagree.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from connectors.groups import CacheGeometry
from connectors.metadata import NO_BLOCK_ID, BlockMove
from connectors.scheduler.records import RequestRecord
from connectors.scheduler.transfer_queue import Payload, Transfer, TransferQueue
from spm.errors import IntegrityError
from spm.metrics import Counters, Metric
from spm.work import WorkClass
from spm.work_queue import Offer
from tracker.ids import BlockKey

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_OWNER = "saves"


class SavePlanner:
    """Saves and offloads between the queue of transfers and the workers."""

    def __init__(
        self,
        geometry: CacheGeometry,
        is_stored: Callable[[BlockKey], bool],
        queue: TransferQueue,
        world_size: int,
        counters: Counters,
        on_end: Callable[[Transfer], None] = lambda work: None,
    ) -> None:
        """``on_end`` is told of every save that has ended, well or badly."""
        self._geometry = geometry
        self._is_stored = is_stored
        self._queue = queue
        self._world_size = world_size
        self._counters = counters
        self._on_end = on_end
        self._ranks_left: dict[BlockKey, tuple[WorkClass, int]] = {}
        """Of what is in flight."""

    def consider(
        self,
        record: RequestRecord,
        computed_tokens: int,
        blocks: Callable[[], Sequence[Sequence["KVCacheBlock"]]],
    ) -> None:
        """Queue blocks of a request that are full once this step is computed.

        Costs one comparison a group when no block became full.
        """
        for position, group in enumerate(self._geometry.groups):
            start = record.considered_blocks[position]
            stop = computed_tokens // group.block_tokens
            if stop <= start:
                continue
            owned = blocks()[position]
            span = (record.request, group, start, min(stop, len(owned)))
            keys, published = self._geometry.keys_of(*span), self._geometry.published_keys(*span)
            for index, (key, name) in enumerate(zip(keys, published, strict=True), start):
                # Not published (yet), or under the hash of a part of the block only.
                if owned[index].is_null or owned[index].block_hash != bytes(name):
                    continue
                # vLLM publishes in order and, in a sliding window, not every block: what
                # lies before a published block is published now or never.
                record.considered_blocks[position] = index + 1
                if group.window_tokens is not None:
                    record.published.setdefault(group.group, set()).add(index)
                self._enqueue(key, owned[index], name)

    def _enqueue(self, key: BlockKey, block: "KVCacheBlock", published: bytes) -> None:
        if self._queue.is_known(WorkClass.SAVE, key) or self._is_stored(key):
            return
        payload = Payload(block=block, published=published)
        if self._queue.offer(WorkClass.SAVE, key, payload, _OWNER) is Offer.REJECTED:
            self._counters.add(Metric.SAVES_SKIPPED, label="queue_full")

    def hand_out(self, works: Iterable[Transfer]) -> list[BlockMove]:
        """Blocks to copy out at the end of this step; call after vLLM has scheduled it."""
        moves: list[BlockMove] = []
        for work in works:
            block = work.payload.block
            if block is not None and block.block_hash != work.payload.published:
                self._counters.add(Metric.SAVES_SKIPPED, label="evicted")
                self._end(work.work_class, work.key)
                continue
            self._ranks_left[work.key] = work.work_class, self._world_size
            block_id = block.block_id if block is not None else NO_BLOCK_ID
            moves.append(BlockMove(work.key, block_id))
        return moves

    def done(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """One rank is finished with these, well or badly; returns those that all are."""
        finished = []
        for key in keys:
            work_class, ranks_left = self._ranks_left.get(key, (WorkClass.SAVE, 0))
            if ranks_left > 1:
                self._ranks_left[key] = work_class, ranks_left - 1
            elif self._ranks_left.pop(key, None) is not None:
                finished.append(key)
                self._end(work_class, key)
        return finished

    def _end(self, work_class: WorkClass, key: BlockKey) -> None:
        work = self._queue.done(work_class, key)
        if work is not None:
            self._on_end(work)

    def drop_waiting(self) -> None:
        """Forget what has not been handed out (cache reset, say)."""
        for work_class in (WorkClass.SAVE, WorkClass.OFFLOAD):
            for work in self._queue.drop_waiting(work_class):
                self._on_end(work)

    @property
    def busy(self) -> bool:
        """Whether anything is still to be handed out or on its way."""
        return self._queue.is_busy(WorkClass.SAVE, WorkClass.OFFLOAD)

    def check_integrity(self) -> None:
        """Raise :class:`IntegrityError` if a save is on its way that nobody counts."""
        for key, (work_class, _) in self._ranks_left.items():
            if not self._queue.is_in_flight(work_class, key):
                raise IntegrityError("a save is on its way that the queue does not know")
