"""What it costs everybody else when all sessions ask for a prefetch at once.

One vLLM server on the real model, with Redis alone behind its GPU pool. The pool is nearly
full: most of it is protected for sessions with a long TTL. Many more sessions were stored in
Redis and then released. An ordinary request (a new prompt that names no session) is sent alone;
again in the moment in which every stored session asks for a prefetch through the management
routes; and again while they all only ask what is known about them, which tells the price of so
many calls on the machine from that of the prefetches. All interleaved, in changing order.

After each storm its operations are waited for, nothing may be left of it, and the sessions are
offloaded again.
"""

import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import aiohttp

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script, from anywhere

from benchmarks.report import Options, Report
from benchmarks.served import Server, random_prompt
from spm.client import AsyncSpmClient, EditOutcome, EngineStatus, HttpStatusError, calls
from spm.demo.model import ensure_model
from spm.demo.redis_process import running_redis
from spm.demo.server import ConnectorSettings, ServerSpec, running_server

_BLOCK_TOKENS = 32
_POOL_BLOCKS = 500
_KEPT_SESSIONS = 7
_KEPT_BLOCKS = 50
_KEPT_TTL_S = 3600
_SESSIONS = 64
_SESSION_BLOCKS = 8
_ORDINARY_TOKENS = 1600
_BEYOND_TOKENS = 5
"""Tokens of a prompt beyond its full blocks."""
_MAX_OPERATIONS = 16
_PROTECTED_SHARE = 0.9
_REST_S = 0.4
_STORM_S = 0.1
"""An ordinary request comes at some moment in the first so many seconds of a storm."""
_SETTLE_TIMEOUT_S = 20.0
_POLL_S = 0.05
_REFUSED = "rejected"

T = TypeVar("T")
Times = dict[str, list[float]]
Ask = Callable[[str], Coroutine[None, None, None]]


class Send(Protocol):
    """Carries a management call out."""

    async def __call__(self, call: calls.Call[T]) -> T:
        """Raises :class:`spm.client.HttpStatusError` for a refusal."""
        ...


@dataclass
class Outcomes:
    """What became of all prefetches that were asked for."""

    asked: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    """Final ones; ``rejected`` also of requests that were refused as a whole."""
    accepted: int = 0
    """Those that went on in the background."""
    blocks: int = 0
    leaks: int = 0

    def note(self, final: EditOutcome) -> None:
        """One prefetch is over."""
        self.statuses[final.status] += 1
        self.blocks += final.done_blocks or 0

    def as_counts(self) -> dict[str, float]:
        """For the report."""
        named = ("ok", "partial", _REFUSED)
        return {
            "asked": self.asked,
            "accepted": self.accepted,
            **{status: self.statuses[status] for status in named},
            "other": sum(n for status, n in self.statuses.items() if status not in named),
            "blocks_prefetched": self.blocks,
            "leaks": self.leaks,
        }


def left_over(engine: EngineStatus) -> int:
    """What an engine that has nothing to do still has: operations, requests, transfers, blocks."""
    assert engine.gpu is not None
    return (
        engine.operations
        + engine.active_requests
        + sum(queue.waiting + queue.in_flight for queue in engine.queues.values())
        + (engine.gpu.blocks - engine.gpu.free_blocks)
    )


class Storm:
    """The stored sessions of one server, and what they ask for."""

    def __init__(
        self, spm: AsyncSpmClient, send: Send, rng: random.Random, outcomes: Outcomes
    ) -> None:
        """``send`` carries the calls of a storm out: a cheap way, because what it costs would
        count as what the server takes."""
        self._spm = spm
        self._send = send
        self._rng = rng
        self._outcomes = outcomes
        self.names = [f"stored-{number}" for number in range(_SESSIONS)]
        self._fetched: list[str] = []

    def shuffled(self) -> list[str]:
        """All sessions, in an order of its own each time: who comes first gets the room."""
        return self._rng.sample(self.names, len(self.names))

    async def prefetch(self, name: str) -> None:
        """Ask for one session, and wait for what becomes of it."""
        self._outcomes.asked += 1
        try:
            answer = await self._send(calls.prefetch(name))
        except HttpStatusError as error:
            self._outcomes.statuses[error.status or str(error.code)] += 1
            return
        (edit,) = answer.edits
        if not answer.done:
            self._outcomes.accepted += 1
            (edit,) = (await self._spm.wait(answer.operation_id)).edits
        self._outcomes.note(edit)
        if edit.done_blocks:
            self._fetched.append(name)

    def take_fetched(self) -> list[str]:
        """Sessions that have got something since the last call."""
        fetched, self._fetched = self._fetched, []
        return fetched

    async def look(self, name: str) -> None:
        """Ask what is known about one session; the answer does not matter."""
        with contextlib.suppress(HttpStatusError):
            await self._send(calls.get_session(name))

    async def offload(self, names: Sequence[str]) -> None:
        """Have sessions stored, and what they have in the pool released; asks again for those
        that a busy store did not confirm."""
        give_up_s = time.monotonic() + _SETTLE_TIMEOUT_S
        left = list(names)
        while left:
            now, left = left[:_MAX_OPERATIONS], left[_MAX_OPERATIONS:]
            asked = {name: await self._spm.offload(name) for name in now}
            for name, one in asked.items():
                done = await self._spm.wait(one.operation_id)
                if done.status != "ok":
                    assert time.monotonic() < give_up_s, done.raw
                    left.append(name)

    async def settle(self) -> None:
        """Until nothing goes on, at most some seconds; what is left then has leaked."""
        give_up_s = time.monotonic() + _SETTLE_TIMEOUT_S
        while True:
            left = sum(map(left_over, (await self._spm.status()).engines))
            if not left or time.monotonic() > give_up_s:
                self._outcomes.leaks += left
                return
            await asyncio.sleep(_POLL_S)


