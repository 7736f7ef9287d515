"""A worker half that prefetches and offloads, on one rank and on two."""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from connectors.metadata import LoadCommand, LoadFailure, LoadResult
from connectors.stores.base import StoreKey
from tests.connectors.worker.driving import CONFIG, Worker, load, prefetch
from tests.connectors.worker.kit import PATIENCE_S, SPACE, host_only, key_of, moves

FOUR = range(4)


def stored(*, rank: int = 0) -> tuple[dict[StoreKey, bytes], list[bytes]]:
    """A remote store with four blocks of a rank, and their content."""
    writer = Worker(rank=rank)
    writer.memory.fill(seed=10 + rank)
    writer.start()
    writer.step(saves=moves(*FOUR))
    writer.finish(saves=len(FOUR))
    content = [writer.block(i + 1) for i in FOUR]
    writer.half.shutdown()
    return writer.remote.values, content


@pytest.fixture
def reader() -> Iterator[Worker]:
    """A fresh worker over a remote store with four blocks."""
    worker = Worker(values=stored()[0]).start()
    yield worker
    worker.remote.gate.set()
    worker.half.check_integrity(idle=True)
    worker.half.shutdown()


# --- one rank --------------------------------------------------------------------------


def test_a_prefetch_is_in_the_report_and_its_values_are_news_of_the_host_tier(
    reader: Worker,
) -> None:
    results = reader.step(loads=[prefetch(1, *host_only(*FOUR))])
    results += reader.finish(loads=1 - len(results))
    assert [result.remote_keys for result in results] == [[key_of(i) for i in FOUR]]
    reader.step()
    assert reader.in_host == {key_of(i) for i in FOUR}
    reported = [result for report in reader.reports for result in report.loads]
    assert reported == results
    assert reported[0].request_id is None


def test_a_step_without_compute_sends_values_from_the_host_tier_to_the_remote() -> None:
    worker = Worker().start()
    worker.remote.refused = {SPACE.store_key(key_of(i), worker.rank) for i in FOUR}
    worker.step(saves=moves(*FOUR))
    worker.finish(saves=4)
    assert worker.stored == []
    worker.remote.refused.clear()
    worker.wipe()
    worker.step(saves=host_only(*FOUR, 9))
    worker.finish(saves=9)
    assert sorted(worker.saved[4:]) == sorted(key_of(i) for i in (*FOUR, 9))
    assert sorted(worker.stored) == sorted(key_of(i) for i in FOUR)
    worker.half.check_integrity(idle=True)
    worker.half.shutdown()
    other = Worker(replace(CONFIG, host_bytes=0), values=worker.remote.values).start()
    results = other.step(loads=[load(1, *moves(*FOUR))])
    results += other.finish(loads=1 - len(results))
    assert not results[0].failed
    other.half.shutdown()


def test_an_idle_step_waits_while_there_is_only_a_prefetch(reader: Worker) -> None:
    reader.remote.gate.clear()
    reader.step(loads=[prefetch(1, *host_only(*FOUR))])
    assert reader.remote.entered.wait(PATIENCE_S)
    began_s = time.monotonic()
    for _ in range(4):
        assert reader.step() == []
    assert time.monotonic() - began_s >= 4 * 0.004, "an idle engine must not spin"
    reader.remote.gate.set()
    reader.finish(loads=1)


def test_a_step_that_has_nothing_to_do_waits_only_if_it_is_told_to(reader: Worker) -> None:
    began_s = time.monotonic()
    for _ in range(200):
        reader.step()
    assert time.monotonic() - began_s < 200 * 0.005
    began_s = time.monotonic()
    for _ in range(4):
        reader.step(linger=True)
    assert time.monotonic() - began_s >= 4 * 0.004


def test_after_a_reset_an_old_prefetch_fills_nothing_that_is_called_present(
    reader: Worker,
) -> None:
    reader.remote.gate.clear()
    reader.step(loads=[prefetch(1, *host_only(*FOUR))])
    assert reader.remote.entered.wait(PATIENCE_S)
    reader.new_epoch(b"2")
    (cancelled,) = reader.step(cancelled=[1])
    assert set(cancelled.failed.values()) == {LoadFailure.CANCELLED}
    reader.remote.gate.set()
    reader.half.check_integrity(idle=True)
    reader.step()
    assert reader.in_host == set()
    assert reader.remote.pool.used_bytes == 0


def test_shutdown_with_prefetches_waiting_ends_with_the_batch_under_way() -> None:
    worker = Worker(values=stored()[0]).start()
    worker.remote.gate.clear()
    worker.step(loads=[prefetch(job_id, *moves(*FOUR)) for job_id in range(30)])
    assert worker.remote.entered.wait(PATIENCE_S)
    worker.remote.gate.set()
    worker.half.shutdown()
    worker.half.shutdown()
    assert worker.remote.pool.used_bytes == 0


# --- two ranks -------------------------------------------------------------------------


@pytest.fixture
def ranks() -> Iterator[tuple[list[Worker], list[list[bytes]]]]:
    """Two ranks over one store with both their values, and what these are."""
    values: dict[StoreKey, bytes] = {}
    content = []
    for rank in (0, 1):
        of_rank, blocks = stored(rank=rank)
        values |= of_rank
        content.append(blocks)
    workers = [Worker(rank=rank, values=values).start() for rank in (0, 1)]
    yield workers, content
    for worker in workers:
        worker.half.check_integrity(idle=True)
        worker.half.shutdown()


def on_all(workers: list[Worker], command: LoadCommand) -> list[LoadResult]:
    ended = [worker.step(loads=[command]) for worker in workers]
    for worker, results in zip(workers, ended, strict=True):
        results += worker.finish(loads=1 - len(results))
    return [results[0] for results in ended]


def test_each_rank_prefetches_its_own_half(
    ranks: tuple[list[Worker], list[list[bytes]]],
) -> None:
    workers, content = ranks
    results = on_all(workers, prefetch(1, *host_only(0, 1), *moves(2, 3)))
    assert [result.remote_keys for result in results] == [[key_of(i) for i in FOUR]] * 2
    for worker, blocks in zip(workers, content, strict=True):
        assert [worker.block(i + 1) for i in (2, 3)] == blocks[2:]
    results = on_all(workers, load(2, *moves(*FOUR)))
    assert [result.host_keys for result in results] == [[key_of(i) for i in FOUR]] * 2
    for worker, blocks in zip(workers, content, strict=True):
        assert [worker.block(i + 1) for i in FOUR] == blocks


def test_a_value_one_rank_lacks_fails_a_prefetch_on_that_rank_only(
    ranks: tuple[list[Worker], list[list[bytes]]],
) -> None:
    workers, _ = ranks
    del workers[1].remote.values[SPACE.store_key(key_of(2), workers[1].rank)]
    whole, holed = on_all(workers, prefetch(1, *host_only(*FOUR)))
    assert not whole.failed
    assert holed.failed == {key_of(2): LoadFailure.MISSING, key_of(3): LoadFailure.SKIPPED}
    for worker in workers:
        worker.step()
    assert [len(worker.in_host) for worker in workers] == [4, 2]
