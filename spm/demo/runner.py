"""Runs the phases one after the other, shows them as they go, and compares them."""

import asyncio
import contextlib
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import aiohttp

from spm.demo.client import ask
from spm.demo.conversation import SESSIONS, Message, TurnKey, messages_for, turns
from spm.demo.metrics_client import read_sources, settled_sources
from spm.demo.model import ensure_model
from spm.demo.phases import RECOMPUTE, REDIS, REFERENCE, Phase, select_phases
from spm.demo.redis_process import DemoRedis, redis_installed, running_redis
from spm.demo.report import (
    PhaseResults,
    TurnResult,
    differing_turns,
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

    phases: list[str] | None = None
    model: Path | None = None


def run_demo(options: DemoOptions) -> int:
    """Run the demo; 0 if all tokens of the connector's runs are the reference's, else 1."""
    with _sigterm_like_ctrl_c():
        model = options.model or ensure_model()
        phases = select_phases(options.phases, redis_installed=redis_installed())
        log_dir = Path(tempfile.mkdtemp(prefix="spm-demo-"))
        print(f"Server logs (kept if something goes wrong): {log_dir}")
        if not redis_installed():
            print("No redis-server on the path: the Redis phases are left out.")
        started = time.monotonic()
        runs = asyncio.run(_run_phases(phases, model, log_dir))
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


async def _run_phases(phases: list[Phase], model: Path, log_dir: Path) -> Runs:
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
                pool_blocks=phase.pool_blocks,
                log_path=log_dir / f"vllm-{phase.name}.log",
                connector=phase.connector(redis.url if redis else None),
            )
            reference = runs[0][1] if runs else {}
            async with running_server(spec) as url:
                runs.append((phase, await _converse(phase, url, reference)))
                if phase is REDIS and redis is not None:
                    print(f"  {await redis.wait_quiet():,} values in Redis; stopping the engine")
        return runs


async def _converse(phase: Phase, url: str, reference: PhaseResults) -> dict[TurnKey, TurnResult]:
    """Send the phase's turns one at a time: alone, so that TTFT and batches are comparable."""
    results: dict[TurnKey, TurnResult] = {}
    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        await ask(http, url, "warm-up", _WARM_UP)
        print(turn_header(), flush=True)
        for key in turns(phase.first_round, phase.last_round):
            texts = {k: turn.answer.text for k, turn in (reference or results).items()}
            before = await read_sources(http, url)
            answer = await ask(http, url, key.session, messages_for(key, texts))
            sources = await settled_sources(http, url, before, answer.prompt_tokens)
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
    wrong = [
        f"{phase.name}: round {key.round}, {key.session}"
        for phase, results in runs
        if phase not in (REFERENCE, RECOMPUTE)
        for key in differing_turns(results, reference)
    ]
    if wrong:
        print("\nFAILED: tokens differ from the reference in\n  " + "\n  ".join(wrong))
        return 1
    return 0