async def _fill(server: Server, storm: Storm, rng: random.Random) -> None:
    """Most of the pool is kept for some sessions; many more are stored and released."""
    size = _SESSION_BLOCKS * _BLOCK_TOKENS + _BEYOND_TOKENS
    for name in storm.names:
        await server.ttft(random_prompt(rng, size), {"agent_hint": {"session_id": name}})
    await storm.settle()
    await storm.offload(storm.names)
    for number in range(_KEPT_SESSIONS):
        ttl: dict[str, object] = {"cache_control": {"type": "ephemeral", "ttl": _KEPT_TTL_S}}
        hint = {"agent_hint": {**ttl, "session_id": f"kept-{number}"}}
        await server.ttft(random_prompt(rng, _KEPT_BLOCKS * _BLOCK_TOKENS + _BEYOND_TOKENS), hint)
    await storm.settle()


async def _repeat(server: Server, storm: Storm, rng: random.Random, times: Times) -> None:
    """An ordinary request alone, amid as many questions, and amid a storm."""
    asks: dict[str, Ask | None] = {
        "without": None,
        "calls": storm.look,
        "with": storm.prefetch,
    }
    for arm in rng.sample(list(asks), len(asks)):
        prompt = random_prompt(rng, _ORDINARY_TOKENS)
        await asyncio.sleep(_REST_S)
        ask = asks[arm]
        others = [asyncio.create_task(ask(name)) for name in storm.shuffled()] if ask else []
        await asyncio.sleep(rng.uniform(0.0, _STORM_S))
        times[arm].append(await server.ttft(prompt))
        await asyncio.gather(*others)
        await storm.settle()
        await storm.offload(storm.take_fetched())
        await storm.settle()


async def _serve_and_measure(options: Options, repeats: int, report: Report) -> Times:
    times: Times = defaultdict(list)
    rng, outcomes = random.Random(options.seed), Outcomes()
    logs = Path(tempfile.mkdtemp(prefix="prefetch-storm-"))
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(running_redis(logs))
        shares = ("max_protected_share", "max_tenant_protected_share")
        others = {
            "sam": dict.fromkeys(shares, _PROTECTED_SHARE),
            "max_operations": _MAX_OPERATIONS,
            "session_ttl_s": _KEPT_TTL_S,
        }
        spec = ServerSpec(
            model=ensure_model(),
            pool_blocks=_POOL_BLOCKS,
            log_path=logs / "server.log",
            connector=ConnectorSettings(0, store.url, others),
            block_size=_BLOCK_TOKENS,
            management=True,
        )
        url = await stack.enter_async_context(running_server(spec))
        http = await stack.enter_async_context(
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=300),
                connector=aiohttp.TCPConnector(keepalive_timeout=_REST_S),  # vLLM's is 5 s
            )
        )
        spm = await stack.enter_async_context(AsyncSpmClient(url))
        server = Server(http, url)
        storm = Storm(spm, server.send, rng, outcomes)
        await _fill(server, storm, rng)
        await _repeat(server, storm, rng, defaultdict(list))  # warms up: its times are not counted
        for number in range(1, repeats + 1):
            await _repeat(server, storm, rng, times)
            seconds = ", ".join(f"{series[-1]:.2f} s {arm}" for arm, series in times.items())
            print(f"  repeat {number} of {repeats}: {seconds}", flush=True)
        (engine,) = (await spm.status()).engines
        assert engine.gpu is not None
        report.counts["protected_blocks"] = engine.gpu.protected_blocks
    report.counts |= outcomes.as_counts()
    return times


def main() -> int:
    """Measure and report."""
    options = Options.parse(__doc__ or "")
    repeats = 15 if options.quick else 60
    report = Report("prefetch_storm", options, repeats)
    times = asyncio.run(_serve_and_measure(options, repeats, report))
    report.add_ratio("ordinary_ttft_with_over_without", times["with"], times["without"])
    report.add_ratio("ordinary_ttft_calls_over_without", times["calls"], times["without"])
    for name, series in times.items():
        report.counts[f"{name}_median_s"] = sorted(series)[len(series) // 2]
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
