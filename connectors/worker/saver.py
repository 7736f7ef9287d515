"""Stores copies of blocks in the background: host tier first, then the remote store.

The main thread copies blocks out at the end of a step (they cannot change before it
returns). One thread adds headers and writes. Values that are to go from the host tier to
the remote are looked up only when it is their turn: until then they take no memory. Every
block is answered exactly once, so the scheduler half knows how many bytes are still on
their way.
"""

import logging
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from connectors.metadata import NO_BLOCK_ID, BlockMove
from connectors.stores.base import ReadRequest, StoreKey
from connectors.stores.buffers import Buffer, BufferPool
from connectors.stores.tiered import TieredStore
from connectors.worker.block_mover import BlockMover, Place
from connectors.worker.values import ValueCodec, payload_of
from spm.config import SpmConfig
from spm.errors import IntegrityError, StoreError
from spm.keys import KeySpace
from spm.metrics import Counters, Metric
from spm.residency import Tier
from spm.value_format import write_header
from tracker.ids import BlockKey, GroupId, split_block_key

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(slots=True)
class _Value:
    key: BlockKey
    name: StoreKey
    size_bytes: int
    buffer: Buffer | None
    """``None``: in the host tier, if it is still there."""


@dataclass(slots=True)
class _Queued:
    """Values whose copies out of KV memory have been started, or that need none."""

    values: list[_Value]
    tickets: list[object]
    key_space: KeySpace


class SaveListener:
    """What the saver reports, from its thread; the worker half implements it."""

    def host_stored(self, names: Sequence[StoreKey]) -> None:
        """Put into the host tier."""

    def remote_stored(self, names: Sequence[StoreKey]) -> None:
        """Acknowledged by the remote store."""

    def save_done(self, keys: Sequence[BlockKey]) -> None:
        """Finished with, well or badly."""


