"""All modes' servers side by side, and rounds in which one of them after the other works."""

import asyncio
import contextlib
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import redis

from benchmarks.agents.e2e_client import Completions
from benchmarks.agents.e2e_content import Content
from benchmarks.agents.e2e_costs import Costs
from benchmarks.agents.e2e_counters import Counters, parse_counters, read_metrics, watched_pool
from benchmarks.agents.e2e_guides import Prefetching
from benchmarks.agents.e2e_loop import ClosedLoop
from benchmarks.agents.e2e_measures import RoundMeasures, RoundName, measure_round
from benchmarks.agents.e2e_modes import (
    BLOCK_TOKENS,
    LMCACHE,
    MAX_SEQS,
    MODES,
    STEP_TOKENS,
    STOCK,
    Mode,
    guide_for,
    rotated,
    server_spec,
)
from benchmarks.agents.e2e_offloading import NAME, try_offloading
from benchmarks.agents.e2e_probe import Probe
from benchmarks.agents.workload import Shape, Trajectory, draw_tasks
from benchmarks.lmcache_peer import start_lmcache
from benchmarks.resumes import KV_BYTES_PER_TOKEN, start_servers
from benchmarks.served import Server
from spm.demo.lmcache_process import LMCacheSpec
from spm.demo.redis_process import DemoRedis, running_redis

_REQUEST_TIMEOUT_S = 300
_KEEP_CONNECTION_S = 2.0
"""vLLM closes an idle connection after 5 s; ours are closed before."""
_POLL_S = 0.2
_SETTLE_TIMEOUT_S = 15.0
_QUIET_S = 0.8
_WARM_UP_TASKS = 2


@dataclass(frozen=True)
class Plan:
    """What is run: ``tasks`` a round, ``concurrency`` at a time."""

    modes: tuple[str, ...]
    rounds: int
    shape: Shape
    tasks: int
    concurrency: int
    seed: int
    with_offloading: bool = False
    """Try vLLM's own offloading connector, too."""

    def workload_seed(self, round_number: int) -> int:
        """Tasks and tokens of a round are drawn from it. Round -1 warms up."""
        return self.seed * 1000 + round_number

    def draw(self, round_number: int) -> list[Trajectory]:
        """The round's tasks, the same for every mode."""
        return draw_tasks(self.shape, self.tasks, self.workload_seed(round_number))

    @property
    def need_blocks(self) -> int:
        """What ``concurrency`` sessions hold at their longest, on the average of all tasks."""
        tasks = [task for number in range(self.rounds) for task in self.draw(number)]
        own = sum(task.longest_tokens - task.system_tokens for task in tasks) / len(tasks)
        return -(-(self.shape.system_tokens + self.concurrency * round(own)) // BLOCK_TOKENS)

    @property
    def pool_blocks(self) -> int:
        """Half of that."""
        return self.need_blocks // 2


@dataclass
class Outcome:
    """Of a whole run. ``costs`` are None without stock."""

    measures: list[RoundMeasures] = field(default_factory=list)
    costs: Costs | None = None
    not_run: dict[str, str] = field(default_factory=dict)
    """What was tried and does not run here, and why."""


@dataclass(frozen=True)
class Setup:
    """What runs: a server for each mode, and what they store in."""

    http: aiohttp.ClientSession
    servers: Mapping[str, Server]
    store: DemoRedis
    lmcache: LMCacheSpec | None


async def run_plan(plan: Plan, logs: Path, show: Callable[[str], None] = print) -> Outcome:
    """Start everything, run all rounds, stop everything."""
    # Threads that spin long after their work starve whoever shares their core.
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    outcome = Outcome()
    if plan.with_offloading:
        said = await try_offloading(logs / "vllm-offloading.log", plan.pool_blocks)
        outcome.not_run[NAME] = said
        show(f"  {NAME}: {said}")
    loaded: dict[str, list[Counters]] = {mode: [] for mode in plan.modes}
    async with contextlib.AsyncExitStack() as stack:
        setup = await _start(stack, plan, logs)
        stock = Completions(setup.http, setup.servers[STOCK].url)
        probe = Probe(stock.ask, random.Random(plan.seed))
        for mode in plan.modes:
            await _round(plan, setup, MODES[mode], -1)
        for number in range(plan.rounds):
            for mode in rotated(plan.modes, number):
                measured, moved = await _round(plan, setup, MODES[mode], number)
                outcome.measures.append(measured)
                loaded[mode].append(moved)
                show(f"  {_line(measured)}")
            await probe.measure()
            await setup.servers[STOCK].drop_gpu_cache()
    outcome.costs = _costs(plan, probe, loaded)
    return outcome


async def _start(stack: contextlib.AsyncExitStack, plan: Plan, logs: Path) -> Setup:
    store = await stack.enter_async_context(running_redis(logs))
    lmcache = None
    if LMCACHE in plan.modes:
        lmcache = await start_lmcache(stack, logs / "lmcache-server.log", store)
    specs = {
        name: server_spec(
            MODES[name], logs, plan.pool_blocks, store.url, lmcache.url if lmcache else None
        )
        for name in plan.modes
    }
    servers = await start_servers(stack, specs, random.Random(plan.seed))
    http = await stack.enter_async_context(
        aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_CONNECTION_S),
        )
    )
    return Setup(http, servers, store, lmcache)


