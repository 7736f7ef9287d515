"""Which freshly computed blocks to copy out, and when. Owned by the scheduler thread.

A block is handed to the workers only in a step at whose end vLLM's pool still says it
holds the expected hash. Workers copy it at the end of that same step, before anything of
a later step can overwrite it. So a save needs no pin and no reference, and an abort, a
preemption or an eviction between steps simply makes the hash disagree.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from connectors.groups import CacheGeometry
from connectors.metadata import BlockMove
from connectors.scheduler.records import RequestRecord
from spm.errors import IntegrityError
from spm.metrics import Counters, Metric
from tracker.ids import BlockKey, GroupId, split_block_key

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

MAX_PENDING_BLOCKS = 16_384
"""Blocks waiting for room in flight; beyond it the oldest are not saved."""
_MIN_PENDING_BLOCKS = 64
_PENDING_OVER_INFLIGHT = 4


class SavePlanner:
    """Bounded queue of blocks to save and the bytes of those on their way."""

    def __init__(
        self,
        geometry: CacheGeometry,
        is_stored: Callable[[BlockKey], bool],
        inflight_limit_bytes: int,
        counters: Counters,
    ) -> None:
        self._geometry = geometry
        self._is_stored = is_stored
        self._limit_bytes = inflight_limit_bytes
        self._counters = counters
        self._value_bytes: Mapping[GroupId, int] = {}
        self._max_pending = MAX_PENDING_BLOCKS
        self._pending: OrderedDict[BlockKey, tuple[KVCacheBlock, bytes]] = OrderedDict()
        self._inflight: dict[BlockKey, tuple[int, int]] = {}
        self._inflight_bytes = 0

    def set_value_bytes(self, value_bytes: Mapping[GroupId, int]) -> None:
        """Largest stored size of a block by group, over ranks."""
        self._value_bytes = value_bytes
        largest = max(value_bytes.values(), default=0)
        if largest:  # what waits is bounded by bytes too, or a slow store keeps us busy for hours
            queued_bytes = _PENDING_OVER_INFLIGHT * self._limit_bytes
            self._max_pending = min(
                MAX_PENDING_BLOCKS, max(_MIN_PENDING_BLOCKS, queued_bytes // largest)
            )

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
                self._enqueue(key, owned[index], name)

    def _enqueue(self, key: BlockKey, block: "KVCacheBlock", published: bytes) -> None:
        if key in self._inflight or key in self._pending or self._is_stored(key):
            return
        self._pending[key] = (block, published)
        if len(self._pending) > self._max_pending:
            self._pending.popitem(last=False)
            self._counters.add(Metric.SAVES_SKIPPED, label="queue_full")

    def next_saves(self, world_size: int) -> list[BlockMove]:
        """Blocks to copy out at the end of this step; call after vLLM has scheduled it."""
        moves: list[BlockMove] = []
        while self._pending:
            key, (block, expected) = next(iter(self._pending.items()))
            size = self._value_bytes.get(split_block_key(key)[1], 0)
            # One is always let through, or a block above the limit would wait for ever.
            if self._inflight and self._inflight_bytes + size > self._limit_bytes:
                break
            del self._pending[key]
            if block.block_hash != expected:
                self._counters.add(Metric.SAVES_SKIPPED, label="evicted")
                continue
            self._inflight[key] = (world_size, size)
            self._inflight_bytes += size
            moves.append(BlockMove(key, block.block_id))
        return moves

    def done(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """One rank is finished with these, well or badly; returns those that all are."""
        finished = []
        for key in keys:
            ranks_left, size = self._inflight.get(key, (0, 0))
            if ranks_left > 1:
                self._inflight[key] = (ranks_left - 1, size)
            elif self._inflight.pop(key, None) is not None:
                self._inflight_bytes -= size
                finished.append(key)
        return finished

    def drop_pending(self) -> None:
        """Forget what has not been handed out (cache reset)."""
        self._pending.clear()

    @property
    def busy(self) -> bool:
        """Whether anything is still to be handed out or on its way."""
        return bool(self._pending or self._inflight)

    def check_integrity(self) -> None:
        """Raise :class:`IntegrityError` if bytes in flight are miscounted."""
        counted = sum(size for _, size in self._inflight.values())
        if counted != self._inflight_bytes:
            raise IntegrityError(f"{self._inflight_bytes} bytes in flight, counted {counted}")
        if self._inflight.keys() & self._pending.keys():
            raise IntegrityError("a block is both waiting to be saved and being saved")
