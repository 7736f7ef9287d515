"""What counts as a wrong token."""

import math

import pytest

from benchmarks.soak_chain import Chain
from benchmarks.soak_verdicts import (
    TIMES,
    StockToken,
    Verdict,
    WrongToken,
    tolerance_of,
    wrong_tokens,
)

TOLERANCE = 1e-3


def _chain(*logprobs: float) -> Chain:
    chain = Chain([1, 2, 3])
    chain.add_reply([7] * len(logprobs), logprobs, "one")
    return chain


def _wrong(logprob: float, stock: float, best: float) -> list[WrongToken]:
    return list(wrong_tokens(_chain(logprob), [StockToken(stock, best)], TOLERANCE))


def test_the_same_token_as_likely_as_in_stock_is_right() -> None:
    assert _wrong(-2.0, -2.0005, -2.0005) == []


def test_a_tie_may_be_decided_either_way() -> None:
    assert _wrong(-2.0, -2.0, -1.9995) == []


def test_a_worse_token_is_wrong() -> None:
    (wrong,) = _wrong(-2.0, -2.0, -1.9)
    assert wrong.gap == pytest.approx(0.1)
    assert "one, position 3" in str(wrong)


@pytest.mark.parametrize("logprob", [-2.1, -1.9])
def test_the_right_token_for_a_wrong_reason_is_wrong(logprob: float) -> None:
    assert len(_wrong(logprob, -2.0, -2.0)) == 1


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_no_number_is_wrong(logprob: float) -> None:
    assert len(_wrong(logprob, -2.0, -2.0)) == 1


def test_a_judge_that_skips_a_position_is_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        list(wrong_tokens(_chain(-1.0, -1.0), [StockToken(-1.0, -1.0)], TOLERANCE))


def test_tolerance_follows_what_stock_differs_from_itself() -> None:
    assert tolerance_of([1e-5, 1e-4]) == TIMES * 1e-4
    assert 0 < tolerance_of([0.0]) < 1e-3
    assert tolerance_of([]) == tolerance_of([0.0])


def test_a_verdict_counts_tokens_requests_and_the_largest_difference() -> None:
    verdict = Verdict(TOLERANCE, TOLERANCE / TIMES)
    chain = _chain(-1.0, -2.0)
    chain.extend([5])
    chain.add_reply([8, 8], [-3.0, -4.0], "two")
    verdict.add(chain, [StockToken(lp, lp) for lp in (-1.0, -2.0, -3.5, -4.5)])
    assert (verdict.chains, verdict.requests, verdict.tokens) == (1, 2, 4)
    assert (verdict.wrong, verdict.wrong_requests) == (2, 1)
    assert verdict.largest_difference == pytest.approx(0.5)
    assert [one.label for one in verdict.examples] == ["two", "two"]
