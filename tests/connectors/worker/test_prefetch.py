"""Loads that no request waits for: after those that one waits for, and into the host tier
if that is all that is asked."""

import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.metadata import BlockMove, LoadFailure
from connectors.stores.base import ReadRequest
from spm.errors import StoreTimeoutError
from spm.metrics import Metric
from spm.residency import Tier
from tests.connectors.worker.kit import (
    NUM_BLOCKS,
    PATIENCE_S,
    counter,
    host_only,
    key_of,
    moves,
)
from tests.connectors.worker.loading import CONFIG, FAULTS, Bench, spoil
from tests.processes import wait_until

SIX = range(6)


def in_host(bench: Bench) -> list[int]:
    names = [bench.name(index) for index in range(NUM_BLOCKS)]
    present = bench.host.contains_many(names)
    return [index for index, there in enumerate(present) if there]


# --- order -----------------------------------------------------------------------------


def test_a_load_waits_for_the_batch_under_way_and_for_no_other_of_a_prefetch(
    make: Callable[..., Bench],
) -> None:
    bench = make(threads=1)
    bench.put_remote(*range(10))
    bench.hang()
    bench.prefetch(moves(*SIX), job_id=1)
    assert bench.remote.entered.wait(PATIENCE_S)
    bench.load(6, job_id=2)
    bench.prefetch(moves(7), job_id=3)
    bench.load(8, job_id=4)
    bench.remote.gate.set()
    assert [result.job_id for result in bench.answers(4)] == [2, 4, 1, 3]
    order = [(0, 1), (6,), (8,), (2, 3), (4, 5), (7,)]
    assert bench.remote.calls == [[bench.name(i) for i in batch] for batch in order]
    bench.holds(*range(9))


def test_with_two_threads_two_batches_of_a_prefetch_are_all_a_load_waits_for(
    make: Callable[..., Bench],
) -> None:
    bench = make(threads=2)
    bench.put_remote(*range(10))
    bench.hang()
    bench.prefetch(moves(*range(8)), job_id=1)
    wait_until(lambda: len(bench.remote.calls) == 2, "both threads read")
    bench.load(8, 9, job_id=2)
    bench.remote.gate.set()
    bench.answers(2)
    assert bench.remote.calls[2] == [bench.name(8), bench.name(9)]


# --- into the host tier ----------------------------------------------------------------


def test_values_from_the_remote_end_in_the_host_tier_and_touch_no_block(bench: Bench) -> None:
    bench.put_remote(*SIX)
    bench.prefetch(host_only(*SIX))
    result = bench.answer()
    assert result.request_id is None
    assert result.remote_keys == [key_of(i) for i in SIX]
    assert not result.failed
    bench.holds()
    assert in_host(bench) == list(SIX)
    assert sorted(bench.promoted) == sorted(bench.name(i) for i in SIX)
    (kept,) = bench.host.get_many([ReadRequest(bench.name(0), bench.value_bytes)])
    assert kept is not None
    assert (bytes(kept.view), kept.verified) == (bench.value(0), True)
    kept.release()
    counted = bench.counted()
    assert counted[counter(Metric.LOADED_BLOCKS, "remote")] == 6
    bench.load(*SIX, job_id=2)
    assert bench.answer().host_keys == [key_of(i) for i in SIX]
    bench.holds(*SIX)


def test_what_is_in_the_host_tier_already_is_only_made_recent(bench: Bench) -> None:
    room = CONFIG.host_bytes // bench.value_bytes
    bench.put_host(*range(room))
    bench.prefetch(host_only(0, 1))
    assert bench.answer().host_keys == [key_of(0), key_of(1)]
    assert bench.remote.calls == []
    assert bench.promoted == []
    assert bench.counted() == {}
    bench.put_host(room, room + 1)
    assert bench.evicted == [bench.name(2), bench.name(3)]


def test_one_load_may_fill_blocks_and_the_host_tier(bench: Bench) -> None:
    bench.put_host(0)
    bench.put_remote(1, 2, 3)
    bench.prefetch(moves(0) + host_only(1) + moves(2) + host_only(3))
    result = bench.answer()
    assert result.host_keys == [key_of(0)]
    assert result.remote_keys == [key_of(i) for i in (1, 2, 3)]
    bench.holds(0, 2)
    assert in_host(bench) == [0, 1, 2, 3]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_value_is_not_kept_nor_is_what_follows_it(
    make: Callable[..., Bench], fault: str
) -> None:
    bench = make(threads=1)
    bench.put_remote(*SIX)
    spoil(bench, fault, 3)
    bench.prefetch(host_only(*SIX))
    result = bench.answer()
    assert result.remote_keys == [key_of(i) for i in (0, 1, 2)]
    reason = LoadFailure.MISSING if fault == "missing" else LoadFailure.CORRUPT
    assert result.failed == {
        key_of(3): reason,
        key_of(4): LoadFailure.SKIPPED,
        key_of(5): LoadFailure.SKIPPED,
    }
    assert result.failed_block_ids == []
    assert in_host(bench) == [0, 1, 2]


