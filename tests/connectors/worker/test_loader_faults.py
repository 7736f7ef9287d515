"""Values and stores that are bad in every way: what is good arrives, the rest is answered."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.metadata import LoadFailure
from spm.errors import StoreTimeoutError
from spm.metrics import Metric
from tests.connectors.worker.kit import (
    NUM_BLOCKS,
    counter,
    key_of,
)
from tests.connectors.worker.loading import FAULTS, Bench, spoil

SIX = range(6)


@pytest.mark.parametrize("position", SIX)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.fault("F18", breaks="a load goes on behind a hole")
def test_one_bad_value_costs_itself_and_what_follows_it(
    make: Callable[..., Bench], fault: str, position: int
) -> None:
    bench = make(threads=1)
    bench.put_remote(*SIX)
    spoil(bench, fault, position)
    bench.load(*SIX)
    result = bench.answer()
    reason = LoadFailure.MISSING if fault == "missing" else LoadFailure.CORRUPT
    after = range(position + 1, len(SIX))
    assert result.remote_keys == [key_of(i) for i in range(position)]
    assert result.failed == {
        key_of(position): reason,
        **{key_of(i): LoadFailure.SKIPPED for i in after},
    }
    assert result.failed_block_ids == [i + 1 for i in range(position, len(SIX))]
    bench.holds(*range(position))
    assert bench.promoted == [bench.name(i) for i in range(position)]
    counted = bench.counted()
    assert counted[counter(Metric.LOAD_FAILED_BLOCKS, reason.value)] == 1
    assert counter(Metric.INTERNAL_ERRORS, "loader") not in counted


def test_a_batch_after_a_failure_is_not_even_asked_for(make: Callable[..., Bench]) -> None:
    bench = make(threads=1)
    bench.put_remote(*SIX)
    spoil(bench, "missing", 0)
    bench.load(*SIX)
    bench.answer()
    assert bench.remote.calls == [[bench.name(0), bench.name(1)]]


# --- the store fails -------------------------------------------------------------------


@pytest.mark.parametrize("error", [StoreTimeoutError("late"), RuntimeError("a bug")])
@pytest.mark.parametrize("position", [0, 3, 5])
def test_a_batch_whose_read_raises_has_failed_and_the_next_load_works(
    make: Callable[..., Bench], error: Exception, position: int
) -> None:
    bench = make(threads=1)
    bench.put_remote(*SIX)
    bench.remote.read_errors[bench.name(position)] = error
    bench.load(*SIX)
    result = bench.answer()
    good = position - position % 2
    assert result.remote_keys == [key_of(i) for i in range(good)]
    assert [result.failed[key_of(i)] for i in (good, good + 1)] == [LoadFailure.STORE] * 2
    bench.holds(*range(good))
    unexpected = bench.counted().get(counter(Metric.INTERNAL_ERRORS, "loader"), 0)
    assert unexpected == isinstance(error, RuntimeError)
    bench.remote.read_errors.clear()
    bench.load(*SIX, job_id=2)
    assert not bench.answer().failed
    bench.loader.check_integrity(idle=True)


def test_a_device_that_fails_fails_the_load_and_the_thread_lives_on(bench: Bench) -> None:
    bench.put_remote(0)
    bench.flaky.error = RuntimeError("device")
    bench.load(0)
    assert bench.answer().failed == {key_of(0): LoadFailure.STORE}
    assert bench.counted()[counter(Metric.INTERNAL_ERRORS, "loader")] == 1
    bench.flaky.error = None
    bench.load(0, job_id=2)
    assert bench.answer().remote_keys == [key_of(0)]
    bench.loader.check_integrity(idle=True)


def test_without_free_buffers_blocks_are_missing_and_come_when_there_are_some(
    bench: Bench,
) -> None:
    bench.put_remote(0)
    whole = bench.pool.acquire(bench.pool.capacity_bytes)
    assert whole is not None
    bench.load(0)
    assert bench.answer().failed == {key_of(0): LoadFailure.MISSING}
    whole.release()
    bench.load(0, job_id=2)
    assert bench.answer().remote_keys == [key_of(0)]


# --- storms ----------------------------------------------------------------------------

LOADS = st.lists(
    st.tuples(st.lists(st.integers(0, NUM_BLOCKS - 2), unique=True, max_size=8), st.booleans()),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(
    loads=LOADS,
    present=st.sets(st.integers(0, NUM_BLOCKS - 2)),
    in_host=st.sets(st.integers(0, NUM_BLOCKS - 2), max_size=6),
    spoiled=st.dictionaries(st.integers(0, NUM_BLOCKS - 2), st.sampled_from(sorted(FAULTS))),
    raising=st.sets(st.integers(0, NUM_BLOCKS - 2), max_size=2),
)
def test_in_any_storm_every_load_is_answered_once_and_says_the_truth(
    loads: list[tuple[list[int], bool]],
    present: set[int],
    in_host: set[int],
    spoiled: dict[int, str],
    raising: set[int],
) -> None:
    bench = Bench()
    bench.put_remote(*(present | set(spoiled)))
    for index, fault in spoiled.items():
        spoil(bench, fault, index)
    bench.put_host(*in_host)
    bench.remote.read_errors.update({bench.name(i): RuntimeError("a bug") for i in raising})
    for job_id, (indexes, cancelled) in enumerate(loads):
        bench.load(*indexes, job_id=job_id)
        if cancelled:
            bench.loader.cancel(job_id)
    results = bench.answers(len(loads))
    assert sorted(r.job_id for r in results) == list(range(len(loads)))
    good = in_host | (present - set(spoiled) - raising)
    arrived: set[int] = set()
    for result in results:
        asked = loads[result.job_id][0]
        keys = [*result.host_keys, *result.remote_keys]
        assert sorted([*keys, *result.failed]) == sorted(key_of(i) for i in asked)
        failed = [i for i in asked if key_of(i) in result.failed]
        assert result.failed_block_ids == [i + 1 for i in failed]
        came = {i for i in asked if key_of(i) in keys}
        assert came <= good
        arrived |= came
    after = bench.memory.snapshot()
    for index in arrived:
        assert bench.block(index + 1) == bench.payload(index)
    for index in set(range(NUM_BLOCKS - 1)) - good:
        assert bench.block(index + 1) == bench.blank[index + 1]
    bench.loader.check_integrity(idle=True)
    bench.go_on()
    assert bench.memory.equals(after), "written after the answer"
    assert bench.loader.collect() == []
    assert bench.pool.used_bytes == bench.host.used_bytes
