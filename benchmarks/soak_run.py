"""One soak from the start of its servers to the judge's verdict."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks.served import Server
from benchmarks.soak_agents import Agents
from benchmarks.soak_chain import write_chains
from benchmarks.soak_faults import Faults
from benchmarks.soak_leaks import Leaks, process_leaks
from benchmarks.soak_log import logged_errors
from benchmarks.soak_redis import SoakRedis
from benchmarks.soak_requests import Sender, completion_body
from benchmarks.soak_schedule import Fault, make_schedule, show_schedule
from benchmarks.soak_server import SoakServer, SoakServerSpec, running_soak_server
from benchmarks.soak_stock import read_verdict, stock_environment
from benchmarks.soak_talk import shared_prefixes
from benchmarks.soak_tally import Tally
from benchmarks.soak_verdicts import Verdict
from benchmarks.soak_watch import Sample, gone, take_sample
from benchmarks.soak_watcher import Watcher
from spm.demo.process import ManagedProcess
from tests.e2e.made_models import FULL, made_model

_PROGRESS_S = 15.0
_WARM_UP_REQUESTS = 24
_REST_S = 2.0
_POLL_S = 0.2
COUNTERS = {
    "preemptions": ("vllm:num_preemptions_total", ""),
    "host_loaded_tokens": ("spm:loaded_tokens_total", 'tier="host"'),
    "remote_loaded_tokens": ("spm:loaded_tokens_total", 'tier="remote"'),
    "load_failed_blocks": ("spm:load_failed_blocks_total", ""),
    "corrupt_blocks": ("spm:load_failed_blocks_total", 'reason="corrupt"'),
    "prefetched_blocks": ("spm:prefetched_blocks_total", ""),
    "gpu_hit_tokens": ("vllm:prompt_tokens_by_source_total", 'source="local_cache_hit"'),
    "computed_prompt_tokens": ("vllm:prompt_tokens_by_source_total", 'source="local_compute"'),
}
"""What says that the soak met what it should meet."""


@dataclass
class Outcome:
    """What a run gave."""

    tally: Tally = field(default_factory=Tally)
    faults: list[Fault] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """Of the server's log."""
    counters: dict[str, float] = field(default_factory=dict)
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Run:
    """How to run it. Everything it writes is in ``directory``."""

    seed: int
    load_s: float
    agents: int
    directory: Path

    async def execute(self) -> Outcome:
        """All of it."""
        outcome = Outcome()
        model = made_model(FULL, self.directory)
        redis = SoakRedis(self.directory, self.seed)
        with contextlib.ExitStack() as stack:
            stack.callback(redis.stop)
            await asyncio.to_thread(redis.start)
            spec = SoakServerSpec(model, self.directory / "vllm.log", redis.url)
            started_s = time.monotonic()
            async with running_soak_server(spec) as server:
                print(f"  vLLM is ready after {time.monotonic() - started_s:.0f} s", flush=True)
                await _warm_up(server)
                log_begin = server.log_path.stat().st_size
                before = take_sample(server.process.pid, 0.0)
                await self._load(server, redis, outcome)
                # It starts while what is left is looked for and the server stops.
                judge = stack.enter_context(self._start_judge(model, outcome.tally))
                await _look(server, before, log_begin, outcome)
            await _finished(judge)
            outcome.verdict = read_verdict(*self._judged)
        return outcome

    async def _load(self, server: SoakServer, redis: SoakRedis, outcome: Outcome) -> None:
        schedule = make_schedule(self.seed, self.load_s)
        print(f"faults, in seconds of load:\n{show_schedule(schedule)}", flush=True)
        async with _client() as http:
            watcher = Watcher(http, server)
            started_s = time.monotonic()

            def is_over() -> bool:
                return time.monotonic() - started_s > self.load_s or watcher.server_is_gone

            tally = outcome.tally
            agents = Agents(http, server.url, tally, shared_prefixes(self.seed), is_over)
            faults = Faults(redis, http, server.url)
            async with (
                _beside(watcher.run()),
                _beside(_show_progress(tally, started_s)),
                _beside(faults.run(schedule, started_s)),
            ):
                await agents.run(self.seed, self.agents)
            outcome.faults, outcome.samples, outcome.deaths = (
                faults.done,
                watcher.samples,
                watcher.deaths,
            )

    @property
    def _judged(self) -> tuple[Path, Path]:
        """What was generated, and what the judge says about it."""
        return self.directory / "chains.jsonl", self.directory / "said.jsonl"

    def _start_judge(self, model: Path, tally: Tally) -> ManagedProcess:
        chains, said = self._judged
        print(f"  {write_chains(chains, tally.chains)} conversations to be judged", flush=True)
        script = Path(__file__).with_name("soak_stock.py")
        command = [sys.executable, str(script), str(model), str(chains), str(said)]
        return ManagedProcess(command, self.directory / "stock.log", stock_environment())


@contextlib.asynccontextmanager
async def _beside(what: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Runs it while the block does, no longer; what it raises is raised at the end."""
    task = asyncio.create_task(what)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _client() -> aiohttp.ClientSession:
    """A connection a request: one kept alive may be closed by the server just when it is used."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


async def _warm_up(server: SoakServer) -> None:
    """Pools of threads and connections come to their size; then nothing goes on any more."""
    async with _client() as http:
        sender, one = Sender(http, server.url), Server(http, server.url)
        bodies = [
            completion_body([9 + n] * 100, 4, {"agent_hint": {"session_id": f"warm-{n}"}})
            for n in range(_WARM_UP_REQUESTS)
        ]
        await asyncio.gather(*map(sender.ask, bodies), one.metric("spm:sessions"))
        leaks = await Leaks(http, server.url).find()
        assert not leaks, f"left of the warm-up: {leaks}"
    await asyncio.sleep(_REST_S)


async def _look(server: SoakServer, before: Sample, log_begin: int, outcome: Outcome) -> None:
    """At what is left, with the server idle."""
    if not outcome.deaths:
        async with _client() as http:
            one = Server(http, server.url)
            outcome.leaks += await Leaks(http, server.url).find()
            for name, metric in COUNTERS.items():
                outcome.counters[name] = await one.metric(*metric)
        await asyncio.sleep(_REST_S)
        after = take_sample(server.process.pid, 0.0)
        outcome.leaks += process_leaks(before, after)
        outcome.deaths += [f"process {name} ended" for name in gone(before, after)]
    with server.log_path.open(errors="replace") as log:
        log.seek(log_begin)
        outcome.errors = logged_errors(log.read().splitlines())


async def _finished(judge: ManagedProcess) -> None:
    while judge.exit_code is None:
        await asyncio.sleep(_POLL_S)
    if judge.exit_code:
        raise RuntimeError(f"stock vLLM did not judge. The end of its log:\n{judge.log_tail()}")
    print(f"  {judge.log_tail().splitlines()[-1]}", flush=True)


async def _show_progress(tally: Tally, started_s: float) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_S)
        print(f"  {time.monotonic() - started_s:6.1f} s  {tally.line()}", flush=True)
