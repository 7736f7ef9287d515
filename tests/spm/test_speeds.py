"""Measured speeds: moving averages that tiny or nonsensical transfers do not spoil."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spm.residency import Tier
from spm.speeds import HALF_LIFE_BYTES, Speeds

MIB = 2**20


def test_nothing_is_known_before_the_first_transfer_and_tiers_are_apart() -> None:
    speeds = Speeds()
    assert speeds.bytes_per_s(Tier.HOST) is None
    speeds.note(Tier.HOST, 10 * MIB, 0.5)
    assert speeds.bytes_per_s(Tier.HOST) == pytest.approx(20 * MIB)
    assert speeds.bytes_per_s(Tier.REMOTE) is None


def test_after_a_half_life_old_and_new_count_alike() -> None:
    speeds = Speeds()
    for _ in range(64):
        speeds.note(Tier.REMOTE, HALF_LIFE_BYTES, HALF_LIFE_BYTES / 1e6)
    speeds.note(Tier.REMOTE, HALF_LIFE_BYTES, HALF_LIFE_BYTES / 1e8)
    assert speeds.bytes_per_s(Tier.REMOTE) == pytest.approx(1e7, rel=1e-6)
    for _ in range(40):
        speeds.note(Tier.REMOTE, HALF_LIFE_BYTES, HALF_LIFE_BYTES / 1e8)
    assert speeds.bytes_per_s(Tier.REMOTE) == pytest.approx(1e8, rel=1e-6)


@pytest.mark.parametrize("seconds", [1e-9, 10.0])
def test_a_tiny_transfer_hardly_counts_however_odd(seconds: float) -> None:
    speeds = Speeds()
    speeds.note(Tier.HOST, 100 * MIB, 0.1)
    before = speeds.bytes_per_s(Tier.HOST)
    assert before is not None
    for _ in range(10):
        speeds.note(Tier.HOST, 1024, seconds)
    assert speeds.bytes_per_s(Tier.HOST) == pytest.approx(before, rel=0.01)


@pytest.mark.parametrize(
    ("size_bytes", "seconds"),
    [(0, 1.0), (-1, 1.0), (1, 0.0), (1, -1.0), (1, math.nan), (1, math.inf)],
)
def test_nonsense_is_ignored(size_bytes: int, seconds: float) -> None:
    speeds = Speeds()
    speeds.note(Tier.HOST, size_bytes, seconds)
    assert speeds.bytes_per_s(Tier.HOST) is None


@given(st.lists(st.tuples(st.integers(1, 2**50), st.floats(1e-9, 1e9)), min_size=1))
def test_the_average_lies_between_the_extremes(notes: list[tuple[int, float]]) -> None:
    speeds = Speeds()
    for size_bytes, seconds in notes:
        speeds.note(Tier.HOST, size_bytes, seconds)
    measured = [size_bytes / seconds for size_bytes, seconds in notes]
    got = speeds.bytes_per_s(Tier.HOST)
    assert got is not None
    assert min(measured) * (1 - 1e-9) <= got <= max(measured) * (1 + 1e-9)
