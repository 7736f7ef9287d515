"""What a store that does not answer any more costs requests that do not need it.

Two of vLLM's OpenAI servers on the real model: without the connector, and with host memory and
a Redis, which is frozen (SIGSTOP: its connections stay open) once some sessions are stored in
it. As soon as the connector has given it up, prompts that nobody has seen, which name no session,
go to both servers: the same ones, a round here, a round there, in changing order. At the end
Redis goes on, and has to be used again.
"""

import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script, from anywhere

from benchmarks.report import Options, Report, bootstrapped
from benchmarks.resumes import start_servers
from benchmarks.served import Server, random_prompt
from benchmarks.soak_redis import SoakRedis
from benchmarks.soak_schedule import FaultKind
from spm.client import AsyncSpmClient
from spm.demo.model import ensure_model
from spm.demo.server import ConnectorSettings, ServerSpec

_POOL_BLOCKS = 400
_HOST_BYTES = 256 << 20
_STORED_PROMPTS = 6
_PROMPT_TOKENS = (200, 600)
_AT_ONCE = 2
_PER_ROUND = 16
_REST_S = 0.4
_BREAKER_TIMEOUT_S = 60.0
_POLL_S = 0.2
_CLOSED = "closed"
OURS, STOCK = "frozen", "stock"

Rounds = list[list[float]]


def percentile(seconds: Sequence[float], share: float) -> float:
    """The value that ``share`` of them do not exceed."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def percentile_ratio(ours: Rounds, stock: Rounds, share: float, seed: int) -> dict[str, float]:
    """Of all samples, with a bootstrap interval of 95 % over rounds, drawn as pairs."""

    def ratio(pairs: Sequence[tuple[list[float], list[float]]]) -> float:
        a = percentile([one for pair in pairs for one in pair[0]], share)
        return a / percentile([one for pair in pairs for one in pair[1]], share)

    return bootstrapped(list(zip(ours, stock, strict=True)), ratio, seed)


async def _breaker(spm: AsyncSpmClient) -> str:
    (engine,) = (await spm.status()).engines
    assert engine.remote is not None
    return engine.remote.breaker


async def _freeze(redis: SoakRedis, server: Server, spm: AsyncSpmClient, rng: random.Random) -> int:
    """Store some prompts, freeze, and send requests until the store is given up; how many."""
    for number in range(_STORED_PROMPTS):
        hint = {"agent_hint": {"session_id": f"stored-{number}"}}
        await server.ttft(random_prompt(rng, _PROMPT_TOKENS[1]), hint)
    await server.wait_for_metric("spm:remote_known_blocks", 1)
    redis.begin(FaultKind.FROZEN)
    give_up_s, sent = time.monotonic() + _BREAKER_TIMEOUT_S, 0
    while await _breaker(spm) == _CLOSED:
        if time.monotonic() > give_up_s:
            raise TimeoutError("the connector did not give up a frozen store")
        await server.ttft(random_prompt(rng, _PROMPT_TOKENS[0]))
        sent += 1
    return sent


async def _thaw(redis: SoakRedis, server: Server, spm: AsyncSpmClient, rng: random.Random) -> float:
    """Seconds until a store that answers again is used again."""
    redis.end(FaultKind.FROZEN)
    started_s = time.monotonic()
    while await _breaker(spm) != _CLOSED:
        if time.monotonic() > started_s + _BREAKER_TIMEOUT_S:
            raise TimeoutError("the store is back and is not used")
        await server.ttft(random_prompt(rng, _PROMPT_TOKENS[0]))
        await asyncio.sleep(_POLL_S)
    return time.monotonic() - started_s


def _prompts(rng: random.Random) -> list[list[int]]:
    return [random_prompt(rng, rng.randint(*_PROMPT_TOKENS)) for _ in range(_PER_ROUND)]


async def _round(server: Server, prompts: Sequence[list[int]]) -> list[float]:
    """Some clients that send one request after the other."""

    async def client(number: int) -> list[float]:
        return [await server.ttft(prompt) for prompt in prompts[number::_AT_ONCE]]

    await asyncio.sleep(_REST_S)
    both = await asyncio.gather(*map(client, range(_AT_ONCE)))
    return [seconds for one in both for seconds in one]


async def _measure(report: Report, directory: Path) -> dict[str, Rounds]:
    rng = random.Random(report.options.seed)
    redis = SoakRedis(directory, report.options.seed)
    times: dict[str, Rounds] = {OURS: [], STOCK: []}
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(redis.stop)
        redis.start()
        connector = ConnectorSettings(_HOST_BYTES, redis.url)
        specs = {
            name: ServerSpec(
                model=ensure_model(),
                pool_blocks=_POOL_BLOCKS,
                log_path=directory / f"vllm-{name}.log",
                connector=connector if name == OURS else None,
                management=name == OURS,
            )
            for name in (OURS, STOCK)
        }
        servers = await start_servers(stack, specs, rng)
        spm = await stack.enter_async_context(AsyncSpmClient(servers[OURS].url))
        report.counts["requests_until_open"] = await _freeze(redis, servers[OURS], spm, rng)
        for server in servers.values():  # warm up: these are not counted
            await _round(server, _prompts(rng))
        for number in range(1, report.repeats + 1):
            prompts = _prompts(rng)
            for name in rng.sample(list(specs), len(specs)):
                times[name].append(await _round(servers[name], prompts))
            state = await _breaker(spm)
            worst = ", ".join(f"{max(rounds[-1]):.2f} s {name}" for name, rounds in times.items())
            print(f"  round {number} of {report.repeats}: at most {worst}; {state}", flush=True)
            assert state != _CLOSED, "a frozen store is in use"
        report.counts["used_again_after_s"] = await _thaw(redis, servers[OURS], spm, rng)
    return times


def main() -> int:
    """Measure and report."""
    options = Options.parse(__doc__ or "")
    report = Report("frozen_store", options, 8 if options.quick else 40)
    times = asyncio.run(_measure(report, Path(tempfile.mkdtemp(prefix="frozen-store-"))))
    for share in (50, 90, 99):
        key = f"frozen_ttft_p{share}_over_stock"
        ratio = percentile_ratio(times[OURS], times[STOCK], share / 100, options.seed)
        report.ratios[key] = ratio
        report.notes[key] = ""
    for name, rounds in times.items():
        seconds = [one for series in rounds for one in series]
        report.counts[f"{name}_p99_s"] = percentile(seconds, 0.99)
        report.counts[f"{name}_median_s"] = percentile(seconds, 0.5)
    report.counts["requests_each"] = len(times[OURS]) * _PER_ROUND
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
