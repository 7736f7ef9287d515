"""Percentiles over rounds, and their interval."""

import pytest

from benchmarks.frozen_store import percentile, percentile_ratio


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 51.0), (0.99, 100.0), (1.0, 100.0)])
def test_a_percentile_is_one_of_the_samples(share: float, value: float) -> None:
    assert percentile([float(n) for n in range(100, 0, -1)], share) == value


def test_a_rare_slow_request_shows_at_the_end_only() -> None:
    stock = [[1.0] * 20 for _ in range(10)]
    ours = [[1.0] * 19 + [3.0] for _ in range(10)]
    assert percentile_ratio(ours, stock, 0.5, 0)["median"] == 1.0
    assert percentile_ratio(ours, stock, 0.99, 0)["median"] == 3.0


def test_the_interval_is_over_rounds_and_repeats_with_the_seed() -> None:
    stock = [[1.0] * 4 for _ in range(8)]
    ours = [[2.0] * 4 if number % 2 else [1.0] * 4 for number in range(8)]
    ratio = percentile_ratio(ours, stock, 0.5, 0)
    assert ratio["low"] <= ratio["median"] <= ratio["high"]
    assert (ratio["low"], ratio["high"]) == (1.0, 2.0)
    assert ratio == percentile_ratio(ours, stock, 0.5, 0)
