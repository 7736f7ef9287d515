"""Is the simulator honest? It has to foretell a real run from the run's own costs.

    python benchmarks/agents_e2e.py --json e2e.json
    python benchmarks/sim/check.py e2e.json

Modes that need no clock of the client's are simulated with the very same tasks, pool and limits:
stock, hints only, and the host tier without hints. Exits with 1 if hit tokens are off by more than
5 % or mean times to first token of resumed turns by more than 20 %, in the median of rounds.
"""

import argparse
import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

from benchmarks.agents.e2e_costs import Costs
from benchmarks.agents.e2e_guides import Hinting, expected_gaps
from benchmarks.agents.e2e_modes import HOST_BYTES, RESUME_FIRST, STOCK
from benchmarks.agents.tools import Tool
from benchmarks.agents.workload import Shape, draw_tasks
from benchmarks.report import Options, Report
from benchmarks.sam_parts import write_model
from benchmarks.sim.agents import Agent
from benchmarks.sim.costs import CostModel
from benchmarks.sim.engine import MAX_MODEL_LEN
from benchmarks.sim.fitting import fitted
from benchmarks.sim.measures import Run
from benchmarks.sim.policies.base import HostPolicy, Policy
from benchmarks.sim.simulation import simulate

_HITS_WITHIN, _TTFT_WITHIN = 0.05, 0.20
_OUT = "   OUT OF BOUNDS"
_BATCH_BYTES = 16 << 20
"""As by default."""


class _Host(HostPolicy):
    def settings(self, costs: CostModel) -> Mapping[str, Any] | None:
        return {"host_bytes": costs.host_bytes, "batch_bytes": _BATCH_BYTES}


class _Hints(Policy):
    """What the real agents say in mode ``hints``."""

    name = "hints"

    def __init__(self, shape: Shape) -> None:
        self._guide = Hinting(expected_gaps(shape))

    def settings(self, costs: CostModel) -> Mapping[str, Any] | None:
        return {"host_bytes": 0, "sam": RESUME_FIRST}

    def hint(self, agent: Agent) -> Mapping[str, Any] | None:
        hint: Mapping[str, Any] = self._guide.guided(agent.trajectory).fields(agent.now)[
            "agent_hint"
        ]
        return hint


def compare(said: Mapping[str, Any], report: Report) -> list[str]:
    """A line for each mode; what is outside of the bounds says so."""
    shape = shape_of(said["workload"]["shape"])
    costs = fitted(Costs.from_dict(said["costs"]), HOST_BYTES)
    makers = {STOCK: Policy, "hints": lambda: _Hints(shape), "host": _Host}
    lines = []
    for mode, make in makers.items():
        rounds = [one for one in said["rounds"] if one["mode"] == mode]
        if not rounds:
            continue
        runs = [_simulated(make(), said["workload"], shape, costs, one) for one in rounds]
        hits = [float(run.gpu_tokens + run.host_tokens) for run in runs]
        real_hits = [float(one["hit_tokens"]) for one in rounds]
        ttft_s = [run.mean_ttft_s for run in runs]
        real_ttft_s = [one["ttft_resumed"]["mean_s"] for one in rounds]
        off = _off(hits, real_hits), _off(ttft_s, real_ttft_s)
        report.counts[f"hits_off_{mode}"], report.counts[f"ttft_off_{mode}"] = off
        right = abs(off[0]) <= _HITS_WITHIN and abs(off[1]) <= _TTFT_WITHIN
        lines.append(
            f"{mode:8}{sum(real_hits):10,.0f} hit tokens, foretold {sum(hits):10,.0f} "
            f"({off[0]:+.1%}); TTFT {statistics.median(real_ttft_s):6.2f} s, foretold "
            f"{statistics.median(ttft_s):6.2f} s ({off[1]:+.1%}){'' if right else _OUT}"
        )
    return lines


def _off(foretold: Sequence[float], real: Sequence[float]) -> float:
    """By how much, as the median of rounds: one may have been disturbed."""
    return statistics.median(a / b for a, b in zip(foretold, real, strict=True)) - 1


def _simulated(
    policy: Policy,
    workload: Mapping[str, Any],
    shape: Shape,
    costs: CostModel,
    real: Mapping[str, Any],
) -> Run:
    tasks = draw_tasks(shape, workload["tasks"], real["workload_seed"])
    with tempfile.TemporaryDirectory() as name:
        directory = write_model(Path(name), MAX_MODEL_LEN)
        return simulate(policy, tasks, workload["concurrency"], costs, directory, 0.0, quantum=1)


def shape_of(said: Mapping[str, Any]) -> Shape:
    """From its JSON form."""
    pairs = ("first_tokens", "new_tokens", "turns", "children", "child_turns")
    changed: dict[str, Any] = {name: tuple(said[name]) for name in pairs}
    return Shape(**{**said, **changed, "tools": tuple(Tool(**one) for one in said["tools"])})


def main() -> int:
    """Simulate what was measured, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measured", type=Path, help="the JSON file of benchmarks/agents_e2e.py")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    args = parser.parse_args()
    for name in ("vllm", "connectors", "spm"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    said = json.loads(args.measured.read_text())
    report = Report("sim_check", Options(False, said["seed"], args.json), said["repeats"])
    lines = compare(said, report)
    print("\n".join(lines))
    report.finish()
    return 1 if any(line.endswith(_OUT) for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
