"""Tensor-parallel ranks over one remote store: each has its own half of every block."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from vllm.v1.kv_cache_layout import KVCacheLayout

from connectors.metadata import LoadFailure, LoadResult, StepCommands, WorkerReport
from connectors.stores.base import StoreKey
from spm.keys import Rank
from tests.connectors.worker.driving import CONFIG, Worker, load
from tests.connectors.worker.kit import NUM_BLOCKS, SPACE, key_of, moves
from tests.connectors.worker.layouts import uniform

BLOCKS = range(5)


def rank_of_engine(rank: int, values: dict[StoreKey, bytes], seed: int) -> Worker:
    """Ranks hold different heads of the same blocks: other bytes under the same hashes."""
    memory = uniform(KVCacheLayout.LBNHC, num_blocks=NUM_BLOCKS).fill(seed)
    return Worker(replace(CONFIG, host_bytes=0), rank, values, memory).start()


@contextmanager
def engine(values: dict[StoreKey, bytes], seed: int) -> Iterator[tuple[Worker, Worker]]:
    """Two ranks, side by side."""
    first, other = (rank_of_engine(rank, values, seed + rank) for rank in (0, 1))
    yield first, other
    for worker in (first, other):
        worker.half.check_integrity(idle=True)
        worker.half.shutdown()


def save_all(workers: tuple[Worker, Worker]) -> list[list[bytes]]:
    """Both ranks save; what each one saved."""
    for worker in workers:
        worker.step(saves=moves(*BLOCKS))
    for worker in workers:
        worker.finish(saves=len(BLOCKS))
    return [[worker.block(i + 1) for i in BLOCKS] for worker in workers]


def load_all(workers: tuple[Worker, Worker]) -> list[LoadResult]:
    """Both ranks carry out the same command."""
    ended = [worker.step(loads=[load(1, *moves(*BLOCKS))]) for worker in workers]
    for worker, results in zip(workers, ended, strict=True):
        results += worker.finish(loads=1 - len(results))
    return [results[0] for results in ended]


@pytest.fixture
def values() -> dict[StoreKey, bytes]:
    return {}


def test_each_rank_gets_back_its_own_bytes(values: dict[StoreKey, bytes]) -> None:
    with engine(values, seed=10) as writers:
        saved = save_all(writers)
    assert saved[0] != saved[1]
    with engine(values, seed=20) as readers:
        results = load_all(readers)
        assert [r.remote_keys for r in results] == [[key_of(i) for i in BLOCKS]] * 2
        assert [[worker.block(i + 1) for i in BLOCKS] for worker in readers] == saved


def test_names_of_ranks_never_collide(values: dict[StoreKey, bytes]) -> None:
    with engine(values, seed=10) as writers:
        save_all(writers)
    names = [{SPACE.store_key(key_of(i), Rank(rank)) for i in BLOCKS} for rank in (0, 1)]
    assert not names[0] & names[1]
    assert set(values) == names[0] | names[1]


@pytest.mark.parametrize("lost", BLOCKS)
def test_a_value_one_rank_lacks_fails_on_that_rank_only(
    values: dict[StoreKey, bytes], lost: int
) -> None:
    with engine(values, seed=10) as writers:
        saved = save_all(writers)
    del values[SPACE.store_key(key_of(lost), Rank(1))]
    with engine(values, seed=20) as readers:
        whole, holed = load_all(readers)
        assert not whole.failed
        assert holed.failed[key_of(lost)] is LoadFailure.MISSING
        assert holed.failed_block_ids[0] == lost + 1
        assert holed.remote_keys == [key_of(i) for i in range(lost)]
        assert [readers[1].block(i + 1) for i in range(lost)] == saved[1][:lost]


def test_a_value_under_the_other_rank_s_name_is_refused(values: dict[StoreKey, bytes]) -> None:
    with engine(values, seed=10) as writers:
        save_all(writers)
    for index in BLOCKS:
        values[SPACE.store_key(key_of(index), Rank(1))] = values[
            SPACE.store_key(key_of(index), Rank(0))
        ]
    with engine(values, seed=20) as readers:
        was = [readers[1].block(i + 1) for i in BLOCKS]
        own, foreign = load_all(readers)
        assert not own.failed
        assert foreign.failed[key_of(0)] is LoadFailure.CORRUPT
        assert foreign.remote_keys == []
        assert [readers[1].block(i + 1) for i in BLOCKS] == was


def test_reports_of_all_ranks_travel_together_and_stay_apart(
    values: dict[StoreKey, bytes],
) -> None:
    with engine(values, seed=10) as workers:
        save_all(workers)
        del values[SPACE.store_key(key_of(0), Rank(1))]
        reports: list[WorkerReport] = []
        for worker in workers:
            worker.half.begin_step(StepCommands(SPACE, False, [load(1, *moves(0))]))
            worker.half.start_loads()
            while not worker.half.collect_loads():
                pass
            report = worker.half.report()
            assert report is not None
            reports.append(report)
            worker.half.end_step()
        together = reports[0].aggregate(reports[1])
        assert [rank.rank for rank in together.ranks] == [0, 1]
        failed = [[bool(result.failed) for result in rank.loads] for rank in together.ranks]
        assert failed == [[False], [True]]
