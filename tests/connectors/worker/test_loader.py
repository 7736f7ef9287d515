"""Whatever a store does, a load is answered once, with what really arrived, and writes
nothing after its answer."""

import math
import threading
from collections.abc import Callable

import pytest
from vllm.v1.kv_cache_layout import KVCacheLayout

from connectors.metadata import LoadFailure
from connectors.stores.base import ReadRequest
from spm.errors import IntegrityError
from spm.metrics import Metric
from spm.value_format import HEADER_BYTES, write_header
from tests.connectors.worker.kit import (
    PATIENCE_S,
    SPACE,
    counter,
    key_of,
    moves,
)
from tests.connectors.worker.layouts import hybrid
from tests.connectors.worker.loading import CONFIG, Bench

SIX = range(6)


def test_blocks_arrive_from_both_tiers_and_remote_ones_are_kept_in_the_host_tier(
    bench: Bench,
) -> None:
    bench.put_host(0, 3)
    bench.put_remote(1, 2, 4)
    bench.load(*range(5))
    result = bench.answer()
    assert (result.job_id, result.request_id) == (1, "request-1")
    assert result.host_keys == [key_of(0), key_of(3)]
    assert result.remote_keys == [key_of(1), key_of(2), key_of(4)]
    assert not result.failed
    assert not result.failed_block_ids
    bench.holds(*range(5))
    assert sorted(bench.promoted) == sorted(bench.name(i) for i in (1, 2, 4))
    (kept,) = bench.host.get_many([ReadRequest(bench.name(1), bench.value_bytes)])
    assert kept is not None
    assert kept.verified, "its checksum need not be computed again"
    kept.release()
    bench.load(*range(5), job_id=2)
    assert bench.answer().host_keys == [key_of(i) for i in range(5)]
    size = bench.value_bytes
    counted = bench.counted()
    assert counted[counter(Metric.LOADED_BLOCKS, "remote")] == 3
    assert counted[counter(Metric.LOADED_BYTES, "host")] == 7 * size


def test_both_groups_of_a_hybrid_model_land_in_their_own_blocks() -> None:
    bench = Bench(memory=hybrid(KVCacheLayout.BLNHC))
    for index, group in ((0, 0), (1, 1), (2, 0)):
        value = bytearray(HEADER_BYTES) + bench.payload(index, group)
        write_header(memoryview(value), bench.codec.identity(key_of(index, group), SPACE))
        bench.remote.values[bench.name(index, group)] = bytes(value)
    bench.submit(moves(0) + moves(1, group=1) + moves(2))
    assert len(bench.answer().remote_keys) == 3
    for index, group in ((0, 0), (1, 1), (2, 0)):
        assert bench.block(index + 1, group) == bench.payload(index, group)
    bench.go_on()


# --- the store hangs -------------------------------------------------------------------


def test_at_the_deadline_a_hanging_load_is_answered_and_never_writes(bench: Bench) -> None:
    bench.put_host(0)
    bench.put_remote(1, 2, 3)
    bench.hang()
    bench.load(0, 1, 2, 3)
    assert bench.remote.entered.wait(PATIENCE_S)
    bench.clock.now_s += 9.99
    assert bench.loader.collect() == []
    bench.clock.now_s += 0.02
    (result,) = bench.loader.collect()
    assert result.failed == {key_of(i): LoadFailure.DEADLINE for i in range(4)}
    assert not bench.loader.busy
    assert not bench.stores.breaker.allow(), "the next load must not wait as long"
    bench.go_on()
    bench.holds()
    assert bench.loader.collect() == []
    assert bench.promoted == []


