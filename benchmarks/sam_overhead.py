"""What hints cost vLLM's scheduler: CPU time a step, a queue operation, a boundary; bytes.

Nothing runs but the scheduler: its real code is fed scripted tokens, side by side without a
connector, with one that does nothing, and with ours. Times are CPU times of the one thread.
"""

import contextlib
import gc
import logging
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from vllm.envs import enable_envs_cache

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script, from anywhere

from benchmarks.report import Options, Report
from benchmarks.sam_parts import (
    ENOUGH,
    HINTED,
    NAMED,
    NO_HINTS,
    NOOP,
    PRESSED,
    STOCK,
    write_model,
)
from benchmarks.sam_queue import QueueKind, QueueReplay
from benchmarks.sam_schedulers import Side
from benchmarks.sam_sessions import World, bytes_per_pool_block, bytes_per_session_block

_SIDES = {
    "stock": STOCK,
    "noop_connector": NOOP,
    "no_hints": NO_HINTS,
    "session_id_only": NAMED,
    "hinted": HINTED,
}
_QUEUES = {
    "stock": QueueKind(ours=False),
    "ours": QueueKind(ours=True),
    "marked": QueueKind(ours=True, marked_of_3=1),
}
_FEW_SESSIONS = 1000
_WARM_UP_STEPS = 1200
"""Until the pool is full and every step evicts."""
_REPEAT_STEPS = 50
_QUEUE_ROUNDS = 20
_REPEAT_TURNS = 100

Times = dict[str, list[float]]


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """No garbage collection inside, but for that of one repeat's own garbage by ``gc.collect``.

    vLLM freezes its heap at start, so that what lives long is not looked at again. Here a
    collection would also look at the other sides' heaps, and be charged to whom it hits.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def measure_steps(
    sides: Mapping[str, Side], repeats: int, seed: int, *, warm_up: int = _WARM_UP_STEPS
) -> Times:
    """Seconds a step of each side, interleaved, each time in another order."""
    rng = random.Random(seed)
    times: Times = defaultdict(list)
    for side in sides.values():
        side.run(warm_up)
    with frozen_heap():
        for _ in range(repeats):
            gc.collect()
            for name in rng.sample(list(sides), len(sides)):
                times[name].append(sides[name].run(_REPEAT_STEPS) / _REPEAT_STEPS)
    return times


def check_same_work(sides: Mapping[str, Side]) -> None:
    """That without hints every step scheduled the very same tokens, and that the free blocks
    are in the same order at the end."""
    stock = sides["stock"]
    for name in ("noop_connector", "no_hints"):
        assert sides[name].trace == stock.trace, f"{name}: other tokens were scheduled"
        assert sides[name].free_blocks() == stock.free_blocks(), f"{name}: another block order"
    for name, side in sides.items():
        # Other hits let a few requests end a step earlier or later, no more.
        differing = abs(side.finished - stock.finished)
        assert differing <= 0.02 * stock.finished, f"{name}: other requests finished"


def add_step_times(report: Report, times: Times, suffix: str = "") -> None:
    """Each side's time of a step, and its ratio over stock."""
    for name, series in times.items():
        report.counts[f"step_{name}{suffix}_us"] = 1e6 * sorted(series)[len(series) // 2]
        if name != "stock":
            report.add_ratio(f"step_{name}_over_stock{suffix}", series, times["stock"])


def _pressed(report: Report, directory: Path) -> None:
    """For information: hits, clipping and evictions differ, so the sides' work does too."""
    seed = report.options.seed
    sides = {name: Side(_SIDES[name], directory, PRESSED, seed) for name in ("stock", "hinted")}
    times = measure_steps(sides, report.repeats, seed)
    report.add_ratio("step_hinted_over_stock_pressed", times["hinted"], times["stock"])
    for name, side in sides.items():
        tokens = side.scheduled_tokens / len(side.trace)
        report.counts[f"tokens_per_step_{name}_pressed"] = tokens
    print("  pressed pool done")


def _steps(report: Report, directory: Path, suffix: str, *, asynchronous: bool) -> None:
    seed = report.options.seed
    sides = {
        name: Side(kind, directory, ENOUGH, seed, asynchronous=asynchronous)
        for name, kind in _SIDES.items()
    }
    times = measure_steps(sides, report.repeats, seed)
    check_same_work(sides)
    add_step_times(report, times, suffix)
    stock = sides["stock"]
    steps = len(stock.trace)
    report.counts[f"steps_with_equal_schedule{suffix}"] = steps
    report.counts[f"requests_per_step{suffix}"] = stock.finished / steps
    for name in ("stock", "hinted"):  # hits differ, so what is left to schedule does
        report.counts[f"tokens_per_step_{name}{suffix}"] = sides[name].scheduled_tokens / steps
    measured = report.repeats * _REPEAT_STEPS
    print(f"  {measured} of {steps} steps measured{suffix.replace('_', ', ')}; without hints equal")


def _queues(report: Report) -> None:
    replays = {
        name: QueueReplay(kind, report.repeats, _QUEUE_ROUNDS, report.options.seed)
        for name, kind in _QUEUES.items()
    }
    times: Times = defaultdict(list)
    with frozen_heap():
        for _ in range(report.repeats):
            for name, replay in replays.items():
                times[name].append(replay.seconds_per_block())
    for replay in replays.values():
        replay.check()
    report.add_ratio("queue_op_over_stock", times["ours"], times["stock"])
    report.add_ratio("queue_op_marked_over_stock", times["marked"], times["stock"])
    print("  queues done")


def measure_sessions(report: Report, directory: Path, few_sessions: int = _FEW_SESSIONS) -> None:
    """What a boundary of 100 blocks costs, and whether ten times the sessions change that."""
    few, many = (World(count, directory) for count in (few_sessions, 10 * few_sessions))
    times: Times = defaultdict(list)
    for world in (few, many):
        world.open_all()
    with frozen_heap():
        for _ in range(report.repeats):
            for name, world in (("few", few), ("many", many)):
                times[name].append(sum(world.turn() for _ in range(_REPEAT_TURNS)))
    for world, count in ((few, few_sessions), (many, 10 * few_sessions)):
        assert world.half.manager.tracker.num_sessions >= 0.99 * count, "sessions were forgotten"
        world.half.check_integrity(idle=True)
    report.add_ratio("cost_at_10x_sessions", times["many"], times["few"])
    turn_us = 1e6 * sorted(times["few"])[len(times["few"]) // 2] / _REPEAT_TURNS
    report.counts["boundary_of_100_blocks_us"] = turn_us
    print("  sessions done")


def main() -> int:
    """Measure and report."""
    options = Options.parse(__doc__ or "")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    enable_envs_cache()  # as the engine core does; else every look at a setting is slow
    report = Report("sam_overhead", options, 20 if options.quick else 60)
    with tempfile.TemporaryDirectory() as name:
        directory = write_model(Path(name))
        _steps(report, directory, "", asynchronous=False)
        _steps(report, directory, "_async", asynchronous=True)
        _pressed(report, directory)
        _queues(report)
        measure_sessions(report, directory)
        report.counts["bytes_per_pool_block"] = bytes_per_pool_block()
        claims, pooling = bytes_per_session_block(directory)
        report.counts["bytes_per_session_block"] = claims
        report.counts["bytes_per_session_block_pooling"] = pooling
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
