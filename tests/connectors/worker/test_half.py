"""The worker half over its whole life, in the order vLLM calls it."""

import time
from dataclasses import replace

import pytest
import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

from connectors.metadata import LoadFailure
from connectors.worker.half import WorkerHalf
from spm.breaker import BreakerState
from spm.errors import IntegrityError, LayoutError
from spm.metrics import Metric
from spm.value_format import HEADER_BYTES
from tests.connectors.worker.driving import (
    CONFIG,
    REMOTE,
    Worker,
    load,
    spm_threads,
    value_bytes_of,
)
from tests.connectors.worker.kit import SPACE, counter, key_of, moves
from tests.connectors.worker.layouts import MEMORIES, geometry, hybrid

# --- start -----------------------------------------------------------------------------


def test_the_handshake_tells_sizes_and_the_same_digest_for_the_same_layout(
    worker: Worker,
) -> None:
    handshake = worker.half.handshake()
    assert handshake.rank == 0
    assert handshake.value_bytes == (HEADER_BYTES + len(worker.block(1)),)
    other = Worker(rank=1).start()
    assert other.half.handshake().layout_digest == handshake.layout_digest
    other.half.shutdown()


@pytest.mark.parametrize("name", MEMORIES)
def test_every_layout_is_accepted_and_what_was_in_memory_stays(name: str) -> None:
    memory = MEMORIES[name]()
    before = memory.snapshot()
    worker = Worker(memory=memory).start()
    assert memory.equals(before)
    worker.half.shutdown()


def test_a_group_without_layers_on_this_rank_is_announced_as_empty() -> None:
    memory = MEMORIES["vllm-hybrid-LBHNC"]()
    elsewhere = replace(memory, groups=(memory.groups[0], geometry("another.stage", group=1)))
    worker = Worker(memory=elsewhere).start()
    assert worker.half.handshake().value_bytes[1] == 0
    worker.half.shutdown()


def test_an_unknown_layout_stops_the_start_with_words_and_leaves_no_thread() -> None:
    worker = Worker()
    caches = {name: torch.zeros(3, 5) for name in worker.memory.caches}
    with pytest.raises(LayoutError, match="unknown layout"):
        worker.start(caches)
    worker.half.shutdown()
    assert spm_threads() == []


def test_layers_that_share_their_memory_stop_the_start() -> None:
    worker = Worker()
    first = next(iter(worker.memory.caches.values()))
    with pytest.raises(LayoutError, match="round trip"):
        worker.start(dict.fromkeys(worker.memory.caches, first))
    assert spm_threads() == []


def test_staging_that_cannot_hold_two_values_stops_the_start_with_both_numbers() -> None:
    needed = 2 * value_bytes_of(Worker().start_and_stop())
    Worker(replace(CONFIG, staging_bytes=needed)).start_and_stop()
    worker = Worker(replace(CONFIG, staging_bytes=needed - 1))
    with pytest.raises(LayoutError, match=f"staging_bytes={needed - 1}.*least {needed}"):
        worker.start()
    assert spm_threads() == []


# --- steps -----------------------------------------------------------------------------


@pytest.mark.parametrize("loads_last", [False, True])
def test_saved_blocks_come_back_byte_for_byte_from_the_host_tier(
    worker: Worker, loads_last: bool
) -> None:
    kept = [worker.block(i + 1) for i in range(4)]
    worker.step(saves=moves(0, 1, 2, 3))
    worker.wipe()
    worker.finish(saves=4)
    assert worker.in_host == {key_of(i) for i in range(4)}
    assert sorted(worker.stored) == sorted(key_of(i) for i in range(4))
    worker.half.check_integrity(idle=True)
    results = worker.step(loads=[load(1, *moves(0, 1, 2, 3))], loads_last=loads_last, forward=True)
    results += worker.finish(loads=1 - len(results))
    assert [r.host_keys for r in results] == [[key_of(i) for i in range(4)]]
    assert [worker.block(i + 1) for i in range(4)] == kept
    worker.half.check_integrity(idle=True)


def test_every_load_is_in_exactly_one_report_and_in_one_answer_to_vllm(worker: Worker) -> None:
    worker.step(saves=moves(0))
    worker.finish(saves=1)
    results = worker.step(loads=[load(1, *moves(0)), load(2, *moves(0)), load(3)])
    results += worker.finish(loads=3 - len(results))
    reported = [result.job_id for report in worker.reports for result in report.loads]
    assert sorted(r.job_id for r in results) == sorted(reported) == [1, 2, 3]


@pytest.mark.fault("F8", breaks="a step without a forward pass starts no load")
def test_a_step_that_computes_nothing_still_loads(worker: Worker) -> None:
    kept = worker.block(1)
    worker.step(saves=moves(0))
    worker.wipe()
    worker.finish(saves=1)
    results = worker.step(loads=[load(1, *moves(0))], forward=False)
    results += worker.finish(loads=1 - len(results))
    assert not results[0].failed
    assert worker.block(1) == kept


def test_nothing_new_is_no_report(worker: Worker) -> None:
    worker.step()
    assert worker.reports == []


def test_what_the_store_lacks_is_answered_as_missing(worker: Worker) -> None:
    results = worker.step(loads=[load(1, *moves(5))])
    results += worker.finish(loads=1 - len(results))
    assert results[0].failed == {key_of(5): LoadFailure.MISSING}
    assert results[0].failed_block_ids == [6]


