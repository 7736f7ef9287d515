"""The verdict: which differences make the demo fail."""

import pytest

from spm.demo import runner
from spm.demo.conversation import TurnKey
from spm.demo.lmcache_process import LMCacheStartError
from spm.demo.metrics_client import TokenSources
from spm.demo.phases import (
    HOST,
    LMCACHE,
    LMCACHE_RESTART,
    LMCACHE_STORE,
    RECOMPUTE,
    REDIS,
    REDIS_STORE,
    REFERENCE,
    RESTART,
    Phase,
)
from spm.demo.runner import DemoOptions, Runs, _conclude, run_demo
from tests.spm.demo.turn_results import result, results

KEY = TurnKey(3, "worker-tests")


def runs_where(differing: Phase | None, chosen: tuple[Phase, ...] = REDIS_STORE.phases) -> Runs:
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


@pytest.mark.parametrize("phase", [LMCACHE, LMCACHE_RESTART], ids=lambda phase: phase.name)
def test_lmcache_is_held_to_the_same(phase: Phase) -> None:
    assert _conclude(runs_where(None, LMCACHE_STORE.phases)) == 0
    assert _conclude(runs_where(phase, LMCACHE_STORE.phases)) == 1


def test_a_hit_of_another_length_is_named_and_is_no_excuse(
    capsys: pytest.CaptureFixture[str],
) -> None:
    turns = results(HOST)
    turns[KEY] = result(KEY, sources=TokenSources(gpu=1024, computed=2441))
    assert _conclude([(REFERENCE, results(REFERENCE)), (HOST, turns)]) == 0
    told = capsys.readouterr().out
    assert "everywhere but in\n  host: round 3, worker-tests\n" in told
    turns[KEY] = result(KEY, token_ids=(9,), sources=TokenSources(gpu=1024, computed=2441))
    assert _conclude([(REFERENCE, results(REFERENCE)), (HOST, turns)]) == 1


def test_recomputing_is_not_told_of_as_a_hit_of_another_length(
    capsys: pytest.CaptureFixture[str],
) -> None:
    turns = {key: result(key, sources=TokenSources(computed=3465)) for key in results(RECOMPUTE)}
    assert _conclude([(REFERENCE, results(REFERENCE)), (RECOMPUTE, turns)]) == 0
    assert "everywhere but" not in capsys.readouterr().out


def test_without_lmcache_its_demo_says_how_to_install_it_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "lmcache_installed", lambda: False)
    monkeypatch.setattr(runner, "ensure_model", lambda: pytest.fail("it started"))
    with pytest.raises(LMCacheStartError, match=r"pip install '\.\[lmcache\]'"):
        run_demo(DemoOptions(store="lmcache"))


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
