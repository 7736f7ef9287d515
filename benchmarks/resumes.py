"""vLLM's servers on the real model side by side, and prompts that come back to each of them.

A prompt nobody has seen goes to every server, cold; again, as a GPU hit; and again after its
GPU cache was emptied, so that it comes from wherever else the server has it. One request at a
time, all interleaved. That a prompt came from where it should have is checked each time, by
the values that were read from Redis.
"""

import asyncio
import contextlib
import io
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import redis

from benchmarks.served import Server, random_prompt
from spm.demo.model import ensure_model
from spm.demo.server import ConnectorSettings, ServerSpec, running_server

PROMPT_TOKENS = 6000
BLOCK_TOKENS = 128
KV_BYTES_PER_TOKEN = 23_040
"""SmolLM2-135M in bf16: 30 layers, 3 KV heads of 64, K and V."""
_POOL_BLOCKS = 110
_MAX_MODEL_LEN = 8192
_HOST_BYTES = 3 << 30
FULL_BLOCKS = (PROMPT_TOKENS - 1) // BLOCK_TOKENS
WARM_SAMPLES = 3
SESSION = "resume"
REST_S = 0.4
"""Before each request: another server's compute threads still spin for a moment."""
_EXTERNAL = ("vllm:prompt_tokens_by_source_total", 'source="external_kv_transfer"')
_WARM_UP_TOKENS = 100
_REQUEST_TIMEOUT_S = 300

Times = dict[str, list[float]]
After = Callable[[list[int]], Awaitable[None]]


@dataclass(frozen=True)
class Resume:
    """One place from which a prompt comes back."""

    forget: Callable[[], Awaitable[None]]
    """Makes the server forget it everywhere before that place."""
    redis_reads: int
    """Values it then reads from Redis."""


async def _nothing(_: int) -> None:
    """For a server that stores nothing."""


@dataclass(frozen=True)
class Arm:
    """One server, and where a prompt comes back from, by name."""

    server: Server
    resumes: Mapping[str, Resume] = field(default_factory=dict)
    wait_stored: Callable[[int], Awaitable[None]] = _nothing
    """Until it has stored so many prompts."""


class Resumes:
    """Sends prompts to all arms and keeps the times; belongs to one event loop."""

    def __init__(
        self,
        arms: Mapping[str, Arm],
        redis_port: int,
        after: Mapping[str, After] | None = None,
        rest_s: float = REST_S,
    ) -> None:
        """``after``: what else is done with the prompt, by arm, after each time it resumed."""
        self.times: Times = defaultdict(list)
        self.loaded_tokens: defaultdict[str, float] = defaultdict(float)
        self._arms = arms
        self._after = after or {}
        self._rest_s = rest_s
        self._redis = redis.Redis(port=redis_port)

    async def repeat(self, number: int, prompt: list[int]) -> None:
        """Everything once, with a prompt nobody has seen. ``number`` counts from one."""
        order = list(self._arms)
        random.Random(number).shuffle(order)  # no server is always the first
        for name in order:
            self.times[f"{name} cold"].append(await self._ttft(self._arms[name], prompt))
            await self._arms[name].wait_stored(number)
        for name in order:
            arm = self._arms[name]
            if not arm.resumes:  # its resume computes everything: the cold request again
                await self._gpu_hits(name, prompt)
            for place, resume in arm.resumes.items():
                await self._resumed(name, place, resume, prompt)

    async def _gpu_hits(self, name: str, prompt: list[int]) -> None:
        for _ in range(WARM_SAMPLES):
            self.times[f"{name} gpu"].append(await self._ttft(self._arms[name], prompt))

    async def _resumed(self, name: str, place: str, resume: Resume, prompt: list[int]) -> None:
        arm = self._arms[name]
        is_first = place == next(iter(arm.resumes))
        for _ in range(WARM_SAMPLES):
            if is_first:
                self.times[f"{name} gpu"].append(await self._ttft(arm, prompt))
            await resume.forget()
            before = await self._loaded(arm), self._redis_reads()
            self.times[f"{name} {place}"].append(await self._ttft(arm, prompt))
            loaded, read = await self._loaded(arm) - before[0], self._redis_reads() - before[1]
            assert loaded == FULL_BLOCKS * BLOCK_TOKENS, f"{name} {place}: {loaded} tokens loaded"
            assert read == resume.redis_reads, f"{name} {place}: {read} values read from Redis"
            self.loaded_tokens[f"{name} {place}"] += loaded
            if name in self._after:
                await self._after[name](prompt)

    async def _ttft(self, arm: Arm, prompt: list[int]) -> float:
        return await ttft(arm.server, prompt, self._rest_s)

    def _redis_reads(self) -> int:
        said: dict[str, dict[str, int]] = self._redis.info("commandstats")
        return said.get("cmdstat_get", {}).get("calls", 0)

    async def _loaded(self, arm: Arm) -> float:
        return await arm.server.metric(*_EXTERNAL)


async def ttft(server: Server, prompt: list[int], rest_s: float = REST_S) -> float:
    """Seconds to the first token, after a rest."""
    await asyncio.sleep(rest_s)
    return await server.ttft(prompt, {"session_id": SESSION})


def our_specs(logs: Path, url: str) -> dict[str, ServerSpec]:
    """Without a connector, with our host tier alone, and with ``url`` alone."""
    settings: dict[str, ConnectorSettings | None] = {
        "stock": None,
        "host": ConnectorSettings(_HOST_BYTES),
        "redis": ConnectorSettings(0, url),
    }
    return {name: server_spec(logs, name, connector) for name, connector in settings.items()}


def server_spec(logs: Path, name: str, connector: ConnectorSettings | None) -> ServerSpec:
    """A server whose pool holds two prompts."""
    return ServerSpec(
        model=ensure_model(),
        pool_blocks=_POOL_BLOCKS,
        log_path=logs / f"vllm-{name}.log",
        connector=connector,
        block_size=BLOCK_TOKENS,
        max_model_len=_MAX_MODEL_LEN,
        dev_endpoints=True,
        management=name == "redis",
    )


def our_arms(servers: Mapping[str, Server]) -> dict[str, Arm]:
    """The servers of :func:`our_specs`."""

    def stored(name: str, metric: str) -> Callable[[int], Awaitable[None]]:
        return lambda prompts: servers[name].wait_for_metric(metric, prompts * FULL_BLOCKS)

    host = {"resumed": Resume(servers["host"].drop_gpu_cache, 0)}
    remote = {"resumed": Resume(servers["redis"].drop_gpu_cache, FULL_BLOCKS)}
    return {
        "stock": Arm(servers["stock"]),
        "host": Arm(servers["host"], host, stored("host", "spm:host_blocks")),
        "redis": Arm(servers["redis"], remote, stored("redis", "spm:remote_known_blocks")),
    }


async def start_servers(
    stack: contextlib.AsyncExitStack, specs: Mapping[str, ServerSpec], rng: random.Random
) -> dict[str, Server]:
    """Start all at once, each with one short request; they end with ``stack``."""
    started = time.monotonic()
    print(f"  starting {len(specs)} servers: {', '.join(specs)} ...", end="", flush=True)
    with contextlib.redirect_stdout(io.StringIO()):  # each shows its own progress
        urls = await asyncio.gather(
            *(stack.enter_async_context(running_server(spec)) for spec in specs.values())
        )
    print(f" ready after {time.monotonic() - started:.0f} s", flush=True)
    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
    http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
    servers = {name: Server(http, url) for name, url in zip(specs, urls, strict=True)}
    for server in servers.values():
        await server.ttft(random_prompt(rng, _WARM_UP_TOKENS))
    return servers