def test_a_remote_that_answers_in_time_stays_in_use() -> None:
    worker = Worker(replace(CONFIG, host_bytes=0)).start()
    worker.step(saves=moves(0))
    worker.finish(saves=1)
    for job_id in range(2 * REMOTE.breaker.failures):
        results = worker.step(loads=[load(job_id, *moves(0))])
        results += worker.finish(loads=1 - len(results))
        assert results[0].remote_keys == [key_of(0)]
    worker.half.shutdown()


def test_a_load_that_hangs_is_answered_at_its_deadline_and_a_cancelled_one_at_once(
    worker: Worker,
) -> None:
    worker.remote.gate.clear()
    assert worker.step(loads=[load(1, *moves(0)), load(2, *moves(1))]) == []
    (cancelled,) = worker.step(cancelled=[2])
    assert cancelled.failed == {key_of(1): LoadFailure.CANCELLED}
    with pytest.raises(IntegrityError, match="1 loads are open"):
        worker.half.check_integrity(idle=True)
    worker.clock.now_s += CONFIG.load_deadline_s
    (late,) = worker.step()
    assert late.failed == {key_of(0): LoadFailure.DEADLINE}


def test_every_report_says_that_the_store_is_left_alone_and_one_that_it_is_back() -> None:
    worker = Worker(replace(CONFIG, host_bytes=0)).start()
    breaker = worker.half._stores.breaker
    worker.step()
    assert worker.reports == []
    breaker.trip()
    worker.step()
    worker.step()
    assert [report.breaker for report in worker.reports] == [BreakerState.OPEN] * 2
    worker.clock.now_s += 1000.0
    assert worker.half._prober is not None
    if not worker.half._prober.probe_if_due():  # its thread was faster
        while not breaker.allow():
            time.sleep(0)
    for _ in range(3):
        worker.step()
    assert [report.breaker for report in worker.reports[2:]] == [BreakerState.CLOSED]
    assert worker.counters.drain()[counter(Metric.BREAKER_OPENINGS, "worker")] == 1
    worker.half.shutdown()
    assert spm_threads() == []


def test_a_load_cancelled_in_the_very_step_it_is_commanded_is_answered(worker: Worker) -> None:
    worker.remote.gate.clear()
    (result,) = worker.step(loads=[load(1, *moves(0))], cancelled=[1])
    assert result.failed == {key_of(0): LoadFailure.CANCELLED}


def test_both_groups_of_a_hybrid_model_are_saved_and_loaded() -> None:
    worker = Worker(memory=hybrid(KVCacheLayout.LBHNC)).start()
    what = moves(0, 1) + moves(2, 3, group=1)
    kept = [worker.block(1), worker.block(2), worker.block(3, 1), worker.block(4, 1)]
    worker.step(saves=what)
    worker.wipe()
    worker.finish(saves=4)
    results = worker.step(loads=[load(1, *what)])
    results += worker.finish(loads=1 - len(results))
    assert not results[0].failed
    now = [worker.block(1), worker.block(2), worker.block(3, 1), worker.block(4, 1)]
    assert now == kept
    worker.half.check_integrity(idle=True)
    worker.half.shutdown()


def test_hooks_outside_a_step_are_a_mistake_that_is_named(worker: Worker) -> None:
    for hook in (WorkerHalf.start_loads, WorkerHalf.save):
        with pytest.raises(IntegrityError, match="outside a step"):
            hook(worker.half)


# --- end -------------------------------------------------------------------------------


def test_shutdown_is_idempotent_writes_what_was_copied_and_leaves_no_threads(
    worker: Worker,
) -> None:
    worker.step(saves=moves(0, 1, 2), loads=[load(1, *moves(7))])
    worker.half.shutdown()
    worker.half.shutdown()
    assert spm_threads() == []
    assert len(worker.remote.values) == 3


def test_shutdown_before_the_start_does_nothing() -> None:
    worker = Worker()
    worker.half.shutdown()
    assert spm_threads() == []


def test_a_buffer_that_somebody_keeps_is_found_when_idle(worker: Worker) -> None:
    leaked = worker.remote.pool.acquire(1000)
    assert leaked is not None
    worker.half.check_integrity()
    with pytest.raises(IntegrityError, match="1000 bytes of buffers are referenced"):
        worker.half.check_integrity(idle=True)
    leaked.release()
    worker.half.check_integrity(idle=True)


def test_a_store_that_only_raises_costs_no_step_and_leaks_nothing(worker: Worker) -> None:
    names = [SPACE.store_key(key_of(i), worker.rank) for i in range(8)]
    worker.remote.put_errors = {name: RuntimeError("a bug") for name in names}
    worker.remote.read_errors = dict(worker.remote.put_errors)
    ended = 0
    for index in range(8):
        ended += len(worker.step(saves=moves(index), loads=[load(index, *moves(index))]))
    worker.finish(saves=8, loads=8 - ended)
    assert worker.stored == []
    worker.half.check_integrity(idle=True)
    worker.half.shutdown()
    assert worker.counters.drain()[counter(Metric.INTERNAL_ERRORS, "saver")] >= 1
