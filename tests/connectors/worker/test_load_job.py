"""A job is closed once; after that nothing is written for it."""

import threading
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.metadata import LoadCommand, LoadFailure
from connectors.worker.load_job import LoadJob
from spm.residency import Tier
from spm.work import WorkClass
from tests.connectors.worker.kit import PATIENCE_S, host_only, key_of, moves
from tracker.ids import BlockKey

ALL = moves(0, 1, 2)


def job(batches: int = 1) -> LoadJob:
    return LoadJob(LoadCommand(7, "request", ALL), batches, started_s=0.0, deadline_s=9.0)


def test_what_arrived_and_what_did_not_is_told_apart_by_tier_and_reason() -> None:
    subject = job()
    assert subject.write(lambda: {key_of(0): Tier.HOST, key_of(1): Tier.REMOTE})
    subject.fail(ALL[2:], LoadFailure.MISSING)
    result = subject.close(LoadFailure.CANCELLED)
    assert (result.job_id, result.request_id) == (7, "request")
    assert (result.host_keys, result.remote_keys) == ([key_of(0)], [key_of(1)])
    assert result.failed == {key_of(2): LoadFailure.MISSING}
    assert result.failed_block_ids == [3]


def test_blocks_without_an_outcome_fail_for_the_reason_of_closing() -> None:
    result = job().close(LoadFailure.DEADLINE)
    assert result.failed == dict.fromkeys([move.key for move in ALL], LoadFailure.DEADLINE)
    assert result.failed_block_ids == [1, 2, 3]


def test_the_first_reason_stays_and_a_block_that_arrived_does_not_fail_later() -> None:
    subject = job()
    subject.write(lambda: {key_of(0): Tier.HOST})
    subject.fail(ALL[:2], LoadFailure.CORRUPT)
    subject.fail(ALL, LoadFailure.SKIPPED)
    result = subject.close(LoadFailure.CANCELLED)
    assert result.host_keys == [key_of(0)]
    assert result.failed == {key_of(1): LoadFailure.CORRUPT, key_of(2): LoadFailure.SKIPPED}


def test_a_late_write_never_runs_and_changes_no_outcome() -> None:
    subject, ran = job(), list[str]()

    def late() -> dict[BlockKey, Tier]:
        ran.append("copy")
        return {key_of(0): Tier.HOST}

    subject.close(LoadFailure.DEADLINE)
    assert subject.closed
    assert subject.write(late) == {}
    assert not ran
    assert not subject.close(LoadFailure.DEADLINE).host_keys


def test_a_copy_that_raises_did_not_arrive_and_leaves_the_job_usable() -> None:
    subject = job()

    def fails() -> dict[BlockKey, Tier]:
        raise OSError("device")

    with pytest.raises(OSError, match="device"):
        subject.write(fails)
    subject.fail(ALL, LoadFailure.STORE)
    assert not subject.close(LoadFailure.CANCELLED).host_keys


def test_closing_waits_for_a_write_that_has_begun() -> None:
    subject = job()
    writing, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def copy() -> dict[BlockKey, Tier]:
        writing.set()
        assert go_on.wait(PATIENCE_S)
        assert not closed.is_set(), "closed while a write was under way"
        return {key_of(0): Tier.HOST}

    written: list[Mapping[BlockKey, Tier]] = []
    writer = threading.Thread(target=lambda: written.append(subject.write(copy)))
    arrived: list[bytes] = []

    def close() -> None:
        arrived.extend(subject.close(LoadFailure.CANCELLED).host_keys)
        closed.set()

    writer.start()
    assert writing.wait(PATIENCE_S)
    closer = threading.Thread(target=close)
    closer.start()
    assert not closed.wait(0.02)
    go_on.set()
    assert closed.wait(PATIENCE_S)
    writer.join(PATIENCE_S)
    closer.join(PATIENCE_S)
    assert written == [{key_of(0): Tier.HOST}]
    assert arrived == [key_of(0)], "what was written is answered as written"


def test_only_the_last_batch_of_an_open_job_ends_it() -> None:
    subject = job(batches=3)
    assert [subject.batch_done() for _ in range(3)] == [False, False, True]


def test_the_last_batch_of_a_closed_job_ends_nothing() -> None:
    subject = job(batches=2)
    assert not subject.batch_done()
    subject.close(LoadFailure.CANCELLED)
    assert not subject.batch_done()


def test_a_failed_block_without_a_place_in_the_pool_has_no_block_id_to_tell() -> None:
    command = LoadCommand(7, None, moves(0) + host_only(1) + moves(2), WorkClass.PREFETCH)
    result = LoadJob(command, 1, started_s=0.0, deadline_s=9.0).close(LoadFailure.DEADLINE)
    assert result.request_id is None
    assert list(result.failed) == [key_of(0), key_of(1), key_of(2)]
    assert result.failed_block_ids == [1, 3]


def test_speeds_are_summed_by_tier() -> None:
    subject = job()
    assert job().close(LoadFailure.CANCELLED).speeds == {}
    subject.note_speed(Tier.REMOTE, 100, 0.5)
    subject.note_speed(Tier.HOST, 7, 0.25)
    subject.note_speed(Tier.REMOTE, 50, 0.25)
    speeds = subject.close(LoadFailure.CANCELLED).speeds
    assert speeds == {Tier.REMOTE: (150, 0.75), Tier.HOST: (7, 0.25)}


def test_a_failure_breaks_the_prefix() -> None:
    subject = job()
    assert not subject.broken
    subject.fail([], LoadFailure.SKIPPED)
    assert subject.broken


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(0, 8))
def test_batches_that_end_at_once_on_many_threads_end_the_job_once(
    batches: int, close_after: int
) -> None:
    subject = job(batches)
    last: list[bool] = []
    threads = [
        threading.Thread(target=lambda: last.append(subject.batch_done())) for _ in range(batches)
    ]
    for index, thread in enumerate(threads):
        if index == close_after:
            subject.close(LoadFailure.CANCELLED)
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sum(last) == (0 if close_after < batches else 1)
