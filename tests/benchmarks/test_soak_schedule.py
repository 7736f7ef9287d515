"""The faults of a soak are known before it starts, and leave room to recover."""

import itertools

import pytest

from benchmarks.soak_schedule import FaultKind, make_schedule, rest_left_s, show_schedule


@pytest.mark.parametrize("minutes", [1, 2, 3, 30])
def test_every_kind_happens_and_none_overlaps(minutes: int) -> None:
    load_s = 60.0 * minutes
    faults = make_schedule(3, load_s)
    assert {fault.kind for fault in faults} == set(FaultKind)
    for fault, after in itertools.pairwise(faults):
        assert fault.at_s + fault.for_s < after.at_s
    assert all(fault.at_s > 0 and fault.at_s + fault.for_s < load_s for fault in faults)
    assert all((fault.for_s > 0) == fault.kind.lasts for fault in faults)


def test_no_kind_is_left_out_of_a_round() -> None:
    kinds = [fault.kind for fault in make_schedule(8, 1800.0)]
    size = len(FaultKind)
    whole = [kinds[at : at + size] for at in range(0, len(kinds) - size + 1, size)]
    assert len(whole) > 5
    assert all(set(one) == set(FaultKind) for one in whole)
    assert whole[0] != whole[1]


def test_a_seed_gives_the_same_faults_again() -> None:
    assert make_schedule(4, 180.0) == make_schedule(4, 180.0)
    assert make_schedule(4, 180.0) != make_schedule(5, 180.0)


def test_no_time_no_faults() -> None:
    assert make_schedule(0, 10.0) == []


def test_a_schedule_is_shown_with_its_times() -> None:
    shown = show_schedule(make_schedule(0, 180.0)).splitlines()
    assert len(shown) == len(make_schedule(0, 180.0))
    assert any("frozen for" in line for line in shown)
    assert any(line.endswith("emptied") for line in shown)


@pytest.mark.parametrize(
    ("since_s", "left_s"), [(0.0, 0.0), (36.9, 0.0), (37.0, 8.0), (44.0, 1.0), (45.0, 0.0)]
)
def test_agents_rest_at_the_end_of_each_period(since_s: float, left_s: float) -> None:
    assert rest_left_s(since_s) == pytest.approx(left_s)
    assert rest_left_s(since_s + 90.0) == pytest.approx(left_s)
