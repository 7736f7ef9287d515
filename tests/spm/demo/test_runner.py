"""The verdict: which differences make the demo fail."""

import pytest

from spm.demo.conversation import TurnKey
from spm.demo.phases import HOST, RECOMPUTE, REDIS, REFERENCE, RESTART, SELECTABLE, Phase
from spm.demo.runner import Runs, _conclude
from tests.spm.demo.turn_results import result, results

KEY = TurnKey(3, "worker-tests")


def runs_where(differing: Phase | None, chosen: tuple[Phase, ...] = SELECTABLE) -> Runs:
    """All phases, one of which has another token in its last round."""
    runs: Runs = []
    for phase in (REFERENCE, *chosen):
        turns = results(phase)
        if phase is differing:
            key = max(turns)
            turns[key] = result(key, token_ids=(5, 6, 99))
        runs.append((phase, turns))
    return runs


def test_equal_tokens_everywhere_are_a_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert _conclude(runs_where(None)) == 0
    assert "FAILED" not in capsys.readouterr().out


@pytest.mark.parametrize("phase", [HOST, REDIS, RESTART], ids=lambda phase: phase.name)
def test_one_other_token_with_the_connector_is_a_failure_that_names_the_turn(
    phase: Phase, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _conclude(runs_where(phase)) == 1
    failure = capsys.readouterr().out.partition("FAILED")[2]
    assert f"{phase.name}: round {phase.last_round}, worker-tests" in failure
    assert failure.count("round") == 1


def test_recomputing_may_differ(capsys: pytest.CaptureFixture[str]) -> None:
    assert _conclude(runs_where(RECOMPUTE)) == 0
    assert "FAILED" not in capsys.readouterr().out


def test_recomputing_does_not_excuse_the_connector() -> None:
    runs = runs_where(HOST)
    runs[1][1][KEY] = result(KEY, token_ids=(1,))  # type: ignore[index]
    assert runs[1][0] is RECOMPUTE
    assert _conclude(runs) == 1


def test_other_logprobs_or_times_with_equal_tokens_are_no_failure() -> None:
    turns = {key: result(key, logprobs=(-2.0, -2.0, -2.0), ttft_s=30.0) for key in results(HOST)}
    assert _conclude([(REFERENCE, results(REFERENCE)), (HOST, turns)]) == 0


@pytest.mark.parametrize("chosen", [(), (HOST,), (REDIS, RESTART), (RECOMPUTE,)])
def test_phases_that_did_not_run_do_not_matter(chosen: tuple[Phase, ...]) -> None:
    assert _conclude(runs_where(None, chosen)) == 0
