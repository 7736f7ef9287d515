"""What the demo prints about its runs."""

import itertools

import pytest

from spm.demo.conversation import TurnKey
from spm.demo.metrics_client import TokenSources
from spm.demo.phases import HOST, RECOMPUTE, REDIS, REFERENCE, RESTART, Phase
from spm.demo.report import (
    PhaseResults,
    differing_turns,
    median_resume_ttft,
    other_hits,
    summary,
    turn_header,
    turn_row,
)
from tests.spm.demo.turn_results import result, results

KEY = TurnKey(2, "worker-build")


def summary_row(runs: list[tuple[Phase, PhaseResults]], phase: Phase) -> str:
    (row,) = [line for line in summary(runs) if line.startswith(phase.title)]
    return row.removeprefix(phase.title)


def test_a_row_shows_the_turn_and_where_its_tokens_came_from() -> None:
    row = turn_row(result(KEY, ttft_s=0.256), result(KEY))
    assert row.split() == [
        *("2", "worker-build", "3,465", "1,024", "64", "32", "2,345", "0.26", "s", "same")
    ]


def test_columns_stand_under_their_titles() -> None:
    header, row = turn_header(), turn_row(result(KEY), None)
    for title, value in [("prompt", "3,465"), ("remote", "32"), ("recomputed", "2,345")]:
        assert header.index(title) + len(title) == row.index(value) + len(value)


@pytest.mark.parametrize(
    ("token_ids", "verdict"),
    [((5, 6, 7), "same"), ((5, 6, 8), "DIFFERENT"), ((5, 6), "DIFFERENT"), ((), "DIFFERENT")],
)
def test_a_row_says_different_only_where_tokens_differ(
    token_ids: tuple[int, ...], verdict: str
) -> None:
    turn = result(KEY, token_ids=token_ids, logprobs=(-9.0,), ttft_s=99.0)
    assert turn_row(turn, result(KEY)).split()[-1] == verdict


def test_a_turn_of_the_reference_is_compared_to_nothing() -> None:
    assert turn_row(result(KEY), None).endswith("(reference)")


def test_differing_turns_are_those_with_other_tokens_alone() -> None:
    reference, run = results(REFERENCE), results(HOST, ttft_s=9.0)
    assert differing_turns(run, reference) == []
    run[KEY] = result(KEY, token_ids=(5, 6, 9))
    other = TurnKey(1, "orchestrator")
    run[other] = result(other, logprobs=(-3.0, -3.0, -3.0))
    assert differing_turns(run, reference) == [KEY]


def test_another_hit_is_another_number_of_computed_tokens_alone() -> None:
    reference, run = results(REFERENCE), results(HOST)
    run[KEY] = result(KEY, sources=TokenSources(gpu=1120, computed=2345), token_ids=(1,))
    assert other_hits(run, reference) == []
    run[KEY] = result(KEY, sources=TokenSources(gpu=1119, computed=2346))
    assert other_hits(run, reference) == [KEY]


def test_the_median_leaves_out_turns_that_open_a_session() -> None:
    run = results(HOST, ttft_s=0.5, opening_ttft_s=100.0)
    assert median_resume_ttft(run) == 0.5
    slow = TurnKey(3, "worker-docs")
    run[slow] = result(slow, ttft_s=80.0)
    assert median_resume_ttft(run) == 0.5, "nor does one slow turn move it"


def test_there_is_no_median_without_a_resumed_turn() -> None:
    key = TurnKey(1, "orchestrator")
    assert median_resume_ttft({key: result(key)}) is None


def test_the_summary_compares_resumed_turns_with_recompute_and_with_gpu_hits() -> None:
    runs: list[tuple[Phase, PhaseResults]] = [
        (REFERENCE, results(REFERENCE, ttft_s=0.25)),
        (RECOMPUTE, results(RECOMPUTE, ttft_s=4.0)),
        (HOST, results(HOST, ttft_s=0.5)),
    ]
    assert summary_row(runs, HOST).split()[:2] == ["0.50", "s"]
    assert "8.0 faster" in summary_row(runs, HOST)
    assert summary_row(runs, HOST).split("faster")[1].split()[0] == "2.00"
    assert "12 of 12 turns" in summary_row(runs, HOST)
    assert summary_row(runs, REFERENCE).endswith("(reference)")


def test_ratios_are_taken_turn_by_turn_of_the_turns_both_runs_have() -> None:
    """Round 2 recomputes slowly; a run of round 3 alone must not get the credit."""
    recompute, restart = results(RECOMPUTE, ttft_s=1000.0), results(RESTART)
    for key, cold_s, loaded_s in zip(
        restart, (2.0, 40.0, 40.0, 40.0), (1.0, 20.0, 20.0, 10.0), strict=True
    ):
        recompute[key] = result(key, ttft_s=cold_s)
        restart[key] = result(key, ttft_s=loaded_s)
    runs: list[tuple[Phase, PhaseResults]] = [
        (REFERENCE, results(REFERENCE)),
        (RECOMPUTE, recompute),
        (RESTART, restart),
    ]
    assert " 2.0 faster" in summary_row(runs, RESTART)


def test_the_summary_counts_equal_turns_and_shows_the_largest_logprob_gap() -> None:
    run = results(HOST)
    run[KEY] = result(KEY, token_ids=(1, 2, 3), logprobs=(-0.5, -0.25, -1.5))
    row = summary_row([(REFERENCE, results(REFERENCE)), (HOST, run)], HOST)
    assert row.endswith("11 of 12 turns, logprobs within 0.5")


@pytest.mark.parametrize(
    "phases",
    [
        chosen
        for count in range(5)
        for chosen in itertools.combinations([RECOMPUTE, HOST, REDIS, RESTART], count)
    ],
    ids=lambda phases: "+".join(phase.name for phase in phases) or "reference alone",
)
def test_any_choice_of_phases_has_a_summary_of_one_line_each(phases: tuple[Phase, ...]) -> None:
    chosen = (REFERENCE, *phases)
    lines = summary([(phase, results(phase)) for phase in chosen])
    titles = [line[: len(phase.title)] for line, phase in zip(lines[1:], chosen, strict=True)]
    assert titles == [phase.title for phase in chosen]


def test_without_recompute_there_is_no_speedup() -> None:
    runs: list[tuple[Phase, PhaseResults]] = [
        (REFERENCE, results(REFERENCE)),
        (HOST, results(HOST)),
    ]
    row = summary_row(runs, HOST).split()
    assert row[:4] == ["1.00", "s", "-", "1.00"]


def test_a_run_without_turns_has_a_line_too() -> None:
    runs: list[tuple[Phase, PhaseResults]] = [(REFERENCE, results(REFERENCE)), (HOST, {})]
    assert "0 of 0 turns" in summary_row(runs, HOST)