def test_a_load_is_given_no_more_time_than_its_command_says(bench: Bench) -> None:
    """Catches a request that waits ten seconds for what is computed in one."""
    bench.put_remote(*SIX)
    bench.hang()
    bench.load(0, job_id=1, patience_s=0.5)
    bench.load(1, job_id=2, patience_s=1000.0)
    assert bench.remote.entered.wait(PATIENCE_S)
    bench.clock.now_s += 0.49
    assert bench.loader.collect() == []
    bench.clock.now_s += 0.02
    assert [result.job_id for result in bench.loader.collect()] == [1]
    bench.clock.now_s += 9.48
    assert bench.loader.collect() == []
    bench.clock.now_s += 0.02
    assert [result.job_id for result in bench.loader.collect()] == [2], "load_deadline_s holds"
    bench.go_on()


def test_a_store_that_brings_something_in_time_is_slow_and_not_dead(
    make: Callable[..., Bench],
) -> None:
    """Catches a breaker that stops all traffic because one load was too large."""
    bench = make(threads=1)
    bench.put_remote(*SIX)
    bench.load(*SIX, patience_s=0.5)
    bench.load(0, job_id=2, patience_s=0.5)
    first = threading.Event()

    def hang_in_the_second_batch() -> None:
        if len(bench.remote.calls) == 2:
            first.set()
            assert bench.remote.slow.wait(PATIENCE_S)

    bench.remote.meanwhile = hang_in_the_second_batch
    assert first.wait(PATIENCE_S)
    bench.clock.now_s += 0.5
    late, waited = bench.loader.collect()
    assert late.remote_keys == [key_of(0), key_of(1)]
    assert waited.failed == {key_of(0): LoadFailure.DEADLINE}
    assert bench.stores.breaker.allow()
    bench.load(5, job_id=3, patience_s=0.5)
    bench.clock.now_s += CONFIG.batch_deadline_s
    bench.loader.collect()
    assert not bench.stores.breaker.allow(), "now it has brought nothing for a whole round trip"
    bench.remote.slow.set()


def test_a_load_in_a_hurry_is_no_proof_that_the_store_is_dead(make: Callable[..., Bench]) -> None:
    """Catches a store that answers within every deadline but this one, and is left alone."""
    bench = make(threads=1)
    breaker = bench.use_breaker(failures=1)
    bench.put_remote(*SIX)
    bench.hang()
    bench.load(0, 1, patience_s=0.25)
    assert bench.remote.entered.wait(PATIENCE_S)
    bench.clock.now_s += 0.35
    assert LoadFailure.DEADLINE in bench.answer().failed.values()
    assert breaker.allow()
    assert breaker.begin_probe(), "whether it answers is looked at"
    breaker.end_probe(answered=True)
    bench.remote.gate.set()
    bench.loader.check_integrity(idle=True)  # waits for the read
    assert breaker.allow()
    assert breaker.begin_probe(), "of the read, which was late"
    breaker.end_probe(answered=False)
    assert not breaker.allow(), "it was more than slow"


def test_what_is_only_in_the_host_tier_says_nothing_of_the_remote(
    make: Callable[..., Bench],
) -> None:
    """Catches a remote that is left alone because a load waited behind its prefetches."""
    bench = make(threads=1)
    bench.put_remote(0, 1)
    bench.put_host(20)
    bench.hang()
    bench.prefetch(moves(0, 1), job_id=1)
    assert bench.remote.entered.wait(PATIENCE_S)
    bench.load(20, job_id=2, patience_s=0.25)
    bench.clock.now_s += 0.3
    result = bench.answer()
    assert result.failed == {key_of(20): LoadFailure.DEADLINE}
    assert result.waited_s == math.inf
    assert bench.stores.breaker.allow()
    bench.remote.gate.set()
    prefetched = bench.answer()
    assert not prefetched.failed
    assert prefetched.waited_s == 0.0


def test_what_was_not_asked_for_is_not_missing(bench: Bench) -> None:
    """Catches an index that forgets everything while the store is left alone."""
    bench.put_remote(*SIX)
    bench.put_host(0)
    bench.stores.breaker.trip()
    bench.load(0, 1)
    result = bench.answer()
    assert result.host_keys == [key_of(0)]
    assert result.failed == {key_of(1): LoadFailure.STORE}
    assert bench.remote.calls == []


