"""A remote store that fails on command, a clock that stands still, and the parts of one
worker around them."""

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from vllm.v1.kv_cache_layout import KVCacheLayout

from connectors.metadata import NO_BLOCK_ID, BlockMove
from connectors.stores.base import KVStore, ReadRequest, StoreCapabilities, StoreKey
from connectors.stores.buffers import Buffer, BufferPool
from connectors.stores.memory import MemoryStore
from connectors.stores.tiered import TieredStore
from connectors.worker.block_mover import CpuBlockMover
from connectors.worker.layout import group_layout
from connectors.worker.values import ValueCodec
from spm.breaker import CircuitBreaker
from spm.config import SpmConfig
from spm.keys import Fingerprint, KeySpace, Rank
from spm.metrics import Counters, Metric, metric_key
from spm.value_format import HEADER_BYTES, ValueIdentity, write_header
from tests.clock import FakeClock
from tests.connectors.worker.layouts import KvMemory, uniform
from tracker.ids import BlockHash, BlockKey, GroupId, make_block_key

PATIENCE_S = 20.0
"""Longest wait for another thread; reached only by a defect."""

SPACE = KeySpace("test", Fingerprint(b"f" * 16))
NUM_BLOCKS = 40


def key_of(index: int, group: int = 0) -> BlockKey:
    """A block key for a small number."""
    return make_block_key(BlockHash(hashlib.sha256(b"%d" % index).digest()), GroupId(group))


class FaultStore(KVStore):
    """A remote store over a dict, with every way to fail a real one has.

    It copies values: nothing is shared but bytes. Several may stand over one dict, as
    several ranks' connections do over one server.
    """

    def __init__(self, pool: BufferPool, values: dict[StoreKey, bytes] | None = None) -> None:
        self.pool = pool
        self.values = values if values is not None else {}
        self.exact = True
        """False: values of another length than asked for are returned all the same."""
        self.read_errors: dict[StoreKey, Exception] = {}
        self.put_errors: dict[StoreKey, Exception] = {}
        self.refused: set[StoreKey] = set()
        self.gate = threading.Event()
        """Calls hang while it is not set."""
        self.gate.set()
        self.slow = threading.Event()
        """For tests whose ``meanwhile`` waits; nothing else looks at it."""
        self.entered = threading.Event()
        self.calls: list[list[StoreKey]] = []
        """Keys of each read and write so far."""
        self.meanwhile: Callable[[], None] = lambda: None
        """Happens during each call."""

    def _enter(self, keys: Sequence[StoreKey], errors: dict[StoreKey, Exception]) -> None:
        self.calls.append(list(keys))
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        self.meanwhile()
        for key in keys:
            if key in errors:
                raise errors[key]

    @property
    def capabilities(self) -> StoreCapabilities:
        return StoreCapabilities(remote=True, delete=True, touch=False, exact_ttl=False)

    def get_many(self, reads: Sequence[ReadRequest], deadline_s: float) -> list[Buffer | None]:
        self._enter([read.key for read in reads], self.read_errors)
        return [self._get(read) for read in reads]

    def _get(self, read: ReadRequest) -> Buffer | None:
        value = self.values.get(read.key)
        if value is None or (self.exact and len(value) != read.size_bytes):
            return None
        buffer = self.pool.acquire(len(value))
        if buffer is not None:
            buffer.view[:] = value
        return buffer

    def put_many(self, items: Sequence[tuple[StoreKey, Buffer]], deadline_s: float) -> list[bool]:
        self._enter([key for key, _ in items], self.put_errors)
        for key, buffer in items:
            if key not in self.refused:
                self.values[key] = bytes(buffer.view)
        return [key not in self.refused for key, _ in items]

    def contains_many(self, keys: Sequence[StoreKey], deadline_s: float) -> list[bool]:
        return [key in self.values for key in keys]

    def delete_many(self, keys: Sequence[StoreKey], deadline_s: float) -> int:
        return sum(self.values.pop(key, None) is not None for key in keys)

    def touch_many(
        self, keys: Sequence[StoreKey], deadline_s: float, ttl_s: Sequence[int] | None = None
    ) -> list[bool]:
        return self.contains_many(keys, deadline_s)

    def close(self) -> None:
        return

    def check_integrity(self) -> None:
        return


class Parts:
    """KV memory and stores of one worker, without the threads."""

    def __init__(self, config: SpmConfig, memory: KvMemory | None = None) -> None:
        self.memory = memory or uniform(KVCacheLayout.LBHNC, num_blocks=NUM_BLOCKS)
        layouts = [
            group_layout(g, self.memory.caches, self.memory.num_blocks) for g in self.memory.groups
        ]
        self.codec = ValueCodec(Rank(0), {layout.group: layout for layout in layouts})
        self.mover = CpuBlockMover(layouts)
        self.value_bytes = self.codec.value_bytes(key_of(0))
        self.config = replace(config, batch_bytes=2 * self.value_bytes)
        self.pool = BufferPool(config.host_bytes + config.staging_bytes)
        self.evicted: list[StoreKey] = []
        self.host = MemoryStore(self.pool, config.host_bytes, self.evicted.append)
        self.remote = FaultStore(self.pool)
        self.clock = FakeClock()
        self.counters = Counters()
        breaker = CircuitBreaker(failures=1000, backoff_s=1.0, backoff_cap_s=1.0)
        self.stores = TieredStore(self.host, self.remote, breaker, self.clock)

    def name(self, index: int, group: int = 0) -> StoreKey:
        return self.codec.store_key(key_of(index, group), SPACE)

    def payload(self, index: int, group: int = 0) -> bytes:
        """What block ``index`` holds."""
        size = self.codec.layout_of(key_of(index, group)).payload_bytes
        return np.random.default_rng(index).bytes(size)

    def value(self, index: int, identity: ValueIdentity | None = None) -> bytes:
        """A complete value; ``identity`` makes it somebody else's."""
        value = bytearray(HEADER_BYTES) + self.payload(index)
        write_header(memoryview(value), identity or self.codec.identity(key_of(index), SPACE))
        return bytes(value)

    def put_remote(self, *indexes: int) -> None:
        self.remote.values.update({self.name(index): self.value(index) for index in indexes})

    def put_host(self, *indexes: int) -> None:
        for index in indexes:
            buffer = self.pool.acquire(self.value_bytes)
            assert buffer is not None
            buffer.view[:] = self.value(index)
            buffer.verified = True
            self.host.put_many([(self.name(index), buffer)])
            buffer.release()

    def block(self, block_id: int, group: int = 0) -> bytes:
        """What is in KV memory now."""
        return self.memory.block_bytes(self.memory.groups[group], block_id)

    def counted(self) -> dict[str, float]:
        """Counters that are not zero, since the last call."""
        return {key: value for key, value in self.counters.drain().items() if value}


def moves(*indexes: int, group: int = 0) -> tuple[BlockMove, ...]:
    """Value ``i`` belongs to block ``i + 1``: block 0 is vLLM's null block."""
    return tuple(BlockMove(key_of(index, group), index + 1) for index in indexes)


def host_only(*indexes: int, group: int = 0) -> tuple[BlockMove, ...]:
    """Values that have no place in the pool."""
    return tuple(BlockMove(key_of(index, group), NO_BLOCK_ID) for index in indexes)


def counter(metric: Metric, label: str = "") -> str:
    return metric_key(metric, label)
