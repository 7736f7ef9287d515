"""Estimates of load times: believed at once when faster, by degrees when slower."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.scheduler.load_estimate import LoadEstimate

MiB = 1 << 20
BATCH = 16 * MiB


def estimate(threads: int = 1) -> LoadEstimate:
    return LoadEstimate(BATCH, threads)


def seconds(one: LoadEstimate, size_bytes: int) -> float:
    known = one.seconds_for(size_bytes, one.batches(size_bytes))
    assert known is not None
    return known


def store_s(size_bytes: int, latency_s: float, bytes_per_s: float) -> float:
    """Of all batches together, as a load thread measures them."""
    return math.ceil(size_bytes / BATCH) * latency_s + size_bytes / bytes_per_s


def test_nothing_measured_is_nothing_known() -> None:
    one = estimate()
    for size_bytes, took_s in ((0, 1.0), (1, 0.0), (1, math.inf), (1, -1.0)):
        one.note(size_bytes, took_s)
    assert one.seconds_for(MiB, 1) is None


def test_a_small_load_does_not_make_large_ones_look_slow() -> None:
    """Catches an estimate by bytes a second alone: a block that took a round trip would say
    that a gigabyte takes minutes."""
    one = estimate()
    for _ in range(10):
        one.note(64 << 10, 0.002)
    assert seconds(one, 64 * MiB) < 0.02


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(0.001, 1e9), (0.5, 1e9), (0.0005, 1e7)])
def test_it_learns_latency_and_bandwidth_apart(latency_s: float, bytes_per_s: float) -> None:
    one = estimate()
    sizes = [64 << 10, 40 * MiB, MiB, 16 * MiB] * 20
    for size in sizes:
        one.note(size, store_s(size, latency_s, bytes_per_s))
    for size in sizes[:4]:
        true_s = store_s(size, latency_s, bytes_per_s)
        assert true_s / 3 < seconds(one, size) < true_s * 3


def test_a_store_that_became_slow_is_found_out_within_a_few_loads() -> None:
    one = estimate()
    one.note(MiB, 0.001)
    after = []
    for _ in range(3):
        one.note(MiB, 1.0)
        after.append(seconds(one, MiB))
    assert after == sorted(after)
    assert after[0] > 0.5
    assert after[-1] > 0.8


def test_a_store_that_became_fast_is_believed_at_once() -> None:
    one = estimate()
    for _ in range(10):
        one.note(8 * MiB, 2.0)
    one.note(8 * MiB, 0.01)
    assert seconds(one, 8 * MiB) == pytest.approx(0.01)


def test_threads_read_side_by_side() -> None:
    one = estimate(threads=2)
    one.note(4 * BATCH, 4.0)
    assert seconds(one, 4 * BATCH) == pytest.approx(2.0)
    assert seconds(one, BATCH) == pytest.approx(1.0), "one batch has one thread"


def test_a_load_given_up_took_at_least_so_long() -> None:
    """Catches a store that never finishes in time and so is never measured."""
    one = estimate(threads=2)
    one.note_at_least(4 * BATCH, 3.0)
    assert seconds(one, 4 * BATCH) == pytest.approx(3.0)
    one.note_at_least(4 * BATCH, 1.0)
    assert seconds(one, 4 * BATCH) == pytest.approx(3.0), "it is known to be slower than that"


@given(
    st.lists(st.tuples(st.integers(1, 1 << 33), st.floats(1e-6, 1e3)), min_size=1, max_size=30),
    st.integers(1, 1 << 33),
    st.integers(1, 8),
)
def test_estimates_are_finite_positive_and_no_faster_for_more(
    measured: list[tuple[int, float]], size_bytes: int, threads: int
) -> None:
    one = estimate(threads)
    for size, took_s in measured:
        one.note(size, took_s)
        assert seconds(one, size) <= took_s * (1 + 1e-6), "never slower than was just measured"
    batches = one.batches(size_bytes)
    once, more = one.seconds_for(size_bytes, batches), one.seconds_for(2 * size_bytes, batches)
    assert once is not None
    assert more is not None
    assert 0.0 <= once <= more < math.inf