def test_a_store_that_fails_fails_a_prefetch_as_it_does_a_load(bench: Bench) -> None:
    bench.put_remote(0, 1)
    bench.remote.read_errors[bench.name(0)] = StoreTimeoutError("late")
    bench.prefetch(host_only(0, 1))
    assert bench.answer().failed == dict.fromkeys([key_of(0), key_of(1)], LoadFailure.STORE)
    assert in_host(bench) == []


def test_without_a_host_tier_nothing_can_be_kept_and_the_value_is_not_called_missing(
    make: Callable[..., Bench],
) -> None:
    bench = make(threads=1, host=False)
    bench.put_remote(*SIX)
    bench.prefetch(host_only(*SIX))
    result = bench.answer()
    assert result.remote_keys == []
    assert set(result.failed) == {key_of(i) for i in SIX}
    assert set(result.failed.values()) <= {LoadFailure.STORE, LoadFailure.SKIPPED}
    assert len(bench.remote.calls) == 1
    bench.prefetch(moves(0) + host_only(1), job_id=2)
    result = bench.answer()
    assert result.remote_keys == [key_of(0)], "what has a place arrives all the same"
    assert result.failed == {key_of(1): LoadFailure.STORE}
    bench.holds(0)


# --- given up --------------------------------------------------------------------------


@pytest.mark.parametrize("what", [moves(*SIX), host_only(*SIX)], ids=["pool", "host"])
def test_a_cancelled_prefetch_is_answered_at_once_and_writes_nothing_more(
    make: Callable[..., Bench], what: tuple[BlockMove, ...]
) -> None:
    bench = make(threads=1)
    bench.put_remote(*SIX)
    bench.hang()
    bench.prefetch(what)
    assert bench.remote.entered.wait(PATIENCE_S)
    bench.loader.cancel(1)
    (result,) = bench.loader.collect()
    assert result.failed == {key_of(i): LoadFailure.CANCELLED for i in SIX}
    bench.remote.gate.set()
    bench.loader.check_integrity(idle=True)
    bench.go_on()
    bench.holds()
    assert in_host(bench) == []
    assert bench.promoted == []
    assert len(bench.remote.calls) == 1, "its other batches are not even asked for"


def test_a_storm_of_prefetches_cancelled_at_once_leaves_nothing_to_do(
    make: Callable[..., Bench],
) -> None:
    bench = make(threads=2)
    bench.put_remote(*range(10))
    bench.hang()
    for job_id in range(500):
        bench.prefetch(host_only(*range(8)) if job_id % 2 else moves(*range(8)), job_id)
    wait_until(lambda: len(bench.remote.calls) == 2, "both threads read")
    for job_id in range(500):
        bench.loader.cancel(job_id)
    assert [result.job_id for result in bench.loader.collect()] == list(range(500))
    assert not bench.loader.busy
    # Nothing public tells what waits; it must not grow while the store hangs.
    assert bench.loader._batches.wait_until_empty(0.0) == 2
    bench.load(8, 9, job_id=1000)
    bench.remote.gate.set()
    assert bench.answer().remote_keys == [key_of(8), key_of(9)]
    assert len(bench.remote.calls) == 3
    bench.loader.check_integrity(idle=True)
    bench.holds(8, 9)


def test_a_prefetch_at_its_deadline_is_answered_and_the_store_is_not_blamed(bench: Bench) -> None:
    bench.put_remote(*SIX)
    bench.hang()
    bench.prefetch(moves(*SIX))
    assert bench.remote.entered.wait(PATIENCE_S)
    bench.clock.now_s += 10.0
    (result,) = bench.loader.collect()
    assert result.failed == {key_of(i): LoadFailure.DEADLINE for i in SIX}
    assert bench.stores.breaker.allow()
    bench.load(0, job_id=2)
    bench.clock.now_s += 10.0
    (result,) = bench.loader.collect()
    assert result.failed == {key_of(0): LoadFailure.DEADLINE}
    assert not bench.stores.breaker.allow()
    bench.go_on()
    bench.holds()
    seconds = bench.counted()[counter(Metric.LOAD_SECONDS)]
    assert seconds == 10.0, "how long prefetches wait is no load's time"


