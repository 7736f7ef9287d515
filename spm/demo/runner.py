"""Runs the phases one after the other, shows them as they go, and compares them."""

import asyncio
import contextlib
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import aiohttp

from spm.demo.client import ask
from spm.demo.conversation import SESSIONS, Message, TurnKey, messages_for, turns
from spm.demo.lmcache_process import (
    LMCacheSpec,
    LMCacheStartError,
    free_ports_spec,
    lmcache_installed,
    running_lmcache,
)
from spm.demo.metrics_client import read_sources, settled_sources
from spm.demo.model import ensure_model
from spm.demo.phases import (
    LMCACHE_STORE,
    RECOMPUTE,
    REDIS_STORE,
    REFERENCE,
    STORES,
    Phase,
    Store,
    select_phases,
)
from spm.demo.redis_process import DemoRedis, redis_installed, running_redis
from spm.demo.report import (
    PhaseResults,
    TurnResult,
    differing_turns,
    other_hits,
    summary,
    turn_header,
    turn_row,
)
from spm.demo.server import ServerSpec, running_server

_REQUEST_TIMEOUT_S = 180.0
_WARM_UP: list[Message] = [{"role": "user", "content": "Say hello to the team. " * 40}]

Runs = list[tuple[Phase, PhaseResults]]


@dataclass(frozen=True)
class DemoOptions:
    """What the command line decides."""

    store: str = REDIS_STORE.name
    phases: list[str] | None = None
    model: Path | None = None


def run_demo(options: DemoOptions) -> int:
    """Run the demo; 0 if all tokens of the connector's runs are the reference's, else 1."""
    store = STORES[options.store]
    if store is LMCACHE_STORE and not lmcache_installed():
        raise LMCacheStartError("LMCache is not installed: pip install '.[lmcache]'")
    with _sigterm_like_ctrl_c():
        model = options.model or ensure_model()
        phases = select_phases(store, options.phases, redis_installed=redis_installed())
        log_dir = Path(tempfile.mkdtemp(prefix="spm-demo-"))
        print(f"Server logs (kept if something goes wrong): {log_dir}")
        if not redis_installed():
            print("No redis-server on the path: the Redis phases are left out.")
        started = time.monotonic()
        runs = asyncio.run(_run_phases(store, phases, model, log_dir))
    exit_code = _conclude(runs)
    print(f"\nThe demo took {time.monotonic() - started:.0f} s.")
    if exit_code == 0:
        shutil.rmtree(log_dir)
    return exit_code


@contextlib.contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind as Ctrl-C does, so that every child is stopped.

    Those that are ignored stay so: that is how ``nohup`` works.
    """

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    heeded = [number for number in _INTERRUPTS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


_INTERRUPTS = (signal.SIGTERM, signal.SIGHUP)


async def _run_phases(store: Store, phases: list[Phase], model: Path, log_dir: Path) -> Runs:
    async with contextlib.AsyncExitStack() as stack:
        redis: DemoRedis | None = None
        if any(phase.uses_redis for phase in phases):
            redis = await stack.enter_async_context(running_redis(log_dir))
        runs: Runs = []
        for number, phase in enumerate(phases, start=1):
            print(f"\n[{number}/{len(phases)}] {phase.title} ({phase.describe_pool()})")
            if phase is RECOMPUTE:
                print("  (vLLM computes again what it evicted: tokens may differ a little from its")
                print(
                    "  own cache hits, which are the reference; with the connector they must not)"
                )
            spec = ServerSpec(
                model=model,
                pool_blocks=phase.pool_tokens // store.block_size,
                log_path=log_dir / f"vllm-{phase.name}.log",
                block_size=store.block_size,
            )
            runs.append((phase, await _run_phase(phase, spec, redis, runs[0][1] if runs else {})))
        return runs


async def _run_phase(
    phase: Phase, spec: ServerSpec, redis: DemoRedis | None, reference: PhaseResults
) -> PhaseResults:
    """One run on servers of its own, which are gone afterwards; Redis stays."""
    redis_url = redis.url if redis else None
    async with contextlib.AsyncExitStack() as stack:
        lmcache: LMCacheSpec | None = None
        if phase.uses_lmcache:
            lmcache = free_ports_spec(redis_url)
            log_path = spec.log_path.with_name(f"lmcache-{phase.name}.log")
            await stack.enter_async_context(running_lmcache(lmcache, log_path))
        spec = replace(spec, connector=phase.connector(redis_url, lmcache))
        url = await stack.enter_async_context(running_server(spec))
        results = await _converse(phase, url, reference)
        if phase.fills_redis and redis is not None:
            print(f"  {await redis.wait_quiet():,} values in Redis; stopping the engine")
        return results


async def _converse(phase: Phase, url: str, reference: PhaseResults) -> dict[TurnKey, TurnResult]:
    """Send the phase's turns one at a time: alone, so that TTFT and batches are comparable."""
    results: dict[TurnKey, TurnResult] = {}
    tiers = not phase.uses_lmcache
    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        await ask(http, url, "warm-up", _WARM_UP)
        print(turn_header(), flush=True)
        for key in turns(phase.first_round, phase.last_round):
            texts = {k: turn.answer.text for k, turn in (reference or results).items()}
            before = await read_sources(http, url, tiers=tiers)
            answer = await ask(http, url, key.session, messages_for(key, texts))
            sources = await settled_sources(http, url, before, answer.prompt_tokens, tiers=tiers)
            results[key] = TurnResult(key, answer, sources)
            print(turn_row(results[key], reference.get(key)), flush=True)
    return results


def _conclude(runs: Runs) -> int:
    """Print the summary and the verdict; returns the exit code."""
    reference = runs[0][1]
    print(f"\n{len(SESSIONS)} sessions, compared turn by turn:")
    print("\n".join(summary(runs)))
    print(
        "\n'same tokens' compares with vLLM's own GPU prefix hits. Recomputing is not required to "
        "match:\nin vLLM itself a cold prefill and a prefix hit differ a little numerically."
    )
    connected = [run for run in runs if run[0] not in (REFERENCE, RECOMPUTE)]
    others = _named(connected, reference, other_hits)
    if others:
        print("\nA hit as long as the reference's everywhere but in\n  " + "\n  ".join(others))
    wrong = _named(connected, reference, differing_turns)
    if wrong:
        print("\nFAILED: tokens differ from the reference in\n  " + "\n  ".join(wrong))
        return 1
    return 0


def _named(
    runs: Runs,
    reference: PhaseResults,
    which: Callable[[PhaseResults, PhaseResults], list[TurnKey]],
) -> list[str]:
    return [
        f"{phase.name}: round {key.round}, {key.session}"
        for phase, results in runs
        for key in which(results, reference)
    ]
