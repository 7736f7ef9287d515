"""What the demo prints: a row for every turn, and a summary of the runs."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spm.demo.client import Answer
from spm.demo.conversation import TurnKey
from spm.demo.metrics_client import TokenSources
from spm.demo.phases import RECOMPUTE, REFERENCE, Phase

_TURN_COLUMNS = "{:>7}  {:<13} {:>7} {:>7} {:>7} {:>7} {:>10} {:>8}  {}"
_SUMMARY_COLUMNS = "{:<49} {:>8} {:>12} {:>10}  {}"


@dataclass(frozen=True)
class TurnResult:
    """One turn of one run."""

    key: TurnKey
    answer: Answer
    sources: TokenSources

    @property
    def is_resume(self) -> bool:
        """Whether the session comes back, rather than opens."""
        return self.key.round > 1

    def same_tokens(self, reference: "TurnResult") -> bool:
        """Whether the answer is the reference's, token by token."""
        return self.answer.token_ids == reference.answer.token_ids

    def logprob_gap(self, reference: "TurnResult") -> float:
        """The largest difference of a token's logprob, as far as both answers go."""
        pairs = zip(self.answer.logprobs, reference.answer.logprobs, strict=False)
        return max((abs(mine - theirs) for mine, theirs in pairs), default=0.0)


PhaseResults = Mapping[TurnKey, TurnResult]


def turn_header() -> str:
    """Column titles of the turn table: prompt tokens by where their KV came from."""
    return "  " + _TURN_COLUMNS.format(
        "round", "session", "prompt", "gpu", "host", "remote", "recomputed", "TTFT", "tokens"
    )


def turn_row(result: TurnResult, reference: TurnResult | None) -> str:
    """One line for a finished turn."""
    if reference is None:
        verdict = "(reference)"
    else:
        verdict = "same" if result.same_tokens(reference) else "DIFFERENT"
    sources = result.sources
    return "  " + _TURN_COLUMNS.format(
        result.key.round,
        result.key.session,
        f"{result.answer.prompt_tokens:,}",
        f"{sources.gpu:,}",
        f"{sources.host:,}",
        f"{sources.remote:,}",
        f"{sources.computed:,}",
        f"{result.answer.ttft_s:.2f} s",
        verdict,
    )


def differing_turns(results: PhaseResults, reference: PhaseResults) -> list[TurnKey]:
    """The turns whose tokens are not the reference's."""
    return [key for key, turn in results.items() if not turn.same_tokens(reference[key])]


def other_hits(results: PhaseResults, reference: PhaseResults) -> list[TurnKey]:
    """The turns that computed another number of tokens than the reference's: a hit was shorter or
    longer. Their tokens may differ for that reason alone."""
    return [
        key
        for key, turn in results.items()
        if turn.sources.computed != reference[key].sources.computed
    ]


def median_resume_ttft(results: PhaseResults) -> float | None:
    """Median seconds to the first token of sessions that come back."""
    times = [turn.answer.ttft_s for turn in results.values() if turn.is_resume]
    return statistics.median(times) if times else None


def _median_ratio(numerators: PhaseResults, denominators: PhaseResults) -> float | None:
    """Median over the same resumed turns of both runs; robust to one slow turn."""
    ratios = [
        turn.answer.ttft_s / denominators[key].answer.ttft_s
        for key, turn in numerators.items()
        if turn.is_resume and key in denominators
    ]
    return statistics.median(ratios) if ratios else None


def summary(runs: Sequence[tuple[Phase, PhaseResults]]) -> list[str]:
    """The comparison of all runs, one line each."""
    by_phase = {phase.name: results for phase, results in runs}
    reference = by_phase[REFERENCE.name]
    recompute = by_phase.get(RECOMPUTE.name, {})
    lines = [
        _SUMMARY_COLUMNS.format("resumed turns", "TTFT", "x recompute", "x GPU hit", "same tokens")
    ]
    for phase, results in runs:
        same = len(results) - len(differing_turns(results, reference))
        gap = max((turn.logprob_gap(reference[key]) for key, turn in results.items()), default=0)
        tokens = f"{same} of {len(results)} turns, logprobs within {gap:.1g}"
        speedup = _median_ratio(recompute, results)
        lines.append(
            _SUMMARY_COLUMNS.format(
                phase.title,
                _number(median_resume_ttft(results), "{:.2f} s"),
                _number(speedup, "{:.1f} faster"),
                _number(_median_ratio(results, reference), "{:.2f}"),
                "(reference)" if phase is REFERENCE else tokens,
            )
        )
    return lines


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
