"""Saves copy the step's bytes, are answered once each, and are called stored only when
they are."""

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spm.errors import IntegrityError, StoreTimeoutError
from spm.metrics import Metric
from spm.value_format import check_value
from tests.connectors.worker.kit import (
    NUM_BLOCKS,
    PATIENCE_S,
    SPACE,
    counter,
    key_of,
)
from tests.connectors.worker.saving import CONFIG, Bench


@pytest.fixture
def saving() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.finish()


def test_values_reach_both_tiers_complete_and_are_reported_by_name(saving: Bench) -> None:
    saving.save(0, 1, 2)
    saving.answered(0, 1, 2)
    names = [saving.name(i) for i in range(3)]
    assert saving.listener.host == names
    assert saving.listener.remote == names
    for index in range(3):
        value = saving.remote.values[saving.name(index)]
        assert value == saving.value(index)
        assert saving.in_host(index) == [value]
    counted = saving.counted()
    assert counted[counter(Metric.SAVED_BLOCKS, "host")] == 3
    assert counted[counter(Metric.SAVED_BYTES, "remote")] == 3 * saving.value_bytes
    assert counter(Metric.SAVES_SKIPPED, "remote") not in counted


@pytest.mark.fault("F23", breaks="a copy is made of what is in the block later")
def test_what_is_stored_is_the_step_s_content_though_blocks_are_reused_at_once(
    saving: Bench,
) -> None:
    saving.hold_everything()
    saving.save(0, 1)
    saving.compute(0, seed=77)
    saving.compute(1, seed=78)
    saving.gated.gate.set()
    saving.remote.gate.set()
    saving.answered(0, 1)
    assert saving.remote.values[saving.name(0)] == saving.value(0)
    assert saving.in_host(0, 1) == [saving.value(0), saving.value(1)]


def test_a_value_is_not_readable_before_its_copy_and_header_are_complete(saving: Bench) -> None:
    saving.hold_everything()
    saving.save(0)
    assert saving.in_host(0) == [None]
    assert saving.listener.host == []
    saving.gated.gate.set()
    assert saving.remote.entered.wait(PATIENCE_S), "the host tier comes first"
    (value,) = saving.in_host(0)
    assert value is not None
    check_value(memoryview(value), saving.codec.identity(key_of(0), SPACE), checksum=True)
    assert saving.listener.host == [saving.name(0)]
    assert saving.listener.remote == []
    assert saving.listener.done == []
    assert saving.saver.busy


def test_saving_never_waits_for_the_store_and_answers_when_it_is_back(saving: Bench) -> None:
    saving.remote.gate.clear()
    saving.save(0)
    assert saving.remote.entered.wait(PATIENCE_S)
    saving.save(1)
    saving.save(2, 3)
    assert saving.listener.done == []
    saving.remote.gate.set()
    saving.answered(0, 1, 2, 3)
    assert saving.remote.calls[0] == [saving.name(0)]
    assert len(saving.remote.values) == 4


def test_the_host_tier_does_not_wait_for_older_values_on_their_way_to_the_remote(
    saving: Bench,
) -> None:
    saving.hold_everything()
    saving.save(0)
    saving.save(1)
    saving.gated.gate.set()
    assert saving.remote.entered.wait(PATIENCE_S)
    assert saving.listener.host == [saving.name(0), saving.name(1)]
    assert saving.listener.remote == []


@pytest.mark.fault("F4", breaks="a full host tier is an index error")
def test_without_a_buffer_a_block_is_skipped_answered_and_counted(saving: Bench) -> None:
    saving.hold_everything()
    room = saving.pool.capacity_bytes // saving.value_bytes
    saving.save(*range(room + 3))
    assert saving.listener.done == [key_of(i) for i in range(room, room + 3)]
    assert saving.counted() == {counter(Metric.SAVES_SKIPPED, "no_buffer"): 3}
    saving.gated.gate.set()
    saving.remote.gate.set()
    saving.answered(*range(room + 3))
    assert sorted(saving.remote.values) == sorted(saving.name(i) for i in range(room))


@pytest.mark.fault("F19", breaks="what the store refused is called stored")
def test_a_refused_value_is_answered_and_not_called_stored(saving: Bench) -> None:
    saving.remote.refused = {saving.name(1)}
    saving.save(0, 1, 2)
    saving.answered(0, 1, 2)
    assert saving.listener.remote == [saving.name(0), saving.name(2)]
    assert saving.counted()[counter(Metric.SAVES_SKIPPED, "remote")] == 1


@pytest.mark.parametrize("error", [StoreTimeoutError("late"), RuntimeError("a bug")])
def test_a_write_that_raises_is_answered_not_stored_and_the_next_one_works(
    saving: Bench, error: Exception
) -> None:
    saving.remote.put_errors[saving.name(0)] = error
    saving.save(0)
    saving.answered(0)
    saving.save(1)
    saving.answered(0, 1)
    assert saving.listener.remote == [saving.name(1)]
    assert saving.in_host(0) == [saving.value(0)], "the host tier has it all the same"
    unexpected = saving.counted().get(counter(Metric.INTERNAL_ERRORS, "saver"), 0)
    assert unexpected == isinstance(error, RuntimeError)
    saving.saver.check_integrity(idle=False)


