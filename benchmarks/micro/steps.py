"""CPU time of a step of vLLM's scheduler: stock, with ours and no hints, with ours and hints."""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.report import Report
from benchmarks.sam_overhead import add_step_times, check_same_work, measure_steps
from benchmarks.sam_parts import ENOUGH, HINTED, NO_HINTS, NOOP, STOCK, Kind, Load
from benchmarks.sam_schedulers import Side

SIDES: Mapping[str, Kind] = {
    "stock": STOCK,
    "noop_connector": NOOP,
    "no_hints": NO_HINTS,
    "hinted": HINTED,
}


def add_steps(report: Report, directory: Path, warm_up_steps: int, load: Load = ENOUGH) -> None:
    """Add the ratios over stock and each side's time. ``directory``: of the model."""
    seed = report.options.seed
    sides = {name: Side(kind, directory, load, seed) for name, kind in SIDES.items()}
    times = measure_steps(sides, report.repeats, seed, warm_up=warm_up_steps)
    check_same_work(sides)
    add_step_times(report, times)
    print(f"  {len(sides['stock'].trace)} steps; without hints they were equal", flush=True)
