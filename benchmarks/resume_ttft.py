"""Time to first token of a session that resumes, by where its KV comes from.

Three of vLLM's OpenAI servers run side by side on the real model: without the connector,
with a host tier, and with Redis alone. Each repeat sends a new prompt of about 6,000 tokens
to each of them, cold; again, as a GPU hit; and again after its GPU cache was emptied, so that
it comes from the host tier or from Redis. On the server with Redis, the cache is emptied once
more, a prefetch of the session asked for and waited for, and the prompt sent again. One request
at a time, all interleaved.
"""

import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script, from anywhere

from benchmarks import bare_redis
from benchmarks.report import Options, Report
from benchmarks.served import Server, random_prompt
from spm.client import AsyncSpmClient
from spm.demo.model import ensure_model
from spm.demo.redis_process import running_redis
from spm.demo.server import ConnectorSettings, ServerSpec, running_server

_PROMPT_TOKENS = 6000
_BLOCK_TOKENS = 128
_KV_BYTES_PER_TOKEN = 23_040
"""SmolLM2-135M in bf16: 30 layers, 3 KV heads of 64, K and V."""
_POOL_BLOCKS = 110
_MAX_MODEL_LEN = 8192
_HOST_BYTES = 3 << 30
_FULL_BLOCKS = (_PROMPT_TOKENS - 1) // _BLOCK_TOKENS
_SESSION = "resume"
_STORED = {"host": "spm:host_blocks", "redis": "spm:remote_known_blocks"}
_WARM_SAMPLES = 3
_REST_S = 0.4
"""Before each request: another server's compute threads still spin for a moment."""

Times = dict[str, list[float]]


async def _repeat(
    times: Times, number: int, prompt: list[int], servers: dict[str, Server], spm: AsyncSpmClient
) -> None:
    """Everything once, with a prompt nobody has seen."""
    order = list(servers)
    random.Random(number).shuffle(order)  # no server is always the first
    for name in order:
        server = servers[name]
        times[f"{name} cold"].append(await _ttft(server, prompt))
        if name in _STORED:
            await server.wait_for_metric(_STORED[name], number * _FULL_BLOCKS)
    for name in order:
        server = servers[name]
        for _ in range(_WARM_SAMPLES):
            times[f"{name} gpu"].append(await _ttft(server, prompt))
            if name == "stock":  # there, a resume computes everything: the cold request again
                continue
            await server.drop_gpu_cache()
            times[f"{name} resumed"].append(await _ttft(server, prompt))
            if name == "redis":
                await server.drop_gpu_cache()
                times["redis prefetch"].append(await _prefetch(spm))
                times["redis prefetched"].append(await _hit(server, prompt))


async def _ttft(server: Server, prompt: list[int]) -> float:
    await asyncio.sleep(_REST_S)
    return await server.ttft(prompt, {"session_id": _SESSION})


async def _prefetch(spm: AsyncSpmClient) -> float:
    """Seconds until a prefetch of the whole session is seen to be done."""
    await asyncio.sleep(_REST_S)
    started = time.perf_counter()
    asked = await spm.prefetch(_SESSION)
    done = await spm.wait(asked.operation_id)
    took_s = time.perf_counter() - started
    assert done.status == "ok", done.raw
    return took_s


async def _hit(server: Server, prompt: list[int]) -> float:
    """The same as :func:`_ttft`, of a request whose full blocks are all in the GPU pool."""
    before = await server.sources()
    seconds = await _ttft(server, prompt)
    found = await server.settled_sources(before, len(prompt))
    assert found.gpu == _FULL_BLOCKS * _BLOCK_TOKENS, f"not a GPU hit: {found}"
    return seconds


async def _check_sources(servers: dict[str, Server], repeats: int) -> dict[str, float]:
    """That the resumed prompts really came from where they should have."""
    hit_tokens = _FULL_BLOCKS * _BLOCK_TOKENS
    loaded = {}
    for name, tier in (("host", "host"), ("redis", "remote")):
        tokens = await servers[name].metric("spm:loaded_tokens_total", f'tier="{tier}"')
        assert tokens >= repeats * hit_tokens, f"{name}: {tokens} tokens loaded"
        loaded[f"loaded_tokens_{name}"] = tokens
    return loaded


async def _serve_and_measure(options: Options, repeats: int, report: Report) -> Times:
    times: Times = defaultdict(list)
    rng = random.Random(options.seed)
    model = ensure_model()
    logs = Path(tempfile.mkdtemp(prefix="resume-ttft-"))
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(running_redis(logs))
        settings: dict[str, ConnectorSettings | None] = {
            "stock": None,
            "host": ConnectorSettings(_HOST_BYTES),
            "redis": ConnectorSettings(0, store.url),
        }
        timeout = aiohttp.ClientTimeout(total=300)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        servers = {}
        for name, connector in settings.items():
            spec = ServerSpec(
                model=model,
                pool_blocks=_POOL_BLOCKS,
                log_path=logs / f"{name}.log",
                connector=connector,
                block_size=_BLOCK_TOKENS,
                max_model_len=_MAX_MODEL_LEN,
                dev_endpoints=True,
                management=name == "redis",
            )
            url = await stack.enter_async_context(running_server(spec))
            servers[name] = Server(http, url)
            await servers[name].ttft(random_prompt(rng, 100))
        spm = await stack.enter_async_context(AsyncSpmClient(servers["redis"].url))
        for number in range(1, repeats + 1):
            print(f"  repeat {number} of {repeats}", flush=True)
            prompt = random_prompt(rng, _PROMPT_TOKENS)
            await _repeat(times, number, prompt, servers, spm)
        report.counts |= await _check_sources(servers, repeats)
        payload_bytes = _BLOCK_TOKENS * _KV_BYTES_PER_TOKEN
        bare = bare_redis.measure(store.url, _FULL_BLOCKS, payload_bytes, 2 * repeats, options.seed)
    report.add_ratio("store_over_bare_redis", bare.bare_put, bare.put)
    report.add_ratio("load_over_bare_redis", bare.bare_get, bare.get)
    return times


def main() -> int:
    """Measure and report."""
    options = Options.parse(__doc__ or "")
    repeats = 3 if options.quick else 9
    report = Report("resume_ttft", options, repeats)
    times = asyncio.run(_serve_and_measure(options, repeats, report))
    report.add_ratio("prefetch_over_gpu_hit", times["redis prefetched"], times["redis gpu"])
    report.add_ratio("redis_over_gpu_hit", times["redis resumed"], times["redis gpu"])
    report.add_ratio("host_over_gpu_hit", times["host resumed"], times["host gpu"])
    report.add_ratio("prefetch_over_stock_gpu_hit", times["redis prefetched"], times["stock gpu"])
    report.add_ratio("redis_over_stock_gpu_hit", times["redis resumed"], times["stock gpu"])
    report.add_ratio("host_over_stock_gpu_hit", times["host resumed"], times["stock gpu"])
    cold = [seconds for seconds in times["stock cold"] for _ in range(_WARM_SAMPLES)]
    report.add_ratio("recompute_over_redis", cold, times["redis resumed"])
    report.add_ratio("recompute_over_host", cold, times["host resumed"])
    report.add_ratio("cold_on_over_off", times["redis cold"], times["stock cold"])
    report.add_ratio("cold_host_on_over_off", times["host cold"], times["stock cold"])
    for name, series in times.items():
        report.counts[f"{name.replace(' ', '_')}_median_s"] = sorted(series)[len(series) // 2]
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