async def _round(
    plan: Plan, setup: Setup, mode: Mode, number: int
) -> tuple[RoundMeasures, Counters]:
    """One closed loop from an empty cache; afterwards nothing of it is left."""
    server = setup.servers[mode.name]
    tasks = plan.draw(number) if number >= 0 else plan.draw(number)[:_WARM_UP_TASKS]
    content = Content(plan.workload_seed(number))
    tiers = mode.name != LMCACHE
    before = parse_counters(await read_metrics(setup.http, server.url), tiers=tiers)
    async with guide_for(mode, server.url, plan.shape) as guide:
        loop = ClosedLoop(Completions(setup.http, server.url).ask, guide, content)
        async with watched_pool(setup.http, server.url) as pool:
            log = await loop.run(tasks, plan.concurrency)
    prompts = sum(turn.prompt_tokens for turn in log.turns)
    moved = await _settled(setup.http, server.url, before, prompts, tiers=tiers)
    await _forget(setup, mode)
    measured = measure_round(
        RoundName(mode.name, number, plan.workload_seed(number)),
        log,
        moved,
        pool,
        block_tokens=BLOCK_TOKENS,
        token_bytes=KV_BYTES_PER_TOKEN,
        management_failures=guide.failures if isinstance(guide, Prefetching) else 0,
    )
    return measured, moved


async def _settled(
    http: aiohttp.ClientSession, url: str, before: Counters, prompts: int, *, tiers: bool
) -> Counters:
    """The counters since ``before``, once they tell where all prompt tokens came from, or as
    they are after some seconds: a request that was preempted may be told differently."""
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + _SETTLE_TIMEOUT_S / 5
    while True:
        moved = parse_counters(await read_metrics(http, url), tiers=tiers) - before
        if moved.sources.accounts_for(prompts) or loop.time() > give_up_s:
            return moved
        await asyncio.sleep(_POLL_S)


async def _forget(setup: Setup, mode: Mode) -> None:
    """Wait until it stores nothing more, and empty every tier."""
    with redis.Redis(port=setup.store.port, db=mode.database or 0) as database:
        if mode.database is not None:
            await _quiet(database)
        await setup.servers[mode.name].drop_gpu_cache(with_tiers=mode.is_ours)
        if mode.name == LMCACHE and setup.lmcache is not None:
            async with setup.http.post(f"{setup.lmcache.control_url}/cache/clear") as response:
                response.raise_for_status()
        if mode.database is not None:
            database.flushdb()
    await asyncio.sleep(_QUIET_S)


async def _quiet(database: redis.Redis) -> None:
    """Until no more keys arrive."""
    loop = asyncio.get_running_loop()
    count, since_s = database.dbsize(), loop.time()
    give_up_s = since_s + _SETTLE_TIMEOUT_S
    while loop.time() < min(give_up_s, since_s + _QUIET_S):
        await asyncio.sleep(_POLL_S)
        now = database.dbsize()
        if now != count:
            count, since_s = now, loop.time()


def _costs(plan: Plan, probe: Probe, loaded: Mapping[str, Sequence[Counters]]) -> Costs:
    host, remote = loaded.get("host", ()), loaded.get("redis", ())
    return Costs(
        prefill=probe.prefill,
        decode=probe.decode,
        request_overhead_s=probe.request_overhead_s,
        load_host_block_s=_per_block(host),
        load_remote_block_s=_per_block(remote),
        block_bytes=BLOCK_TOKENS * KV_BYTES_PER_TOKEN,
        block_tokens=BLOCK_TOKENS,
        step_tokens=STEP_TOKENS,
        max_seqs=MAX_SEQS,
        pool_blocks=plan.pool_blocks,
    )


def _per_block(moved: Sequence[Counters]) -> float | None:
    blocks = sum(one.loaded_host_blocks + one.loaded_remote_blocks for one in moved)
    return sum(one.load_s for one in moved) / blocks if blocks else None


def _line(one: RoundMeasures) -> str:
    return (
        f"round {one.round + 1} {one.mode:15} {one.seconds:5.1f} s  "
        f"TTFT resumed {one.ttft_resumed.mean_s:5.2f} s  E2E {one.e2e_mean_s:5.1f} s  "
        f"hit {one.hit_rate:4.0%}  computed {one.computed_tokens:6,}  "
        f"pool {one.pool_peak:4.0%}"
    )
