"""Agents on vLLM's real scheduler in virtual time: what each policy is worth, and the limit.

Everything but the model, the link and the agents is real: see ``benchmarks/sim/__init__.py``, and
``costs.py`` for what is assumed. Every policy meets the same tasks. With ``--json FILE`` also
pictures, beside the file; ``--only MIX`` runs one of the workloads.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

from benchmarks.agents.workload import draw_tasks
from benchmarks.report import Options, Report
from benchmarks.sam_parts import write_model
from benchmarks.sim.engine import MAX_MODEL_LEN
from benchmarks.sim.measures import Run
from benchmarks.sim.mixes import FULL, QUICK, Mix
from benchmarks.sim.simulation import simulate
from benchmarks.sim.table import Runs, add_ratios, as_rows, draw, table, verdicts


def one_run(mix: Mix, policy: str, concurrency: int, seed: int) -> Run:
    """In a process of its own."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    logging.getLogger("connectors").setLevel(logging.ERROR)
    logging.getLogger("spm").setLevel(logging.ERROR)
    tasks = draw_tasks(mix.shape, mix.tasks * concurrency, seed)
    with tempfile.TemporaryDirectory() as name:
        directory = write_model(Path(name), MAX_MODEL_LEN)
        chosen = mix.policy(policy)
        return simulate(chosen, tasks, concurrency, mix.costs, directory, mix.spread_s)


def run_mixes(mixes: Sequence[Mix], first_seed: int) -> dict[str, Runs]:
    """All of them, as many at a time as there are cores; the longest begin first."""
    cores = len(os.sched_getaffinity(0))
    found: dict[str, Runs] = {mix.name: defaultdict(list) for mix in mixes}
    wanted = [
        (mix, name, concurrency, first_seed + seed)
        for mix in mixes
        for concurrency in mix.concurrencies
        for name in mix.policies
        for seed in range(mix.seeds)
    ]
    with ProcessPoolExecutor(cores) as processes:
        order = sorted(wanted, key=lambda one: -one[2] * one[0].tasks)
        waiting: dict[tuple[str, str, int, int], Future[Run]] = {
            (mix.name, name, c, seed): processes.submit(one_run, mix, name, c, seed)
            for mix, name, c, seed in order
        }
        names = {
            future: f"{name} in {mix}, c = {c}" for (mix, name, c, _), future in waiting.items()
        }
        for done, future in enumerate(as_completed(waiting.values()), 1):
            wall_s = future.result().wall_s
            print(f"  {done} of {len(waiting)}: {names[future]}, {wall_s:.0f} s", flush=True)
        for mix, name, concurrency, seed in wanted:
            run = waiting[mix.name, name, concurrency, seed].result()
            found[mix.name][name, concurrency].append(run)
    return found


def main() -> int:
    """Simulate and report."""
    options, mixes = _parse()
    started_s = time.monotonic()
    runs = run_mixes(mixes, options.seed)
    report = SimReport("sim", options, max(mix.seeds for mix in mixes))
    for mix in mixes:
        print("\n".join(table(mix, runs[mix.name])))
        add_ratios(report, mix, runs[mix.name])
        report.runs += as_rows(mix, runs[mix.name])
    print()
    for mix in mixes:
        print("\n".join(verdicts(mix, runs[mix.name])))
    report.counts["wall_s"] = time.monotonic() - started_s
    report.finish()
    if options.json_path is not None:
        for mix in mixes:
            for path in draw(mix, runs[mix.name], options.json_path.with_suffix("")):
                print(f"picture: {path}")
    return 0


class SimReport(Report):
    """With every single run in the JSON file."""

    runs: list[dict[str, object]]

    def __init__(self, name: str, options: Options, repeats: int) -> None:
        super().__init__(name, options, repeats)
        self.runs = []

    def as_dict(self) -> dict[str, object]:
        return {**super().as_dict(), "simulated": True, "runs": self.runs}


def _parse() -> tuple[Options, tuple[Mix, ...]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under four minutes on two cores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    parser.add_argument("--only", choices=[mix.name for mix in FULL], help="one workload")
    args = parser.parse_args()
    offered: Sequence[Mix] = QUICK if args.quick else FULL
    mixes = tuple(mix for mix in offered if args.only in (None, mix.name))
    if not mixes:
        parser.error(f"--only {args.only}: not among the quick ones")
    return Options(args.quick, args.seed, args.json), mixes


if __name__ == "__main__":
    sys.exit(main())
