"""Our Redis store beside LMCache's, with the same Redis server.

First the stores alone: the same values written to one server and read back, by our store and by
LMCache's native client, interleaved. Values are as large as the KV of a block (128 tokens) or
of one of LMCache's chunks (256 tokens) of the real model; as many as a prompt of about 6,000
tokens has. Both as their connectors use them, and both with as many threads as each other.
Ratios are of throughput: above one, ours is faster.

Then a session that resumes (see ``resume_ttft.py``): vLLM with our connector and a host tier,
with our connector and Redis alone, and with LMCache's connector and server, whose prompts come
back from its host memory and, when that was emptied, from Redis. Ratios are of times to first
token, LMCache's over ours: above one, ours is faster.
"""

import asyncio
import contextlib
import random
import sys
import tempfile
from pathlib import Path

import redis

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script, from anywhere

from benchmarks.lmcache_peer import (
    CHUNKS,
    add_lmcache_ratios,
    lmcache_arm,
    lmcache_server,
    our_url,
)
from benchmarks.lmcache_throughput import (
    LMCACHE_THREADS,
    LOAD_THREADS,
    SAVE_THREADS,
    Times,
    clients_for,
    make_values,
    measure,
)
from benchmarks.report import Options, Report
from benchmarks.resumes import (
    BLOCK_TOKENS,
    FULL_BLOCKS,
    KV_BYTES_PER_TOKEN,
    PROMPT_TOKENS,
    Resumes,
    our_arms,
    our_specs,
    start_servers,
)
from benchmarks.served import random_prompt
from connectors.stores.buffers import BufferPool
from spm.demo.lmcache_process import CHUNK_TOKENS
from spm.demo.redis_process import DemoRedis, running_redis
from spm.value_format import HEADER_BYTES

_POOL_BYTES = 2 << 30
_SIZES = {"": (FULL_BLOCKS, BLOCK_TOKENS), "_chunks": (CHUNKS, CHUNK_TOKENS)}
_PAIRS = {
    "": ("ours", "lmcache"),
    "_checked": ("ours checked", "lmcache"),
    f"_{LOAD_THREADS}_threads": ("ours few", "lmcache few"),
    f"_{LMCACHE_THREADS}_threads": ("ours many", "lmcache"),
}


def _throughput(report: Report, store: DemoRedis, repeats: int) -> None:
    for suffix, (count, tokens) in _SIZES.items():
        pool = BufferPool(_POOL_BYTES)
        size = HEADER_BYTES + tokens * KV_BYTES_PER_TOKEN
        values = make_values(pool, f"{tokens}-tokens", count, size, report.options.seed)
        clients = clients_for(store.url, pool, values)
        times = measure(clients, repeats, report.options.seed)
        for client in clients.values():
            client.close()
        _add_ratios(report, times, suffix)
        for name, series in times.items():
            rate = count * size / sorted(series)[len(series) // 2] / 1e9
            report.counts[f"{name.replace(' ', '_')}{suffix}_gb_per_s"] = rate
        print(f"  {repeats} times {count} values of {size} bytes each way", flush=True)
    with redis.Redis(port=store.port) as client:
        client.flushall()


def _add_ratios(report: Report, times: Times, suffix: str) -> None:
    for kind, own_threads in (("put", SAVE_THREADS), ("get", LOAD_THREADS)):
        notes = {
            "": f"throughput; ours {own_threads} threads, LMCache's {LMCACHE_THREADS}",
            "_checked": "the same, ours with checksums",
        }
        for pair, (ours, theirs) in _PAIRS.items():
            report.add_ratio(
                f"{kind}_ours_over_lmcache{suffix}{pair}",
                times[f"{theirs} {kind}"],
                times[f"{ours} {kind}"],
                notes.get(pair, "throughput; equal threads"),
            )


async def _resumes(
    stack: contextlib.AsyncExitStack, store: DemoRedis, logs: Path, report: Report
) -> Times:
    rng = random.Random(report.options.seed)
    control_url, spec = await lmcache_server(stack, logs, store)
    specs = {**our_specs(logs, our_url(store)), "lmcache": spec}
    servers = await start_servers(stack, specs, rng)
    arms = {
        **our_arms(servers),
        "lmcache": lmcache_arm(servers["lmcache"], control_url, store),
    }
    resumes = Resumes(arms, store.port)
    for number in range(1, report.repeats + 1):
        print(f"  repeat {number} of {report.repeats}", flush=True)
        await resumes.repeat(number, random_prompt(rng, PROMPT_TOKENS))
    return resumes.times


async def _measure(report: Report) -> Times:
    logs = Path(tempfile.mkdtemp(prefix="lmcache-store-"))
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(running_redis(logs))
        _throughput(report, store, 3 * report.repeats)
        return await _resumes(stack, store, logs, report)


def main() -> int:
    """Measure and report."""
    options = Options.parse(__doc__ or "")
    report = Report("lmcache_store", options, 3 if options.quick else 9)
    times = asyncio.run(_measure(report))
    add_lmcache_ratios(report, times)
    stock = times["stock gpu"]
    report.add_ratio("redis_over_stock_gpu_hit", times["redis resumed"], stock)
    report.add_ratio("host_over_stock_gpu_hit", times["host resumed"], stock)
    report.add_medians(times)
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
