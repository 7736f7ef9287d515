"""Agents in a closed loop on real vLLM: what each way of keeping their KV is worth.

Several of vLLM's OpenAI servers run side by side on the real model: stock (vLLM's own prefix
cache), with our connector for hints only, with a host tier, with Redis, with both and hints and
prefetches, and with LMCache's server and the same Redis. Each pool holds half of what the
sessions need. In every round each of them serves the same agents, one server after the other,
from an empty cache, in rotated order: so many tasks at a time, with a shared system prompt, a
context that grows by what was really answered, tools that take their time, and sub-agents whose
parent waits for them.

With ``--json FILE`` also pictures, beside the file.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script, from anywhere

from benchmarks.agents.e2e_modes import BEST, MODES, STOCK
from benchmarks.agents.e2e_report import AgentsReport, describe_workload
from benchmarks.agents.e2e_run import Plan, run_plan
from benchmarks.agents.workload import Shape
from benchmarks.report import Options

_SHAPE = Shape(
    system_tokens=512,
    first_tokens=(400, 800),
    new_tokens=(100, 300),
    answer_median=20,
    answer_sigma=0.3,
    turns=(4, 5),
    gap_scale=4.0,
    longest_gap_s=6.0,
    fan_out_share=0.06,
    children=(2, 2),
    child_turns=(2, 3),
)
"""Contexts from about 1,000 to about 2,300 tokens."""
_SLOTS = 6
"""Tasks at a time, and in a round."""


def plan_for(options: Options) -> Plan:
    """What a run of these options does."""
    if options.quick:
        return Plan((STOCK, BEST), 2, _SHAPE, _SLOTS, _SLOTS, options.seed)
    return Plan(tuple(MODES), 5, _SHAPE, _SLOTS, _SLOTS, options.seed, with_offloading=True)


def main() -> int:
    """Measure and report."""
    options = Options.parse(__doc__ or "")
    plan = plan_for(options)
    report = AgentsReport("agents_e2e", options, plan.rounds)
    report.workload = describe_workload(
        plan.shape, plan.tasks, plan.concurrency, plan.need_blocks, plan.pool_blocks
    )
    print(f"  {plan.concurrency} of {plan.tasks} tasks at a time need {plan.need_blocks} blocks at")
    print(f"  their longest, the pool has {plan.pool_blocks}", flush=True)
    started_s = time.monotonic()
    outcome = asyncio.run(run_plan(plan, Path(tempfile.mkdtemp(prefix="agents-e2e-"))))
    report.add_rounds(outcome.measures)
    report.costs = outcome.costs
    report.not_run = outcome.not_run
    report.counts["wall_s"] = time.monotonic() - started_s
    print("\nmedians of the rounds; times to first token of resumed turns, then of all")
    print("\n".join(report.table()))
    for name, why in report.not_run.items():
        print(f"not run: {name}: {why}")
    report.finish()
    if options.json_path is not None:
        for path in report.draw(options.json_path.with_suffix("")):
            print(f"picture: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