class Saver:
    """``save`` belongs to the worker's main thread."""

    def __init__(
        self,
        stores: TieredStore,
        pool: BufferPool,
        mover: BlockMover,
        codec: ValueCodec,
        config: SpmConfig,
        counters: Counters,
        listener: SaveListener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stores = stores
        self._pool = pool
        self._mover = mover
        self._codec = codec
        self._config = config
        self._counters = counters
        self._listener = listener
        self._clock = clock
        self._queued: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._open = 0
        self._open_lock = threading.Lock()
        self._last_s = float("inf")
        """No write goes on longer; set by :meth:`close`."""
        self._thread = threading.Thread(target=self._run, name="spm-save", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether values are on their way."""
        return self._open > 0

    def save(self, moves: Sequence[BlockMove], key_space: KeySpace) -> None:
        """Copy blocks out now; storing happens later. Blocks without a buffer are skipped."""
        copied: list[BlockMove] = []
        in_host: list[_Value] = []
        for move in moves:
            if move.block_id == NO_BLOCK_ID:
                in_host.append(self._value(move.key, key_space))
            else:
                copied.append(move)
        self._copy_out(copied, key_space)
        if in_host:
            self._count_open(len(in_host))
            self._queued.put(_Queued(in_host, [], key_space))

    def _value(self, key: BlockKey, key_space: KeySpace, buffer: Buffer | None = None) -> _Value:
        name = self._codec.store_key(key, key_space)
        return _Value(key, name, self._codec.value_bytes(key), buffer)

    def _copy_out(self, moves: Sequence[BlockMove], key_space: KeySpace) -> None:
        values: list[_Value] = []
        skipped: list[BlockKey] = []
        places: defaultdict[GroupId, list[Place]] = defaultdict(list)
        for move in moves:
            buffer = self._pool.acquire(self._codec.value_bytes(move.key))
            if buffer is None:
                skipped.append(move.key)
                continue
            values.append(self._value(move.key, key_space, buffer))
            places[split_block_key(move.key)[1]].append((move.block_id, payload_of(buffer)))
        if skipped:
            self._counters.add(Metric.SAVES_SKIPPED, len(skipped), "no_buffer")
            self._listener.save_done(skipped)
        if not values:
            return
        self._count_open(len(values))
        tickets: list[object] = []
        try:
            for group, group_places in places.items():
                tickets.append(self._mover.gather(self._codec.layouts[group], group_places))
        except Exception:  # out of device memory, say: a step does not fail for its saves
            logger.exception("blocks could not be copied out; they are not stored")
            self._counters.add(Metric.INTERNAL_ERRORS, label="saver")
            for ticket in tickets:
                self._mover.finish_gather(ticket)
            self._answer(values)
            return
        self._queued.put(_Queued(values, tickets, key_space))

    def _answer(self, values: Sequence[_Value]) -> None:
        """Done with these, well or badly. The answer lets the scheduler half send more, so
        it comes last, when their memory has been given back."""
        for value in values:
            if value.buffer is not None:
                value.buffer.release()
        self._count_open(-len(values))
        self._listener.save_done([value.key for value in values])

    def _count_open(self, change: int) -> None:
        with self._open_lock:
            self._open += change

    # --- save thread -------------------------------------------------------------------

    def _run(self) -> None:
        """Host tier as soon as possible; remote batches whenever nothing newer waits."""
        remote: deque[_Value] = deque()
        running = True
        while running or remote:
            if remote and self._queued.empty():
                self._guard(self._write_remote, self._next_batch(remote))
                continue
            item = self._queued.get()
            if item is None:
                running = False
                continue
            self._guard(self._finish, item)
            remote.extend(item.values)

    def _guard(self, work: Callable[[_T], None], subject: _T) -> None:
        try:
            work(subject)
        except Exception:  # thread boundary: these blocks are not stored, the thread lives on
            logger.exception("unexpected error in a save; the blocks are not stored")
            self._counters.add(Metric.INTERNAL_ERRORS, label="saver")

    def _finish(self, item: _Queued) -> None:
        for ticket in item.tickets:
            self._mover.finish_gather(ticket)
        copies = [(value, value.buffer) for value in item.values if value.buffer is not None]
        for value, buffer in copies:
            identity = self._codec.identity(value.key, item.key_space)
            write_header(buffer.view, identity, self._codec.auth)
            buffer.verified = True
        stored = self._stores.put_host([(value.name, buffer) for value, buffer in copies])
        kept = [value for (value, _), ok in zip(copies, stored, strict=True) if ok]
        self._count_saved(Tier.HOST, kept)
        self._listener.host_stored([value.name for value in kept])

    def _next_batch(self, remote: deque[_Value]) -> list[_Value]:
        batch = [remote.popleft()]
        size = batch[0].size_bytes
        while remote and size + remote[0].size_bytes <= self._config.batch_bytes:
            size += remote[0].size_bytes
            batch.append(remote.popleft())
        return batch

    def _write_remote(self, batch: list[_Value]) -> None:
        try:
            if self._stores.has_remote:
                self._fetch_from_host([value for value in batch if value.buffer is None])
                self._write([value for value in batch if value.buffer is not None])
        finally:
            self._answer(batch)

    def _fetch_from_host(self, values: Sequence[_Value]) -> None:
        """Take a reference, given back with the answer, to what is still there."""
        reads = [ReadRequest(value.name, value.size_bytes) for value in values]
        for value, buffer in zip(values, self._stores.get_host(reads), strict=True):
            value.buffer = buffer
        gone = sum(value.buffer is None for value in values)
        self._counters.add(Metric.SAVES_SKIPPED, gone, "evicted")

    def _write(self, values: Sequence[_Value]) -> None:
        # A value that was never finished has no header; storing it would be a lie.
        items = [(v.name, v.buffer) for v in values if v.buffer is not None and v.buffer.verified]
        deadline_s = min(self._clock() + self._config.save_deadline_s, self._last_s)
        try:
            stored = self._stores.put_remote(items, deadline_s)
        except StoreError as error:
            logger.info("%d blocks were not stored: %s", len(values), error)
            self._counters.add(Metric.SAVES_SKIPPED, len(values), "remote")
            return
        named = {name for (name, _), ok in zip(items, stored, strict=True) if ok}
        kept = [value for value in values if value.name in named]
        self._count_saved(Tier.REMOTE, kept)
        self._counters.add(Metric.SAVES_SKIPPED, len(values) - len(kept), "remote")
        self._listener.remote_stored([value.name for value in kept])

    def _count_saved(self, tier: Tier, values: Sequence[_Value]) -> None:
        self._counters.add(Metric.SAVED_BLOCKS, len(values), tier.value)
        size = sum(value.size_bytes for value in values)
        self._counters.add(Metric.SAVED_BYTES, size, tier.value)

    def close(self) -> None:
        """Write what was copied, for ``stop_deadline_s`` at most, then stop the thread. A write
        that hangs by then is left behind: vLLM would kill a worker that waited for it."""
        self._last_s = self._clock() + self._config.stop_deadline_s
        self._queued.put(None)
        self._thread.join(self._config.stop_deadline_s)
        if self._thread.is_alive():
            logger.warning("stopped with %d values that are not stored", self._open)

    def check_integrity(self, *, idle: bool) -> None:
        """Raise :class:`IntegrityError` if the thread died or, idle, values are left over."""
        if not self._thread.is_alive():
            raise IntegrityError("the save thread ended")
        if idle and self._open:
            raise IntegrityError(f"idle, but {self._open} values are not stored")
