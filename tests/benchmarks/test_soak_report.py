"""What fails a soak."""

from pathlib import Path

import pytest

from benchmarks.report import Options, Report
from benchmarks.soak import add_outcome, failures, problems
from benchmarks.soak_requests import Answer, Generated
from benchmarks.soak_requests import Outcome as RequestOutcome
from benchmarks.soak_run import Outcome
from benchmarks.soak_verdicts import Verdict, WrongToken
from benchmarks.soak_watch import Held, Sample

FINISHED = Answer(RequestOutcome.FINISHED, Generated((7,), (-1.0,)))


def _outcome() -> Outcome:
    outcome = Outcome()
    outcome.tally.note("one", FINISHED)
    outcome.tally.note("two", Answer(RequestOutcome.LEFT))
    outcome.tally.note_call("GET /x", 404, True, "")
    outcome.samples = [Sample(n, {1: Held("P", 100, 1, 1)}) for n in range(4)]
    outcome.verdict = Verdict(1e-4, 5e-6, chains=1, requests=1, tokens=1)
    outcome.counters = {"preemptions": 3.0}
    return outcome


def _counts(outcome: Outcome) -> dict[str, float]:
    report = Report("soak", Options(True, 0, None), 1)
    add_outcome(report, outcome)
    return report.counts


def test_a_soak_that_survived() -> None:
    report = Report("soak", Options(True, 0, None), 1)
    add_outcome(report, _outcome())
    assert failures(report.counts) == []
    assert problems(_outcome()) == []
    assert report.counts["left_by_client"] == 1
    assert report.counts["preemptions"] == 3
    assert report.ratios["rss_second_half"]["median"] == 1.0
    named = {"finished", "wrong_tokens", "lost_requests", "engine_deaths", "leaks"}
    assert named | {"faults_injected"} <= report.counts.keys()


def _lost(outcome: Outcome) -> None:
    outcome.tally.note("three", Answer(RequestOutcome.LOST, problem="HTTP 500"))


def _wrong(outcome: Outcome) -> None:
    assert outcome.verdict is not None
    outcome.verdict.wrong = 1
    outcome.verdict.examples = (WrongToken("one", 3, 1.0, 1.0),)


def _not_compared(outcome: Outcome) -> None:
    outcome.tally.note("three", FINISHED)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_lost, "lost_requests"),
        (_wrong, "wrong_tokens"),
        (_not_compared, "compared only 1 of 2"),
        (lambda o: o.deaths.append("process EngineCore ended"), "engine_deaths"),
        (lambda o: o.leaks.append("spm:sessions: 1"), "leaks"),
        (lambda o: o.errors.append("Traceback"), "logged_errors"),
        (lambda o: o.tally.note_call("GET /x", 500, False, "no"), "failed_calls"),
        (lambda o: o.tally.outcomes.clear(), "nothing finished"),
    ],
)
def test_what_fails_it_is_named(spoil: object, named: str) -> None:
    outcome = _outcome()
    spoil(outcome)  # type: ignore[operator]
    (failure,) = failures(_counts(outcome))
    assert named in failure
    if named not in ("compared only 1 of 2", "nothing finished"):
        assert len(problems(outcome)) == 1


def test_the_result_is_written_as_every_benchmark_does(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    report = Report("soak", Options(True, 5, path), 1)
    add_outcome(report, _outcome())
    report.finish(show=lambda _: None)
    assert '"rss_second_half"' in path.read_text()
