"""What it costs a connector to have ours around it, where nobody hints at sessions.

Scheduler: vLLM's real one is fed scripted tokens (see ``sam_overhead.py``) with a connector that
does nothing, alone and wrapped, with session features and without. CPU time of the one thread.

Time to first token: vLLM's server on the real model with LMCache's connector and with
ExampleConnector, alone and wrapped (see ``wrapped_ttft.py``).

Ratios are wrapped over alone: above one, wrapping costs something.
"""

import asyncio
import logging
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from vllm.envs import enable_envs_cache

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script, from anywhere

from benchmarks.report import Options, Report
from benchmarks.resumes import Times
from benchmarks.sam_overhead import measure_steps
from benchmarks.sam_parts import ENOUGH, NOOP, PASSED_THROUGH, WRAPPED, write_model
from benchmarks.sam_schedulers import Side
from benchmarks.wrapped_ttft import measure_example, measure_lmcache

KINDS = {"alone": NOOP, "wrapped": WRAPPED, "passed_through": PASSED_THROUGH}


def check_same_work(sides: Mapping[str, Side]) -> None:
    """That every step scheduled the very same tokens, and that the free blocks are in the same
    order at the end."""
    alone = sides["alone"]
    for name, side in sides.items():
        assert side.trace == alone.trace, f"{name}: other tokens were scheduled"
        assert side.free_blocks() == alone.free_blocks(), f"{name}: another block order"


def _steps(report: Report, repeats: int, directory: Path, *, asynchronous: bool) -> None:
    seed, suffix = report.options.seed, "_async" if asynchronous else ""
    sides = {
        name: Side(kind, directory, ENOUGH, seed, asynchronous=asynchronous)
        for name, kind in KINDS.items()
    }
    times = measure_steps(sides, repeats, seed)
    check_same_work(sides)
    for name, series in times.items():
        report.counts[f"step_{name}{suffix}_us"] = 1e6 * sorted(series)[len(series) // 2]
        if name != "alone":
            report.add_ratio(f"step_{name}_over_alone{suffix}", series, times["alone"])
    print(f"  steps measured{suffix.replace('_', ', ')}; all sides did the same", flush=True)


def _add_ttft(report: Report, times: Times, suffix: str) -> None:
    for kind, name in (("cold", ""), ("gpu hit", "_gpu_hit"), ("loaded", "_loaded")):
        wrapped, alone = times[f"wrapped {kind}"], times[f"alone {kind}"]
        report.add_ratio(f"ttft_wrapped_over_alone{name}{suffix}", wrapped, alone)
    named = {f"{name}{suffix.replace('_', ' ')}": series for name, series in times.items()}
    report.add_medians(named)


def main() -> int:
    """Measure and report."""
    options = Options.parse(__doc__ or "")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    enable_envs_cache()  # as the engine core does; else every look at a setting is slow
    report = Report("wrapped", options, 6 if options.quick else 40)
    step_repeats = 20 if options.quick else 60
    logs = Path(tempfile.mkdtemp(prefix="wrapped-"))
    directory = write_model(logs)
    for asynchronous in (False, True):
        _steps(report, step_repeats, directory, asynchronous=asynchronous)
    lmcache = asyncio.run(measure_lmcache(logs, report.repeats, options.seed))
    _add_ttft(report, lmcache, "")
    if not options.quick:  # two more servers to start
        example = asyncio.run(measure_example(logs, report.repeats // 2, options.seed))
        _add_ttft(report, example, "_example")
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
