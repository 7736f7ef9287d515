"""Made-up results of the demo's runs."""

from spm.demo.client import Answer
from spm.demo.conversation import TurnKey, turns
from spm.demo.metrics_client import TokenSources
from spm.demo.phases import Phase
from spm.demo.report import TurnResult

SOURCES = TokenSources(gpu=1024, external=96, computed=2345, host=64, remote=32)


def result(
    key: TurnKey,
    *,
    token_ids: tuple[int, ...] = (5, 6, 7),
    logprobs: tuple[float, ...] = (-0.5, -0.25, -1.0),
    ttft_s: float = 1.0,
    sources: TokenSources = SOURCES,
) -> TurnResult:
    return TurnResult(key, Answer("text", token_ids, logprobs, 3465, ttft_s), sources)


def results(
    phase: Phase, ttft_s: float = 1.0, opening_ttft_s: float = 50.0
) -> dict[TurnKey, TurnResult]:
    """All turns of a phase, with the same answers as in every other phase."""
    return {
        key: result(key, ttft_s=ttft_s if key.round > 1 else opening_ttft_s)
        for key in turns(phase.first_round, phase.last_round)
    }
