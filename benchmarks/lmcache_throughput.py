"""Our Redis store and LMCache's RESP client against one Redis server, over the same values.

LMCache's side is its native client as its RESP adapter drives it: one call for all values, which
the client's own threads share out. Ours is called as our connector calls it: a round trip for
every ``batch_bytes``, several at once from as many threads.
"""

import random
import select
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np
from lmcache.lmcache_redis import LMCacheRedisClient

from connectors.stores.base import ReadRequest, StoreKey
from connectors.stores.buffers import Buffer, BufferPool
from connectors.stores.redis import RedisStore
from spm.config import SpmConfig
from spm.keys import Fingerprint, Rank
from spm.value_format import ValueIdentity, check_value, write_header
from tracker.ids import BlockHash, GroupId

_DEADLINE_S = 60.0
_POLL_MS = 500
LMCACHE_THREADS = 8
"""The default of its RESP adapter: as many connections, one thread each."""
SAVE_THREADS = 1
"""Our connector's: it saves in the background."""
LOAD_THREADS = SpmConfig().load_threads
_BATCH_BYTES = SpmConfig().batch_bytes

Times = dict[str, list[float]]


@dataclass(frozen=True)
class Values:
    """What is written, by name."""

    names: list[StoreKey]
    buffers: list[Buffer]

    @property
    def size_bytes(self) -> int:
        """Of each."""
        return self.buffers[0].size_bytes


def make_values(pool: BufferPool, prefix: str, count: int, size_bytes: int, seed: int) -> Values:
    """Random bytes, with room for our header at the front."""
    rng = np.random.default_rng(seed)
    buffers = []
    for index in range(count):
        buffer = pool.acquire(size_bytes)
        assert buffer is not None
        buffer.view[:] = rng.bytes(size_bytes)
        write_header(buffer.view, _identity(index))
        buffers.append(buffer)
    return Values([StoreKey(f"{prefix}:{index}") for index in range(count)], buffers)


def _identity(index: int) -> ValueIdentity:
    block_hash = BlockHash(index.to_bytes(32, "big"))
    return ValueIdentity(Fingerprint(bytes(16)), Rank(0), GroupId(0), block_hash)


class Client(ABC):
    """Writes and reads all values; each call returns when it is done."""

    @abstractmethod
    def put(self) -> None: ...

    @abstractmethod
    def get(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class Ours(Client):
    """:class:`RedisStore`. ``checked``: with header and checksum written and verified, which is
    what our connector does with every value and LMCache's client does not."""

    def __init__(
        self,
        url: str,
        pool: BufferPool,
        values: Values,
        save_threads: int,
        load_threads: int,
        *,
        checked: bool = False,
    ) -> None:
        self._values = values
        self._checked = checked
        self._store = RedisStore(url, pool)
        self._savers = ThreadPoolExecutor(save_threads)
        self._loaders = ThreadPoolExecutor(load_threads)
        step = max(1, _BATCH_BYTES // values.size_bytes)
        count = len(values.names)
        self._batches = [range(at, min(at + step, count)) for at in range(0, count, step)]

    def put(self) -> None:
        list(self._savers.map(self._put, self._batches))

    def get(self) -> None:
        list(self._loaders.map(self._get, self._batches))

    def close(self) -> None:
        self._savers.shutdown()
        self._loaders.shutdown()
        self._store.close()

    def _put(self, batch: Sequence[int]) -> None:
        values = self._values
        if self._checked:
            for index in batch:
                write_header(values.buffers[index].view, _identity(index))
        items = [(values.names[index], values.buffers[index]) for index in batch]
        assert all(self._store.put_many(items, time.monotonic() + _DEADLINE_S))

    def _get(self, batch: Sequence[int]) -> None:
        values = self._values
        reads = [ReadRequest(values.names[index], values.size_bytes) for index in batch]
        found = self._store.get_many(reads, time.monotonic() + _DEADLINE_S)
        for index, buffer in zip(batch, found, strict=True):
            assert buffer is not None
            if self._checked:
                check_value(buffer.view, _identity(index), checksum=True)
            buffer.release()


class Theirs(Client):
    """LMCache's native client. Reads go to places made once, as in its host tier."""

    def __init__(self, url: str, values: Values, threads: int) -> None:
        place = urlsplit(url)
        self._names = [str(name) for name in values.names]
        self._sources = [buffer.view for buffer in values.buffers]
        self.targets = [memoryview(bytearray(values.size_bytes)) for _ in values.names]
        self._client = LMCacheRedisClient(place.hostname, place.port, threads, "", "")
        self._completions = select.poll()
        self._completions.register(self._client.event_fd(), select.POLLIN)

    def put(self) -> None:
        self._wait(self._client.submit_batch_set(self._names, self._sources))

    def get(self) -> None:
        self._wait(self._client.submit_batch_get(self._names, self.targets))

    def exists(self) -> None:
        """Ask whether all are there: it has nothing that keeps a value alive."""
        self._wait(self._client.submit_batch_exists(self._names))

    def close(self) -> None:
        self._client.close()

    def _wait(self, submitted: int) -> None:
        give_up_s = time.monotonic() + _DEADLINE_S
        while time.monotonic() < give_up_s:  # it has no deadline, and waits for a missing value
            self._completions.poll(_POLL_MS)
            for future, good, error, _ in self._client.drain_completions():
                assert good, error
                if future == submitted:
                    return
        raise TimeoutError("LMCache's client did not answer")


def measure(clients: dict[str, Client], repeats: int, seed: int) -> Times:
    """Seconds for all values of each client, ``NAME put`` and ``NAME get``: interleaved, each
    time in another order, after a round that warms up connections and memory."""
    rng = random.Random(seed)
    times: Times = defaultdict(list)
    for repeat in range(repeats + 1):
        for name in rng.sample(list(clients), len(clients)):
            client = clients[name]
            for kind, work in (("put", client.put), ("get", client.get)):
                seconds = _timed(work)
                if repeat:
                    times[f"{name} {kind}"].append(seconds)
    return times


def _timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def clients_for(url: str, pool: BufferPool, values: Values) -> dict[str, Client]:
    """Both as they come, both with as many threads as each other, ours with its checksums."""

    def ours(save_threads: int, load_threads: int, *, checked: bool = False) -> Ours:
        return Ours(url, pool, values, save_threads, load_threads, checked=checked)

    few, many = LOAD_THREADS, LMCACHE_THREADS
    return {
        "ours": ours(SAVE_THREADS, LOAD_THREADS),
        "ours checked": ours(SAVE_THREADS, LOAD_THREADS, checked=True),
        "lmcache": Theirs(url, values, many),
        "ours few": ours(few, few),
        "lmcache few": Theirs(url, values, few),
        "ours many": ours(many, many),
    }