def test_closing_drops_what_waits_and_ends_with_the_batch_under_way(
    make: Callable[..., Bench],
) -> None:
    bench = make(threads=1)
    bench.put_remote(*SIX)
    bench.hang()
    for job_id in range(50):
        bench.prefetch(moves(*SIX), job_id)
    assert bench.remote.entered.wait(PATIENCE_S)
    closing = threading.Thread(target=bench.loader.close)
    closing.start()
    while not bench.loader._jobs[49].closed:  # nothing public tells it before the threads end
        closing.join(0.001)
    bench.remote.gate.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert not bench.loader.busy
    assert len(bench.remote.calls) == 1
    bench.holds()


# --- speeds ----------------------------------------------------------------------------


@pytest.fixture
def timed(make: Callable[..., Bench]) -> Bench:
    """A round trip takes 2 s, a copy into a block range 0.5 s."""
    bench = make(threads=1)

    def passes(seconds: float) -> None:
        bench.clock.now_s += seconds

    bench.remote.meanwhile = lambda: passes(1.5)
    bench.flaky.meanwhile = lambda: passes(0.5)
    return bench


def test_speeds_are_of_whole_batches_of_one_tier(timed: Bench) -> None:
    timed.put_host(0, 1, 2)
    timed.put_remote(3, 4, 5, 6)
    timed.load(0, 1, 2, 3, 4, 5, 6)  # batches of two: host, both, remote, remote
    size = timed.value_bytes
    assert timed.answer().speeds == {Tier.HOST: (2 * size, 0.5), Tier.REMOTE: (3 * size, 4.0)}


def test_a_batch_that_lacks_a_value_says_nothing_about_speed(timed: Bench) -> None:
    timed.put_remote(0, 1, 2)
    timed.load(0, 1, 2, 3)
    assert timed.answer().speeds == {Tier.REMOTE: (2 * timed.value_bytes, 2.0)}


def test_a_value_that_only_stays_in_the_host_tier_is_no_measure_of_its_speed(
    timed: Bench,
) -> None:
    timed.put_host(0, 1)
    timed.put_remote(2, 3)
    timed.prefetch(host_only(0, 1, 2, 3))
    assert timed.answer().speeds == {Tier.REMOTE: (2 * timed.value_bytes, 1.5)}


# --- storms ----------------------------------------------------------------------------

JOB = st.tuples(
    st.lists(st.integers(0, NUM_BLOCKS - 2), unique=True, max_size=8),
    st.sampled_from(["load", "pool", "host"]),
    st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(
    jobs=st.lists(JOB, min_size=1, max_size=10),
    present=st.sets(st.integers(0, NUM_BLOCKS - 2)),
    held=st.sets(st.integers(0, NUM_BLOCKS - 2), max_size=6),
    spoiled=st.dictionaries(st.integers(0, NUM_BLOCKS - 2), st.sampled_from(sorted(FAULTS))),
    raising=st.sets(st.integers(0, NUM_BLOCKS - 2), max_size=2),
)
def test_in_any_storm_loads_and_prefetches_are_answered_once_and_say_the_truth(
    jobs: list[tuple[list[int], str, bool]],
    present: set[int],
    held: set[int],
    spoiled: dict[int, str],
    raising: set[int],
) -> None:
    bench = Bench()
    bench.put_remote(*(present | set(spoiled)))
    for index, fault in spoiled.items():
        spoil(bench, fault, index)
    bench.put_host(*held)
    bench.remote.read_errors.update({bench.name(i): RuntimeError("a bug") for i in raising})
    for job_id, (indexes, kind, cancelled) in enumerate(jobs):
        if kind == "load":
            bench.load(*indexes, job_id=job_id)
        else:
            bench.prefetch((moves if kind == "pool" else host_only)(*indexes), job_id)
        if cancelled:
            bench.loader.cancel(job_id)
    results = bench.answers(len(jobs))
    assert sorted(result.job_id for result in results) == list(range(len(jobs)))
    bench.loader.check_integrity(idle=True)
    good = held | (present - set(spoiled) - raising)
    in_pool: set[int] = set()
    for result in results:
        indexes, kind, _ = jobs[result.job_id]
        came = {*result.host_keys, *result.remote_keys}
        assert sorted([*came, *result.failed]) == sorted(key_of(i) for i in indexes)
        arrived = {i for i in indexes if key_of(i) in came}
        assert arrived <= good
        failed = [i + 1 for i in indexes if key_of(i) in result.failed]
        assert result.failed_block_ids == (failed if kind != "host" else [])
        in_pool |= arrived if kind != "host" else set()
    for index in range(NUM_BLOCKS - 1):
        content = bench.block(index + 1)
        if index in in_pool:
            assert content == bench.payload(index)
        elif all(index not in asked for asked, kind, _ in jobs if kind != "host"):
            assert content == bench.blank[index + 1]
    assert set(in_host(bench)) <= good
    bench.go_on()
    assert bench.pool.used_bytes == bench.host.used_bytes