def test_what_arrived_before_the_deadline_stays_and_what_comes_later_does_not(
    make: Callable[..., Bench],
) -> None:
    bench = _half_done(make)
    bench.clock.now_s += 10.0
    (result,) = bench.loader.collect()
    assert result.host_keys == [key_of(0), key_of(1)]
    assert result.failed == {key_of(i): LoadFailure.DEADLINE for i in (2, 3)}
    bench.go_on()
    bench.holds(0, 1)
    assert bench.promoted == []


def test_nothing_of_a_cancelled_load_counts(make: Callable[..., Bench]) -> None:
    """The values may belong to weights that are gone."""
    bench = _half_done(make)
    bench.loader.cancel(1)
    (result,) = bench.loader.collect()
    assert result.failed == {key_of(i): LoadFailure.CANCELLED for i in range(4)}
    bench.go_on()
    assert bench.promoted == []


def _half_done(make: Callable[..., Bench]) -> Bench:
    bench = make(threads=1)
    bench.put_host(0, 1)
    bench.put_remote(2, 3)
    bench.hang()
    bench.load(0, 1, 2, 3)
    assert bench.remote.entered.wait(PATIENCE_S), "the first batch is done by now"
    return bench


def test_closing_while_the_store_hangs_ends_with_the_batch_under_way(
    make: Callable[..., Bench],
) -> None:
    bench = make(threads=1)
    bench.put_remote(*SIX)
    bench.hang()
    bench.load(*SIX)
    assert bench.remote.entered.wait(PATIENCE_S)
    bench.loader.cancel(1)
    (result,) = bench.loader.collect()
    assert len(result.failed) == 6
    bench.load(*SIX, job_id=2)
    closing = threading.Thread(target=bench.loader.close)
    closing.start()
    while not bench.loader._jobs[2].closed:  # nothing public tells it before the threads end
        closing.join(0.001)
    bench.remote.gate.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert not bench.loader.busy
    assert bench.remote.calls == [[bench.name(0), bench.name(1)]]
    bench.holds()


def test_a_cancelled_load_is_answered_once_whenever_the_cancellation_comes(bench: Bench) -> None:
    bench.put_remote(0)
    bench.hang()
    bench.load(0, job_id=1)
    bench.load(0, job_id=2)
    bench.load(0, job_id=3)  # waits for a thread
    bench.loader.cancel(3)
    bench.loader.cancel(3)
    bench.loader.cancel(99)
    assert [r.job_id for r in bench.loader.collect()] == [3]
    bench.loader.cancel(3)
    bench.remote.gate.set()
    assert sorted(result.job_id for result in bench.answers(2)) == [1, 2]
    bench.loader.cancel(1)
    assert bench.loader.collect() == []


def test_a_load_of_nothing_is_answered_at_once(bench: Bench) -> None:
    bench.load()
    (result,) = bench.loader.collect()
    assert (result.job_id, result.failed) == (1, {})


def test_integrity_names_open_loads_and_ended_threads(bench: Bench) -> None:
    bench.put_remote(0)
    bench.hang()
    bench.load(0)
    bench.loader.check_integrity(idle=False)
    with pytest.raises(IntegrityError, match="1 loads are open"):
        bench.loader.check_integrity(idle=True)
    bench.go_on()
    with pytest.raises(IntegrityError, match="threads ended"):
        bench.loader.check_integrity(idle=False)


def test_a_batch_is_one_round_trip_of_bounded_size(make: Callable[..., Bench]) -> None:
    bench = make(threads=1)
    bench.put_remote(*range(5))
    bench.load(*range(5))
    bench.answer()
    asked = [[bench.name(i) for i in batch] for batch in ((0, 1), (2, 3), (4,))]
    assert bench.remote.calls == asked
