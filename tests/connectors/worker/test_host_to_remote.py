"""Values of the host tier are written to the remote as they are, if they are still there."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spm.errors import StoreTimeoutError
from spm.metrics import Metric
from tests.connectors.worker.kit import (
    NUM_BLOCKS,
    PATIENCE_S,
    SPACE,
    counter,
    host_only,
    moves,
)
from tests.connectors.worker.saving import Bench


@pytest.fixture
def saving() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.finish()


def test_what_the_host_tier_holds_reaches_the_remote_byte_for_byte(saving: Bench) -> None:
    saving.put_host(0, 1, 2)
    used_bytes = saving.pool.used_bytes
    saving.offload(0, 1, 2)
    saving.answered(0, 1, 2)
    names = [saving.name(i) for i in range(3)]
    assert saving.listener.remote == names
    assert saving.listener.host == [], "it was there before"
    assert [saving.remote.values[name] for name in names] == [saving.value(i) for i in range(3)]
    assert saving.in_host(0, 1, 2) == [saving.value(i) for i in range(3)]
    assert set(saving.listener.used_at_answer) == {used_bytes}, "its memory is not held longer"
    assert [len(call) for call in saving.remote.calls] == [2, 1]
    counted = saving.counted()
    assert counted[counter(Metric.SAVED_BYTES, "remote")] == 3 * saving.value_bytes
    assert counter(Metric.SAVED_BLOCKS, "host") not in counted
    saving.host.clear()
    assert saving.pool.used_bytes == 0


def test_blocks_are_not_copied_out_though_they_hold_other_content_by_now(saving: Bench) -> None:
    saving.put_host(0)
    saving.compute(0, seed=77)
    saving.offload(0)
    saving.answered(0)
    assert saving.remote.values == {saving.name(0): saving.value(0)}


def test_what_is_gone_from_the_host_tier_is_answered_and_not_called_stored(saving: Bench) -> None:
    saving.put_host(0, 2)
    saving.offload(0, 1, 2)
    saving.answered(0, 1, 2)
    assert saving.listener.remote == [saving.name(0), saving.name(2)]
    assert set(saving.remote.values) == {saving.name(0), saving.name(2)}
    assert saving.counted()[counter(Metric.SAVES_SKIPPED, "evicted")] == 1


def test_until_its_turn_a_value_takes_no_memory_and_may_be_evicted(saving: Bench) -> None:
    saving.put_host(0, 1, 2)
    saving.remote.gate.clear()
    saving.offload(0, 1)
    assert saving.remote.entered.wait(PATIENCE_S)
    saving.offload(2)
    saving.host.delete_many([saving.name(i) for i in (0, 1, 2)])
    assert saving.pool.used_bytes == 2 * saving.value_bytes, "those being written"
    saving.remote.gate.set()
    saving.answered(0, 1, 2)
    assert set(saving.remote.values) == {saving.name(0), saving.name(1)}
    assert saving.pool.used_bytes == 0


def test_writing_a_value_makes_it_recent(saving: Bench) -> None:
    room = 12_000 // saving.value_bytes
    saving.put_host(*range(room))
    saving.offload(0)
    saving.answered(0)
    saving.put_host(room)
    assert saving.evicted == [saving.name(1)]


def test_one_step_may_copy_some_out_and_send_others_from_the_host_tier(saving: Bench) -> None:
    saving.put_host(0, 1)
    saving.saver.save(host_only(0) + moves(2) + host_only(1) + moves(3), SPACE)
    saving.answered(0, 1, 2, 3)
    assert set(saving.remote.values) == {saving.name(i) for i in range(4)}
    assert saving.listener.host == [saving.name(2), saving.name(3)]


def test_a_value_saved_in_the_same_step_is_found_in_the_host_tier(saving: Bench) -> None:
    saving.remote.refused = {saving.name(0)}
    saving.save(0)
    saving.answered(0)
    saving.remote.refused.clear()
    saving.saver.save(moves(1) + host_only(1, 0), SPACE)
    saving.answered(0, 0, 1, 1)
    assert saving.remote.values == {saving.name(i): saving.value(i) for i in (0, 1)}


def test_a_value_the_remote_has_is_written_again(saving: Bench) -> None:
    saving.put_host(0)
    for times in (1, 2):
        saving.offload(0)
        saving.answered(*[0] * times)
    assert saving.remote.calls == [[saving.name(0)]] * 2
    assert saving.listener.remote == [saving.name(0)] * 2


@pytest.mark.parametrize("error", [StoreTimeoutError("late"), RuntimeError("a bug")])
def test_a_write_that_raises_is_answered_and_the_value_stays_in_the_host_tier(
    saving: Bench, error: Exception
) -> None:
    saving.put_host(0, 1)
    saving.remote.put_errors[saving.name(0)] = error
    saving.offload(0)
    saving.answered(0)
    saving.offload(1)
    saving.answered(0, 1)
    assert saving.listener.remote == [saving.name(1)]
    assert saving.in_host(0) == [saving.value(0)]
    unexpected = saving.counted().get(counter(Metric.INTERNAL_ERRORS, "saver"), 0)
    assert unexpected == isinstance(error, RuntimeError)


@pytest.mark.parametrize("tiers", [{"remote": False}, {"host": False}], ids=str)
def test_without_one_of_the_tiers_it_is_just_answered(tiers: dict[str, bool]) -> None:
    bench = Bench(**tiers)
    bench.offload(0, 1, 2)
    bench.answered(0, 1, 2)
    assert bench.listener.remote == []
    assert bench.remote.values == {}
    assert not bench.saver.busy
    bench.finish()


@settings(max_examples=40, deadline=None)
@given(
    commands=st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, NUM_BLOCKS - 2), max_size=8)), max_size=8
    ),
    held=st.sets(st.integers(0, NUM_BLOCKS - 2), max_size=6),
    refused=st.sets(st.integers(0, NUM_BLOCKS - 2), max_size=5),
    raising=st.sets(st.integers(0, NUM_BLOCKS - 2), max_size=3),
    hanging=st.booleans(),
)
def test_in_any_storm_saves_and_offloads_are_answered_once_and_stored_means_stored(
    commands: list[tuple[bool, list[int]]],
    held: set[int],
    refused: set[int],
    raising: set[int],
    hanging: bool,
) -> None:
    bench = Bench()
    bench.put_host(*held)
    bench.remote.refused = {bench.name(i) for i in refused}
    bench.remote.put_errors.update({bench.name(i): StoreTimeoutError("late") for i in raising})
    if hanging:
        bench.hold_everything()
    for copied, indexes in commands:
        (bench.save if copied else bench.offload)(*indexes)
    bench.finish()
    bench.answered(*(index for _, indexes in commands for index in indexes))
    assert set(bench.listener.remote) == set(bench.remote.values)
    assert not set(bench.remote.values) & {bench.name(i) for i in refused | raising}
    saved = {index for copied, indexes in commands for index in indexes if copied}
    assert set(bench.remote.values) <= {bench.name(i) for i in held | saved}
    for index in range(NUM_BLOCKS - 1):
        name = bench.name(index)
        assert bench.remote.values.get(name, bench.value(index)) == bench.value(index)
        assert bench.in_host(index)[0] in (None, bench.value(index))
