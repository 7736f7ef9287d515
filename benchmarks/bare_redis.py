"""Our Redis path against a bare pipelined redis-py loop, over the same values."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import redis

from connectors.stores.base import ReadRequest, StoreKey
from connectors.stores.buffers import BufferPool
from connectors.stores.redis import RedisStore
from spm.keys import Fingerprint, Rank
from spm.value_format import HEADER_BYTES, ValueIdentity, check_value, write_header
from tracker.ids import BlockHash, GroupId

_DEADLINE_S = 60.0
_BATCH_BYTES = 16 << 20


@dataclass
class Seconds:
    """Time of each repeat, interleaved: ours, then theirs."""

    put: list[float] = field(default_factory=list)
    bare_put: list[float] = field(default_factory=list)
    get: list[float] = field(default_factory=list)
    bare_get: list[float] = field(default_factory=list)


def measure(url: str, values: int, payload_bytes: int, repeats: int, seed: int) -> Seconds:
    """Write and read ``values`` values; ours with header, checksum and its verification."""
    rng = np.random.default_rng(seed)
    payloads = [rng.bytes(payload_bytes) for _ in range(values)]
    size = HEADER_BYTES + payload_bytes
    seconds = Seconds()
    pool = BufferPool(4 * values * size)
    store = RedisStore(url, pool)
    with redis.Redis.from_url(url, protocol=2) as client:
        for _ in range(repeats + 1):  # the first one warms up connections and memory
            seconds.put.append(_timed(lambda: _put(store, pool, payloads)))
            seconds.bare_put.append(_timed(lambda: _bare_put(client, payloads)))
            seconds.get.append(_timed(lambda: _get(store, len(payloads), size)))
            seconds.bare_get.append(_timed(lambda: _bare_get(client, len(payloads), size)))
        client.flushall()
    store.close()
    for series in (seconds.put, seconds.bare_put, seconds.get, seconds.bare_get):
        del series[0]
    return seconds


def _timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _identity(index: int) -> ValueIdentity:
    block_hash = BlockHash(index.to_bytes(32, "big"))
    return ValueIdentity(Fingerprint(bytes(16)), Rank(0), GroupId(0), block_hash)


def _batches(count: int, size: int) -> list[range]:
    step = max(1, _BATCH_BYTES // size)
    return [range(start, min(start + step, count)) for start in range(0, count, step)]


def _put(store: RedisStore, pool: BufferPool, payloads: Sequence[bytes]) -> None:
    for batch in _batches(len(payloads), HEADER_BYTES + len(payloads[0])):
        items = []
        for index in batch:
            buffer = pool.acquire(HEADER_BYTES + len(payloads[index]))
            assert buffer is not None
            buffer.view[HEADER_BYTES:] = payloads[index]
            write_header(buffer.view, _identity(index))
            items.append((StoreKey(f"ours:{index}"), buffer))
        assert all(store.put_many(items, time.monotonic() + _DEADLINE_S))
        for _, buffer in items:
            buffer.release()


def _bare_put(client: "redis.Redis", payloads: Sequence[bytes]) -> None:
    for batch in _batches(len(payloads), len(payloads[0])):
        pipeline = client.pipeline(transaction=False)
        for index in batch:
            pipeline.set(f"bare:{index}", payloads[index])
        pipeline.execute()


def _get(store: RedisStore, count: int, size: int) -> None:
    for batch in _batches(count, size):
        reads = [ReadRequest(StoreKey(f"ours:{index}"), size) for index in batch]
        for index, buffer in zip(
            batch, store.get_many(reads, time.monotonic() + _DEADLINE_S), strict=True
        ):
            assert buffer is not None
            check_value(buffer.view, _identity(index), checksum=True)
            buffer.release()


def _bare_get(client: "redis.Redis", count: int, size: int) -> None:
    for batch in _batches(count, size):
        pipeline = client.pipeline(transaction=False)
        for index in batch:
            pipeline.get(f"bare:{index}")
        assert all(pipeline.execute())
