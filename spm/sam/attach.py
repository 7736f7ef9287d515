"""Puts our free-block queue into vLLM's pool, or says why not."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from spm.config import SamConfig
from spm.metrics import Counters
from spm.sam.block_table import BlockTable
from spm.sam.ledger import Caps

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

logger = logging.getLogger(__name__)


def attach(
    pool: "BlockPool", config: SamConfig, counters: Counters, clock: Callable[[], float]
) -> BlockTable | None:
    """Take over the order of the pool's free blocks, keeping the present one.

    None, with one log line, if the pool is not what this was written against: hints then
    have no effect on the pool and everything else works. Scheduler thread, before the first
    step.
    """
    trouble = _trouble(pool)
    if trouble is not None:
        logger.warning("hints will not act on vLLM's block pool: %s", trouble)
        return None
    caps = Caps(
        int(config.max_protected_share * len(pool.blocks)),
        int(config.max_tenant_protected_share * len(pool.blocks)),
    )
    free_blocks = pool.free_block_queue.get_all_free_blocks()
    table = BlockTable(pool.blocks, free_blocks, caps, counters, clock)
    pool.free_block_queue = table.queue
    return table


def _trouble(pool: "BlockPool") -> str | None:
    """What is not as expected of vLLM 0.32's ``BlockPool``."""
    queue = getattr(pool, "free_block_queue", None)
    if type(queue) is not FreeKVCacheBlockQueue:
        return f"its free-block queue is {type(queue).__name__}, not vLLM 0.32's own"
    blocks = getattr(pool, "blocks", None)
    if not isinstance(blocks, list) or not all(isinstance(b, KVCacheBlock) for b in blocks):
        return "its blocks are not a list of KVCacheBlock"
    if [block.block_id for block in blocks] != list(range(len(blocks))):
        return "block ids are not positions"
    if len(queue.get_all_free_blocks()) != queue.num_free_blocks:
        return "its count of free blocks is off"
    if not getattr(pool, "enable_caching", False):
        return "prefix caching is off"
    if not hasattr(pool, "cached_block_hash_to_block"):
        return "it has no map of cached blocks"
    return None
