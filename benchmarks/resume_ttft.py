"""Time to first token of a session that resumes, by where its KV comes from.

Three of vLLM's OpenAI servers run side by side on the real model: without the connector,
with a host tier, and with Redis alone. Each repeat sends a new prompt of about 6,000 tokens
to each of them, cold; again, as a GPU hit; and again after its GPU cache was emptied, so that
it comes from the host tier or from Redis. On the server with Redis, the cache is emptied once
more, a prefetch of the session asked for and waited for, and the prompt sent again. One request
at a time, all interleaved.

``--with-lmcache``: a fourth beside them, with LMCache's own connector and server and the same
Redis. That takes longer.
"""

import asyncio
import contextlib
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script, from anywhere

from benchmarks import bare_redis
from benchmarks.lmcache_peer import add_lmcache_ratios, lmcache_arm, lmcache_server, our_url
from benchmarks.report import Options, Report
from benchmarks.resumes import (
    BLOCK_TOKENS,
    FULL_BLOCKS,
    KV_BYTES_PER_TOKEN,
    PROMPT_TOKENS,
    REST_S,
    SESSION,
    WARM_SAMPLES,
    Resumes,
    Times,
    our_arms,
    our_specs,
    start_servers,
    ttft,
)
from benchmarks.served import Server, random_prompt
from spm.client import AsyncSpmClient
from spm.demo.redis_process import DemoRedis, running_redis


class Prefetch:
    """A prefetch of the session after each resume from Redis, and the prompt as a GPU hit."""

    def __init__(self, server: Server, spm: AsyncSpmClient) -> None:
        self._server = server
        self._spm = spm
        self.seconds: list[float] = []
        self.ttfts: list[float] = []

    async def __call__(self, prompt: list[int]) -> None:
        """On a server that has the prompt stored."""
        await self._server.drop_gpu_cache()
        self.seconds.append(await self._prefetch())
        before = await self._server.sources()
        self.ttfts.append(await ttft(self._server, prompt))
        found = await self._server.settled_sources(before, len(prompt))
        assert found.gpu == FULL_BLOCKS * BLOCK_TOKENS, f"not a GPU hit: {found}"

    async def _prefetch(self) -> float:
        """Seconds until a prefetch of the whole session is seen to be done."""
        await asyncio.sleep(REST_S)
        started = time.perf_counter()
        asked = await self._spm.prefetch(SESSION)
        done = await self._spm.wait(asked.operation_id)
        took_s = time.perf_counter() - started
        assert done.status == "ok", done.raw
        return took_s


async def _resumes(
    stack: contextlib.AsyncExitStack, store: DemoRedis, logs: Path, report: Report
) -> Times:
    rng = random.Random(report.options.seed)
    specs = our_specs(logs, our_url(store))
    if report.options.with_lmcache:
        control_url, specs["lmcache"] = await lmcache_server(stack, logs, store)
    servers = await start_servers(stack, specs, rng)
    arms = our_arms(servers)
    if report.options.with_lmcache:
        arms["lmcache"] = lmcache_arm(servers["lmcache"], control_url, store)
    spm = await stack.enter_async_context(AsyncSpmClient(servers["redis"].url))
    prefetch = Prefetch(servers["redis"], spm)
    resumes = Resumes(arms, store.port, {"redis": prefetch})
    for number in range(1, report.repeats + 1):
        print(f"  repeat {number} of {report.repeats}", flush=True)
        await resumes.repeat(number, random_prompt(rng, PROMPT_TOKENS))
    for name, tokens in resumes.loaded_tokens.items():
        report.counts[f"loaded_tokens_{name.removesuffix(' resumed').replace(' ', '_')}"] = tokens
    return {
        **resumes.times,
        "redis prefetch": prefetch.seconds,
        "redis prefetched": prefetch.ttfts,
    }


async def _serve_and_measure(report: Report) -> Times:
    logs = Path(tempfile.mkdtemp(prefix="resume-ttft-"))
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(running_redis(logs))
        times = await _resumes(stack, store, logs, report)
        size, seed = BLOCK_TOKENS * KV_BYTES_PER_TOKEN, report.options.seed
        bare = bare_redis.measure(store.url, FULL_BLOCKS, size, 2 * report.repeats, seed)
    report.add_ratio("store_over_bare_redis", bare.bare_put, bare.put)
    report.add_ratio("load_over_bare_redis", bare.bare_get, bare.get)
    return times


def main() -> int:
    """Measure and report."""
    options = Options.parse(__doc__ or "", offer_lmcache=True)
    report = Report("resume_ttft", options, 3 if options.quick else 9)
    times = asyncio.run(_serve_and_measure(report))
    report.add_ratio("prefetch_over_gpu_hit", times["redis prefetched"], times["redis gpu"])
    report.add_ratio("redis_over_gpu_hit", times["redis resumed"], times["redis gpu"])
    report.add_ratio("host_over_gpu_hit", times["host resumed"], times["host gpu"])
    report.add_ratio("prefetch_over_stock_gpu_hit", times["redis prefetched"], times["stock gpu"])
    report.add_ratio("redis_over_stock_gpu_hit", times["redis resumed"], times["stock gpu"])
    report.add_ratio("host_over_stock_gpu_hit", times["host resumed"], times["stock gpu"])
    cold = [seconds for seconds in times["stock cold"] for _ in range(WARM_SAMPLES)]
    report.add_ratio("recompute_over_redis", cold, times["redis resumed"])
    report.add_ratio("recompute_over_host", cold, times["host resumed"])
    report.add_ratio("cold_on_over_off", times["redis cold"], times["stock cold"])
    report.add_ratio("cold_host_on_over_off", times["host cold"], times["stock cold"])
    if options.with_lmcache:
        add_lmcache_ratios(report, times)
    report.add_medians(times)
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
