"""A soak: many agents on a real vLLM server whose Redis fails in every way it can.

vLLM's OpenAI server with the connector and its endpoint plugin runs on a small made model, with a
GPU pool that is too small for what runs (so requests are preempted), a host tier that is always
full and a Redis that always evicts. Agents talk to it in sessions of many turns: with good hints
and bad ones, tools that pause, forks, rewinds and compactions, requests that are aborted or
left, and management calls. Meanwhile Redis is killed, frozen, filled, emptied, cut off and
damaged, and vLLM's own cache is reset, on a schedule drawn from the seed.

Afterwards every generated token is compared with what stock vLLM says at its position
(``soak_verdicts.py``), all sessions are ended, and nothing may be left. Exits with 1 if a request
was lost or answered wrongly, a process died, something leaked, or an error was logged.
"""

import argparse
import asyncio
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script, from anywhere

from benchmarks.report import Options, Report
from benchmarks.soak_requests import Outcome as RequestOutcome
from benchmarks.soak_run import Outcome, Run
from benchmarks.soak_watch import growth_by_process, second_half

_MINUTES, _QUICK_MINUTES = 30.0, 2.0
_AGENTS = 36
_SHOWN = 60
_MUST_BE_ZERO = (
    "wrong_tokens",
    "lost_requests",
    "engine_deaths",
    "leaks",
    "failed_calls",
    "logged_errors",
)


@dataclass(frozen=True)
class SoakOptions:
    """The arguments every benchmark takes, and how long the load lasts."""

    common: Options
    minutes: float
    agents: int
    directory: Path
    """For logs and all that was generated."""

    @classmethod
    def parse(cls) -> "SoakOptions":
        """From the command line."""
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--minutes", type=float, help=f"of load; {_MINUTES:g} if not given")
        parser.add_argument("--quick", action="store_true", help="under four minutes in all")
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--agents", type=int, default=_AGENTS)
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
        args = parser.parse_args()
        minutes = args.minutes or (_QUICK_MINUTES if args.quick else _MINUTES)
        directory = Path(tempfile.mkdtemp(prefix="soak-"))
        json_path = args.json or directory / "soak.json"
        return cls(Options(args.quick, args.seed, json_path), minutes, args.agents, directory)


def add_outcome(report: Report, outcome: Outcome) -> None:
    """What the run gave, as counts and the ratio of memory."""
    tally, verdict = outcome.tally, outcome.verdict
    assert verdict is not None
    counts = report.counts
    counts["finished"] = tally.outcomes[RequestOutcome.FINISHED]
    counts["wrong_tokens"] = verdict.wrong
    counts["lost_requests"] = tally.outcomes[RequestOutcome.LOST]
    counts["engine_deaths"] = len(outcome.deaths)
    counts["leaks"] = len(outcome.leaks)
    counts["faults_injected"] = len(outcome.faults)
    counts["failed_calls"] = len(tally.failed_calls)
    counts["logged_errors"] = len(outcome.errors)
    counts["left_by_client"] = tally.outcomes[RequestOutcome.LEFT]
    counts["aborted"] = tally.outcomes[RequestOutcome.ABORTED]
    counts["refused"] = tally.outcomes[RequestOutcome.REFUSED]
    counts["management_calls"] = tally.calls.total()
    counts["compared_requests"] = verdict.requests
    counts["compared_tokens"] = verdict.tokens
    counts["stock_own_difference"] = verdict.own_difference
    counts["tolerance"] = verdict.tolerance
    counts["largest_difference"] = verdict.largest_difference
    counts |= outcome.counters
    if len(outcome.samples) > 1:
        end, half_way = second_half(outcome.samples)
        report.add_ratio("rss_second_half", end, half_way)


def problems(outcome: Outcome) -> list[str]:
    """One line each, for whoever has to find out."""
    found = [f"lost: {one}" for one in outcome.tally.lost]
    found += [f"call: {one}" for one in outcome.tally.failed_calls]
    found += [f"death: {one}" for one in outcome.deaths]
    found += [f"leak: {one}" for one in outcome.leaks]
    found += [f"logged: {one}" for one in outcome.errors]
    examples = () if outcome.verdict is None else outcome.verdict.examples
    return found + [f"wrong: {one}" for one in examples]


def failures(counts: dict[str, float]) -> list[str]:
    """What has to be zero and is not, and what has to be there and is not."""
    failed = [f"{name}: {counts[name]:g}" for name in _MUST_BE_ZERO if counts[name]]
    if counts["compared_requests"] < counts["finished"]:
        failed.append(f"compared only {counts['compared_requests']:g} of {counts['finished']:g}")
    if not counts["finished"]:
        failed.append("nothing finished")
    return failed


def main() -> int:
    """Run and report."""
    options = SoakOptions.parse()
    report = Report("soak", options.common, 1)
    print(f"logs and everything generated: {options.directory}", flush=True)
    run = Run(options.common.seed, 60 * options.minutes, options.agents, options.directory)
    outcome = asyncio.run(run.execute())
    add_outcome(report, outcome)
    print("\nmemory by process:")
    print("\n".join(growth_by_process(outcome.samples)))
    shown = problems(outcome)
    print("\n".join(shown[:_SHOWN]))
    report.finish()
    print(f"\nresult: {options.common.json_path}")
    failed = failures(report.counts)
    print("\nFAILED: " + "; ".join(failed) if failed else "\nsurvived")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
