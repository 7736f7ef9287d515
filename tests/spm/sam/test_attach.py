"""Our queue goes only into a pool that is what it was written against."""

import logging
from collections.abc import Callable

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from spm.config import SamConfig
from spm.metrics import Counters, Metric, metric_key
from spm.sam.attach import attach
from spm.sam.audit import audit_table
from spm.sam.manager import SessionAwareManager
from tests.clock import FakeClock
from tests.spm.sam.kit import BLOCK_TOKENS, ref_of, ttl


class OtherQueue(FreeKVCacheBlockQueue):
    """What somebody else might have put there."""


def other_queue(pool: BlockPool) -> None:
    pool.free_block_queue = OtherQueue(pool.free_block_queue.get_all_free_blocks())


def tuple_of_blocks(pool: BlockPool) -> None:
    pool.blocks = tuple(pool.blocks)  # type: ignore[assignment]


def foreign_block(pool: BlockPool) -> None:
    pool.blocks[3] = object()  # type: ignore[call-overload]


def shuffled(pool: BlockPool) -> None:
    pool.blocks[2], pool.blocks[3] = pool.blocks[3], pool.blocks[2]


def miscounted(pool: BlockPool) -> None:
    pool.free_block_queue.num_free_blocks += 1


def uncached(pool: BlockPool) -> None:
    pool.enable_caching = False


def mapless(pool: BlockPool) -> None:
    del pool.cached_block_hash_to_block


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (other_queue, "OtherQueue"),
        (tuple_of_blocks, "not a list"),
        (foreign_block, "not a list"),
        (shuffled, "not positions"),
        (miscounted, "count of free blocks"),
        (uncached, "caching is off"),
        (mapless, "no map"),
    ],
)
def test_an_unexpected_pool_is_left_alone_with_one_line(
    spoil: Callable[[BlockPool], None], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = BlockPool(8, True, BLOCK_TOKENS)
    spoil(pool)
    queue = pool.free_block_queue
    order = queue.get_all_free_blocks()
    with caplog.at_level(logging.INFO):
        assert attach(pool, SamConfig(), Counters(), FakeClock()) is None
    assert [words in record.message for record in caplog.records] == [True]
    assert pool.free_block_queue is queue
    assert queue.get_all_free_blocks() == order


@pytest.mark.parametrize("enabled", [True, False])
def test_without_a_queue_hints_change_nothing(enabled: bool) -> None:
    pool = BlockPool(8, not enabled, BLOCK_TOKENS)
    counters = Counters()
    sam = SessionAwareManager(SamConfig(enabled=enabled), (1,), 100, counters, FakeClock())
    sam.bind(pool)
    blocks = pool.get_new_blocks(2)
    sam.finished(ref_of("a"), ttl(60), 0.0, [blocks])
    pool.free_blocks(blocks)
    sam.tick(0)
    sam.check_integrity()
    assert type(pool.free_block_queue) is FreeKVCacheBlockQueue
    assert sam.gauges() == {metric_key(Metric.SAM_ACTIVE): 0}
    assert counters.drain()[metric_key(Metric.HINTS, "off")] == 1


def test_the_present_order_is_kept_and_the_null_block_stays_out() -> None:
    pool = BlockPool(8, True, BLOCK_TOKENS)
    used: list[KVCacheBlock] = pool.get_new_blocks(4)
    pool.free_blocks([used[2], used[0]])
    before = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    table = attach(pool, SamConfig(), Counters(), FakeClock())
    assert table is not None
    assert pool.free_block_queue is table.queue
    assert [block.block_id for block in table.queue.get_all_free_blocks()] == before
    assert pool.get_num_free_blocks() == 5
    audit_table(table, ())
    pool.free_blocks([used[1], used[3]])
    assert len(pool.get_new_blocks(7)) == 7