@pytest.mark.fault("F19", breaks="a copy that never finished is stored")
def test_a_copy_that_never_finished_is_stored_nowhere(saving: Bench) -> None:
    saving.gated.finish_error = RuntimeError("device")
    saving.save(0, 1)
    saving.answered(0, 1)
    saving.gated.finish_error = None
    saving.save(2)
    saving.answered(0, 1, 2)
    assert saving.in_host(0, 1) == [None, None]
    assert list(saving.remote.values) == [saving.name(2)]
    assert saving.listener.host == saving.listener.remote == [saving.name(2)]
    assert saving.counted()[counter(Metric.INTERNAL_ERRORS, "saver")] == 1


def test_a_copy_that_cannot_start_costs_its_saves_and_not_the_step(saving: Bench) -> None:
    saving.gated.gather_error = RuntimeError("out of device memory")
    saving.save(0, 1)
    assert saving.listener.done == [key_of(0), key_of(1)]
    assert saving.pool.used_bytes == 0
    assert not saving.saver.busy
    saving.gated.gather_error = None
    saving.save(2)
    saving.answered(0, 1, 2)
    assert saving.counted()[counter(Metric.INTERNAL_ERRORS, "saver")] == 1


def test_memory_is_given_back_before_the_answer() -> None:
    bench = Bench(host=False)
    bench.save(0, 1)
    bench.answered(0, 1)
    assert bench.listener.used_at_answer == [0]
    assert not bench.saver.busy
    assert bench.listener.host == []
    bench.finish()


def test_without_a_remote_a_save_ends_in_the_host_tier() -> None:
    bench = Bench(remote=False)
    bench.save(0)
    bench.answered(0)
    assert bench.listener.host == [bench.name(0)]
    assert bench.listener.remote == []
    assert bench.in_host(0) == [bench.value(0)]
    assert counter(Metric.SAVES_SKIPPED, "remote") not in bench.counted()
    bench.finish()


def test_values_pushed_out_of_the_host_tier_are_reported_as_evicted(saving: Bench) -> None:
    room = CONFIG.host_bytes // saving.value_bytes
    saving.save(*range(room + 2))
    saving.answered(*range(room + 2))
    assert saving.evicted == [saving.name(0), saving.name(1)]


def test_closing_writes_what_was_copied(saving: Bench) -> None:
    saving.hold_everything()
    for index in range(5):
        saving.save(index)
    closing = threading.Thread(target=saving.saver.close)
    closing.start()
    saving.gated.gate.set()
    saving.remote.gate.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    saving.answered(*range(5))
    assert len(saving.remote.values) == 5
    saving.saver.close()


def test_closing_leaves_a_write_that_hangs_behind() -> None:
    bench = Bench(stop_deadline_s=0.01)
    bench.remote.gate.clear()
    bench.save(0)
    assert bench.remote.entered.wait(PATIENCE_S)
    bench.saver.close()
    assert bench.listener.done == []
    bench.remote.gate.set()
    bench.answered(0)


def test_a_batch_to_the_remote_is_bounded(saving: Bench) -> None:
    saving.save(*range(5))
    saving.answered(*range(5))
    assert [len(call) for call in saving.remote.calls] == [2, 2, 1]


def test_integrity_names_what_is_left_over_and_a_thread_that_ended(saving: Bench) -> None:
    saving.remote.gate.clear()
    saving.save(0)
    saving.saver.check_integrity(idle=False)
    with pytest.raises(IntegrityError, match="1 values are not stored"):
        saving.saver.check_integrity(idle=True)
    saving.finish()
    with pytest.raises(IntegrityError, match="thread ended"):
        saving.saver.check_integrity(idle=False)


@settings(max_examples=40, deadline=None)
@given(
    saves=st.lists(st.lists(st.integers(0, NUM_BLOCKS - 2), max_size=12), max_size=8),
    refused=st.sets(st.integers(0, NUM_BLOCKS - 2), max_size=5),
    raising=st.sets(st.integers(0, NUM_BLOCKS - 2), max_size=3),
    held=st.booleans(),
)
def test_in_any_storm_each_save_is_answered_once_and_stored_means_stored(
    saves: list[list[int]], refused: set[int], raising: set[int], held: bool
) -> None:
    bench = Bench()
    bench.remote.refused = {bench.name(i) for i in refused}
    bench.remote.put_errors.update({bench.name(i): StoreTimeoutError("late") for i in raising})
    if held:
        bench.hold_everything()
    for indexes in saves:
        bench.save(*indexes)
    bench.finish()
    bench.answered(*(index for indexes in saves for index in indexes))
    assert set(bench.listener.remote) == set(bench.remote.values)
    assert not set(bench.remote.values) & {bench.name(i) for i in refused | raising}
    for index in range(NUM_BLOCKS - 1):
        name = bench.name(index)
        assert bench.remote.values.get(name, bench.value(index)) == bench.value(index)
        assert bench.in_host(index)[0] in (None, bench.value(index))
