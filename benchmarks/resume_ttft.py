"""Time to first token of a session that resumes, by where its KV comes from.

Three of vLLM's OpenAI servers run side by side on the real model: without the connector,
with a host tier, and with Redis alone. Each repeat sends a new prompt of about 6,000 tokens
to each of them, cold; again, as a GPU hit; and again after its GPU cache was emptied, so that
it comes from the host tier or from Redis. One request at a time, all interleaved.
"""

import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import aiohttp
import redis

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script, from anywhere

from benchmarks import bare_redis
from benchmarks.report import Options, Report
from spm.demo.model import ensure_model
from spm.demo.redis_process import DemoRedis, running_redis
from spm.demo.server import SERVED_NAME, ConnectorSettings, ServerSpec, running_server

_PROMPT_TOKENS = 6000
_BLOCK_TOKENS = 128
_KV_BYTES_PER_TOKEN = 23_040
"""SmolLM2-135M in bf16: 30 layers, 3 KV heads of 64, K and V."""
_POOL_BLOCKS = 110
_MAX_MODEL_LEN = 8192
_VOCABULARY = 40_000
_HOST_BYTES = 3 << 30
_SETTLE_TIMEOUT_S = 30.0
_WARM_SAMPLES = 3
_REST_S = 0.4
"""Before each request: another server's compute threads still spin for a moment."""

Times = dict[str, list[float]]


class Server:
    """One running server and how to ask it."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url

    async def ttft(self, prompt: list[int]) -> float:
        """Seconds from sending the request to the first token."""
        body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 2, "temperature": 0}
        body |= {"stream": True, "session_id": "resume"}
        first: float | None = None
        await asyncio.sleep(_REST_S)
        started = time.perf_counter()
        async with self._http.post(f"{self._url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if first is None and line.startswith(b"data: {"):
                    assert "choices" in json.loads(line[6:])
                    first = time.perf_counter() - started
        assert first is not None
        return first

    async def drop_gpu_cache(self) -> None:
        """Empty the GPU pool's prefix cache; other tiers stay."""
        give_up_s = time.monotonic() + _SETTLE_TIMEOUT_S
        while time.monotonic() < give_up_s:
            async with self._http.post(f"{self._url}/reset_prefix_cache") as response:
                if (await response.json())["success"]:
                    return
            await asyncio.sleep(0.1)
        raise TimeoutError("the prefix cache could not be reset")

    async def metric(self, name: str, label: str = "") -> float:
        """Sum of the samples of ``name`` that carry ``label``."""
        async with self._http.get(f"{self._url}/metrics") as response:
            lines = (await response.text()).splitlines()
        wanted = [line for line in lines if line.startswith(name + "{") and label in line]
        return sum(float(line.rpartition(" ")[2]) for line in wanted)

    async def wait_for_host_blocks(self, count: int) -> None:
        """Until the host tier holds so many blocks."""
        give_up_s = time.monotonic() + _SETTLE_TIMEOUT_S
        while await self.metric("spm:host_blocks") < count:
            if time.monotonic() > give_up_s:
                raise TimeoutError("blocks did not reach the host tier")
            await asyncio.sleep(0.1)


async def _repeat(
    times: Times, number: int, prompt: list[int], servers: dict[str, Server], store: DemoRedis
) -> None:
    """Everything once, with a prompt nobody has seen."""
    order = list(servers)
    random.Random(number).shuffle(order)  # no server is always the first
    blocks = number * (_PROMPT_TOKENS // _BLOCK_TOKENS)
    for name in order:
        server = servers[name]
        times[f"{name} cold"].append(await server.ttft(prompt))
        if name == "host":
            await server.wait_for_host_blocks(blocks)
        if name == "redis":
            await _wait_for_keys(store, blocks)
    for name in order:
        server = servers[name]
        for _ in range(_WARM_SAMPLES):
            times[f"{name} gpu"].append(await server.ttft(prompt))
            if name != "stock":  # there, a resume computes everything: the cold request again
                await server.drop_gpu_cache()
                times[f"{name} resumed"].append(await server.ttft(prompt))


async def _wait_for_keys(store: DemoRedis, count: int) -> None:
    give_up_s = time.monotonic() + _SETTLE_TIMEOUT_S
    with redis.Redis.from_url(store.url) as client:
        while int(client.dbsize()) < count:
            if time.monotonic() > give_up_s:
                raise TimeoutError("blocks did not reach Redis")
            await asyncio.sleep(0.1)


async def _check_sources(servers: dict[str, Server], repeats: int) -> dict[str, float]:
    """That the resumed prompts really came from where they should have."""
    hit_tokens = _PROMPT_TOKENS // _BLOCK_TOKENS * _BLOCK_TOKENS
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
            )
            url = await stack.enter_async_context(running_server(spec))
            servers[name] = Server(http, url)
            await servers[name].ttft(_prompt(rng, 100))
        for number in range(1, repeats + 1):
            print(f"  repeat {number} of {repeats}", flush=True)
            prompt = _prompt(rng, _PROMPT_TOKENS)
            await _repeat(times, number, prompt, servers, store)
        report.counts |= await _check_sources(servers, repeats)
        values = _PROMPT_TOKENS // _BLOCK_TOKENS
        payload_bytes = _BLOCK_TOKENS * _KV_BYTES_PER_TOKEN
        bare = bare_redis.measure(store.url, values, payload_bytes, 2 * repeats, options.seed)
    report.add_ratio("store_over_bare_redis", bare.bare_put, bare.put)
    report.add_ratio("load_over_bare_redis", bare.bare_get, bare.get)
    return times


def _prompt(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(100, _VOCABULARY) for _ in range(count)]


def main() -> int:
    """Measure and report."""
    options = Options.parse(__doc__ or "")
    repeats = 3 if options.quick else 9
    report = Report("resume_ttft", options, repeats)
    times = asyncio.run(_serve_and_measure(options, repeats, report))
    report.add_ratio("redis_over_gpu_hit", times["redis resumed"], times["redis gpu"])
    report.add_ratio("host_over_gpu_hit", times["host resumed"], times["host gpu"])
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
