"""What single operations cost: a scheduler step, a request boundary, a key, a session, a value.

Scheduler and bookkeeping are CPU times of one thread, bytes are what Python allocates, and the
store is a real Redis, in wall time. Growth goes up to 100,000 sessions and 1,000,000 keys.
"""

import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm.envs import enable_envs_cache

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

from benchmarks.micro.growth import measure_growth
from benchmarks.micro.growth_world import KEYS_A_SESSION
from benchmarks.micro.memory import add_memory
from benchmarks.micro.steps import add_steps
from benchmarks.micro.store import measure_store
from benchmarks.report import Options, Report
from benchmarks.sam_overhead import measure_sessions
from benchmarks.sam_parts import write_model
from benchmarks.sam_sessions import bytes_per_pool_block, bytes_per_session_block
from spm.demo.redis_process import redis_installed, running_redis


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    repeats: int
    warm_up_steps: int
    sessions: int
    few_sessions: int
    """Of the boundary, against ten times as many."""
    touched_keys: int


FULL = Scale(
    repeats=15, warm_up_steps=600, sessions=100_000, few_sessions=1000, touched_keys=10_000
)
QUICK = Scale(repeats=5, warm_up_steps=100, sessions=10_000, few_sessions=200, touched_keys=5_000)


@contextmanager
def _timed(report: Report, part: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    report.counts[f"took_{part}_s"] = time.perf_counter() - started


async def _store(report: Report, scale: Scale, directory: Path) -> None:
    async with running_redis(directory) as store:
        await asyncio.to_thread(measure_store, report, store.url, scale.touched_keys)


def measure(report: Report, scale: Scale, directory: Path) -> None:
    """All parts. ``directory``: an empty one."""
    model = write_model(directory)
    with _timed(report, "steps"):
        add_steps(report, model, scale.warm_up_steps)
    with _timed(report, "boundary"):
        measure_sessions(report, model, scale.few_sessions)
    with _timed(report, "memory"):
        report.counts["bytes_per_pool_block"] = bytes_per_pool_block()
        claims, pooling = bytes_per_session_block(model)
        report.counts["bytes_per_session_block"] = claims
        report.counts["bytes_per_session_block_pooling"] = pooling
        add_memory(report, scale.sessions // 10, KEYS_A_SESSION)
    with _timed(report, "growth"):
        measure_growth(report, scale.sessions)
    if redis_installed():
        with _timed(report, "store"):
            asyncio.run(_store(report, scale, directory))
    else:
        print("  redis-server is not installed: the store is not measured", flush=True)


def main() -> int:
    """Measure and report."""
    options = Options.parse(__doc__ or "")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    enable_envs_cache()  # as the engine core does; else every look at a setting is slow
    scale = QUICK if options.quick else FULL
    report = Report("micro", options, scale.repeats)
    with tempfile.TemporaryDirectory() as name:
        measure(report, scale, Path(name))
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
