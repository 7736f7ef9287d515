"""Our Redis store beside bare redis-py and LMCache's client: throughput of put, get and touch.

All talk to one Redis server. Ours does what our connector has it do: header and checksum written
with every value and verified with every read; put and get over LMCache's are of its native
client with its eight threads, ours with as many as our connector has, and with eight. LMCache
has nothing that keeps a value alive: a touch is compared with its question whether one is there.
Ratios are of throughput: above one, ours is faster.
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import redis

from benchmarks import bare_redis
from benchmarks.report import Report
from connectors.scheduler.keeper_worker import BATCH_KEYS
from connectors.stores.base import StoreKey
from connectors.stores.buffers import BufferPool
from connectors.stores.redis import RedisStore
from spm.demo.lmcache_process import lmcache_installed
from spm.remote_config import RemoteConfig
from spm.value_format import HEADER_BYTES

VALUES = {"block": (24, 128 * 23_040), "64_kib": (256, 64 * 1024)}
"""By name: how many values, and bytes of each. A block of the real model: 128 tokens."""
_DEADLINE_S = 60.0
_POOL_BYTES = 2 << 30

Times = dict[str, list[float]]


def measure_store(report: Report, url: str, touched_keys: int) -> None:
    """Add all ratios and rates. ``url``: a Redis of our own, which is emptied."""
    for name, (count, size_bytes) in VALUES.items():
        _beside_bare_redis(report, url, name, count, size_bytes)
        if lmcache_installed():
            _beside_lmcache(report, url, name, count, size_bytes)
        print(f"  {count} values of {size_bytes} bytes put and got", flush=True)
    _touches(report, url, touched_keys)
    print(f"  {touched_keys} values touched", flush=True)
    if not lmcache_installed():
        print("  LMCache is not installed: nothing is compared with it", flush=True)


def _beside_bare_redis(report: Report, url: str, name: str, count: int, size_bytes: int) -> None:
    times = bare_redis.measure(url, count, size_bytes, report.repeats, report.options.seed)
    note = "throughput; ours with header and checksum"
    report.add_ratio(f"put_over_bare_redis_{name}", times.bare_put, times.put, note)
    report.add_ratio(f"get_over_bare_redis_{name}", times.bare_get, times.get, note)
    by_name = {"put": times.put, "get": times.get}
    _add_rates(
        report, {f"ours_{kind}_{name}": s for kind, s in by_name.items()}, count * size_bytes
    )


def _beside_lmcache(report: Report, url: str, name: str, count: int, size_bytes: int) -> None:
    from benchmarks.lmcache_throughput import (
        LMCACHE_THREADS,
        LOAD_THREADS,
        SAVE_THREADS,
        Ours,
        Theirs,
        make_values,
        measure,
    )

    pool = BufferPool(_POOL_BYTES)
    seed = report.options.seed
    values = make_values(pool, f"{name}-values", count, HEADER_BYTES + size_bytes, seed)
    many = LMCACHE_THREADS
    clients = {
        "ours": Ours(url, pool, values, SAVE_THREADS, LOAD_THREADS, checked=True),
        "many": Ours(url, pool, values, many, many, checked=True),
        "lmcache": Theirs(url, values, many),
    }
    times = measure(clients, report.repeats, seed)
    for client in clients.values():
        client.close()
    for kind, threads in (("put", SAVE_THREADS), ("get", LOAD_THREADS)):
        theirs = times[f"lmcache {kind}"]
        note = f"throughput; ours {threads} threads, LMCache's {many}"
        report.add_ratio(f"{kind}_over_lmcache_{name}", theirs, times[f"ours {kind}"], note)
        report.add_ratio(f"{kind}_over_lmcache_{name}_equal_threads", theirs, times[f"many {kind}"])
        _add_rates(report, {f"lmcache_{kind}_{name}": theirs}, count * size_bytes)
    _empty(url)


def _touches(report: Report, url: str, count: int) -> None:
    clients = _touchers(url, count)
    times = _timed_in_turns(clients, report.repeats, report.options.seed)
    note = "throughput; the same two commands a key"
    report.add_ratio("touch_over_bare_redis", times["bare"], times["ours"], note)
    if "lmcache" in times:
        note = "throughput; a touch of ours over asking whether one is there"
        report.add_ratio("touch_over_lmcache_exists", times["lmcache"], times["ours"], note)
    for name, series in times.items():
        report.counts[f"{name}_touched_keys_per_s"] = count / _median(series)
    _empty(url)


def _touchers(url: str, count: int) -> Mapping[str, Callable[[], None]]:
    """By name: touches ``count`` small values that are there."""
    ttl_s = RemoteConfig(url).ttl_s
    names = [StoreKey(f"touched:{index}") for index in range(count)]
    batches = [names[at : at + BATCH_KEYS] for at in range(0, count, BATCH_KEYS)]
    store = RedisStore(url, BufferPool(1), ttl_s=ttl_s)
    client = redis.Redis.from_url(url, protocol=2)
    with client.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.set(name, b"value", ex=ttl_s)
        pipeline.execute()

    def ours() -> None:
        for batch in batches:
            assert all(store.touch_many(batch, time.monotonic() + _DEADLINE_S))

    def bare() -> None:
        for batch in batches:
            pipeline = client.pipeline(transaction=False)
            for name in batch:
                pipeline.touch(name)
                pipeline.expire(name, ttl_s)
            assert all(pipeline.execute())

    touchers = {"ours": ours, "bare": bare}
    if lmcache_installed():
        touchers["lmcache"] = _lmcache_exists(url, names)
    return touchers


def _lmcache_exists(url: str, names: list[StoreKey]) -> Callable[[], None]:
    from benchmarks.lmcache_throughput import LMCACHE_THREADS, Theirs, Values

    buffer = BufferPool(1).acquire(1)
    assert buffer is not None
    return Theirs(url, Values(names, [buffer] * len(names)), LMCACHE_THREADS).exists


def _timed_in_turns(works: Mapping[str, Callable[[], None]], repeats: int, seed: int) -> Times:
    """Wall seconds of each, interleaved in another order each time, after a first one."""
    rng = random.Random(seed)
    times: Times = defaultdict(list)
    for repeat in range(repeats + 1):
        for name in rng.sample(list(works), len(works)):
            started = time.perf_counter()
            works[name]()
            if repeat:
                times[name].append(time.perf_counter() - started)
    return times


def _add_rates(report: Report, times: Mapping[str, Sequence[float]], size_bytes: int) -> None:
    for name, series in times.items():
        report.counts[f"{name}_gb_per_s"] = size_bytes / _median(series) / 1e9


def _median(series: Sequence[float]) -> float:
    return sorted(series)[len(series) // 2]


def _empty(url: str) -> None:
    with redis.Redis.from_url(url, protocol=2) as client:
        client.flushall()
