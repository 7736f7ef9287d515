"""Keep-alive of a million keys: CPU and memory a key, and the rate against a real Redis.

The ring is measured alone, with simulated time: ten thousand keys against a million, whole
turns of each interleaved, CPU time of the thread. Then the store keeper runs as it does beside
vLLM's scheduler, which polls it every 10 ms, once as fast as it can and once at the rate it is
capped to by default; CPU time of the process, Redis not included.
"""

import asyncio
import gc
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import redis

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script, from anywhere

from benchmarks.report import Options, Report
from connectors.scheduler.store_keeper import StoreKeeper
from connectors.stores.buffers import BufferPool
from connectors.stores.redis import RedisStore
from spm.breaker import CircuitBreaker
from spm.config import KeepAliveConfig, SpmConfig
from spm.demo.redis_process import running_redis
from spm.keepalive import KeepAliveRing
from spm.keys import Fingerprint, KeySpace, Rank
from spm.metrics import Counters, Metric, metric_key
from tracker.ids import BlockHash, BlockKey, GroupId, make_block_key

KEYS = 1_000_000
_FEW_KEYS = KEYS // 100
_INTERVAL_S = KeepAliveConfig().interval_s
_STEP_S = 0.01
_BATCH_KEYS = 512
_SESSION_KEYS = 100
_UNTIL_S = 1e9
_SPACE = KeySpace("bench", Fingerprint(bytes(16)))


def block_keys(count: int, seed: int = 0) -> Iterator[BlockKey]:
    """Keys like vLLM's, each a new object."""
    for number in range(count):
        name = BlockHash(number.to_bytes(16, "big") + seed.to_bytes(16, "big"))
        yield make_block_key(name, GroupId(0))


class TurningRing:
    """A ring and the simulated time on it."""

    def __init__(self, count: int, seed: int) -> None:
        keys = list(block_keys(count, seed))
        self.ring = KeepAliveRing(_INTERVAL_S, count)
        for session, at in enumerate(range(0, count, _SESSION_KEYS)):
            self.ring.hold(keys[at : at + _SESSION_KEYS], _UNTIL_S + session)
        self._now_s = 0.0
        self.ring.take(0.0, 1)

    def turn(self, turns: int = 1) -> float:
        """CPU seconds a key of so many whole turns, taken in the batches of the keeper."""
        taken = 0
        started = time.thread_time()
        end_s = self._now_s + turns * _INTERVAL_S
        while self._now_s < end_s:
            self._now_s += _STEP_S
            while self.ring.next_due_s(self._now_s) <= self._now_s:
                taken += len(self.ring.take(self._now_s, _BATCH_KEYS))
        seconds = time.thread_time() - started
        assert taken >= 0.99 * turns * len(self.ring), "keys were left out"
        return seconds / taken


def ring_bytes_per_key(seed: int) -> float:
    """What a ring of a million keys has allocated after two turns, the keys not included."""
    keys = list(block_keys(KEYS, seed))
    gc.collect()
    tracemalloc.start()
    ring = KeepAliveRing(_INTERVAL_S, KEYS)
    for at, key in enumerate(keys):
        ring.hold([key], _UNTIL_S + at)  # an instant of its own for each: the worst case
    for step in range(round(2 * _INTERVAL_S / 0.1)):
        while ring.next_due_s(step * 0.1) <= step * 0.1:
            ring.take(step * 0.1, _BATCH_KEYS)
    gc.collect()
    size_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size_bytes / len(ring)


@dataclass(frozen=True, slots=True)
class KeeperRun:
    """What a keeper did in a while."""

    keys_per_s: float
    cpu_share: float
    cpu_us_per_key: float


def run_keeper(url: str, count: int, settings: KeepAliveConfig, seconds: float) -> KeeperRun:
    """Keep ``count`` keys alive for so long, past a start of a second."""
    counters = Counters()
    config = SpmConfig(keep_alive=settings, max_keys=KEYS)
    breaker = CircuitBreaker(failures=3, backoff_s=0.5, backoff_cap_s=1.0)
    keeper = StoreKeeper(RedisStore(url, BufferPool(1)), breaker, counters, config, world_size=1)
    keeper.use(_SPACE)
    keys = list(block_keys(count))
    keeper.hold(keys, time.monotonic() + 3600)
    _poll(keeper, 1.0)
    counters.drain()
    started, cpu = time.monotonic(), time.process_time()
    _poll(keeper, seconds)
    wall_s, cpu_s = time.monotonic() - started, time.process_time() - cpu
    counted = counters.drain()
    keeper.close()
    touched = counted[metric_key(Metric.KEEP_ALIVE_KEYS, "touched")]
    assert touched == sum(counted.values()), f"not all keys were there: {counted}"
    return KeeperRun(touched / wall_s, cpu_s / wall_s, 1e6 * cpu_s / touched)


def _poll(keeper: StoreKeeper, seconds: float) -> None:
    """As a scheduler does that steps every 10 ms."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        keeper.poll()
        time.sleep(_STEP_S)


def fill(url: str, count: int) -> None:
    """A value under each key's name."""
    with redis.Redis.from_url(url, protocol=2) as client:
        pipeline = client.pipeline(transaction=False)
        for number, key in enumerate(block_keys(count), start=1):
            pipeline.set(_SPACE.store_key(key, Rank(0)), b"value")
            if number % 10_000 == 0:
                pipeline.execute()
        pipeline.execute()


async def measure_keeper(report: Report, count: int, seconds: float) -> None:
    """Against a Redis of our own."""
    with tempfile.TemporaryDirectory() as logs:
        async with running_redis(Path(logs)) as store:
            await asyncio.to_thread(fill, store.url, count)
            hurried = KeepAliveConfig(interval_s=1.0, max_keys_per_s=10_000_000)
            fastest = await asyncio.to_thread(run_keeper, store.url, count, hurried, seconds)
            # As many keys a second as a million in the default interval, were it not for the cap.
            usual = KeepAliveConfig(interval_s=_INTERVAL_S * count / KEYS)
            capped = await asyncio.to_thread(run_keeper, store.url, count, usual, seconds)
    report.counts["keys_per_s"] = fastest.keys_per_s
    report.counts["cpu_us_per_key"] = fastest.cpu_us_per_key
    report.counts["capped_keys_per_s"] = capped.keys_per_s
    report.counts["capped_cpu_share"] = capped.cpu_share


def main() -> None:
    options = Options.parse(__doc__.splitlines()[0] if __doc__ else "")
    repeats = 5 if options.quick else 15
    report = Report("keepalive", options, repeats)
    few, many = TurningRing(_FEW_KEYS, options.seed), TurningRing(KEYS, options.seed)
    by_few: list[float] = []
    by_many: list[float] = []
    for repeat in range(repeats + 1):  # the first one warms up
        for series, seconds in ((by_few, few.turn(10)), (by_many, many.turn())):
            if repeat:
                series.append(seconds)
    del few, many
    report.add_ratio("cost_at_100x_keys_per_key", by_many, by_few)
    report.counts["ring_ns_per_key"] = 1e9 * sorted(by_many)[repeats // 2]
    report.counts["bytes_per_key"] = ring_bytes_per_key(options.seed)
    asyncio.run(measure_keeper(report, *((200_000, 8.0) if options.quick else (KEYS, 30.0))))
    report.finish()


if __name__ == "__main__":
    main()
