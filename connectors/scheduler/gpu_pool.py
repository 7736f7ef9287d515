"""The one door through which blocks are put into vLLM's prefix cache from outside.

What vLLM's own methods do is left to them: taking blocks (which un-publishes what they held),
counting references, freeing. Scheduler thread.
"""

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from spm.errors import IntegrityError
from tracker.ids import BlockKey

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

logger = logging.getLogger(__name__)


class GpuPool:
    """vLLM's block pool, as far as blocks that are loaded without a request go."""

    def __init__(self, pool: "BlockPool") -> None:
        self._pool = pool
        self._taken: dict[int, KVCacheBlock] = {}
        """Blocks that hold nothing yet and belong to nobody but us."""

    @classmethod
    def of(cls, kv_cache_manager: "KVCacheManager") -> "GpuPool | None":
        """None, with one log line, if this vLLM's pool is not as expected: then nothing can
        be loaded ahead into it, and everything else works."""
        pool = kv_cache_manager.block_pool
        managers = kv_cache_manager.coordinator.single_type_managers
        trouble = None
        if any(manager.block_pool is not pool for manager in managers):
            trouble = "this model has several pools"
        elif not callable(getattr(pool, "_insert_block_hash", None)):
            trouble = "it has no way to publish a block"
        elif not getattr(pool, "enable_caching", False):
            trouble = "prefix caching is off"
        if trouble is not None:
            logger.warning("nothing can be prefetched into vLLM's block pool: %s", trouble)
            return None
        return cls(pool)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block left out."""
        return self._pool.num_gpu_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that a request could be given now."""
        return self._pool.get_num_free_blocks()

    @property
    def num_taken(self) -> int:
        """Blocks taken and neither published nor given back."""
        return len(self._taken)

    def find(self, key: BlockKey) -> "KVCacheBlock | None":
        """A block that holds the key's content, in use or free."""
        return self._pool.cached_block_hash_to_block.get_one_block(_name(key))

    def take(self, count: int) -> "list[KVCacheBlock]":
        """Blocks from the front of the free queue, to be filled. At most :attr:`num_free`."""
        blocks = self._pool.get_new_blocks(count) if count else []
        self._taken.update((block.block_id, block) for block in blocks)
        return blocks

    def hold(self, blocks: "Sequence[KVCacheBlock]") -> None:
        """Published blocks stay where they are until they are let go."""
        self._pool.touch(blocks)

    def let_go(self, blocks: "Sequence[KVCacheBlock]") -> None:
        """Of blocks that were held. In prefix order: the tail goes first."""
        self._pool.free_blocks(reversed(blocks))

    def publish(self, key: BlockKey, block_id: int, end_tokens: int) -> "KVCacheBlock":
        """A taken block is filled: requests can hit it. If another one was published under the
        same hash meanwhile, it is that one, and this stays unpublished."""
        block = self._taken.get(block_id)
        if block is None:
            raise IntegrityError(f"block {block_id} was not taken for a prefetch")
        there = self.find(key)
        if there is not None:
            return there
        self._pool._insert_block_hash(_name(key), block, end_tokens)
        return block

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Taken blocks become free, published or not. In prefix order: the tail goes first."""
        blocks = [self._taken.pop(i) for i in reversed(block_ids) if i in self._taken]
        self._pool.free_blocks(blocks)

    def check_integrity(self, *, lent: bool = False) -> None:
        """Raise :class:`IntegrityError` if a block of ours is somebody else's too. ``lent``: a
        connector that fills it may hold it as well, and requests that hit it."""
        most = math.inf if lent else 1
        shared = [i for i, block in self._taken.items() if not 1 <= block.ref_cnt <= most]
        if shared:
            raise IntegrityError(f"blocks taken for a prefetch are in use: {shared[:5]}")


def _name(key: BlockKey) -> "BlockHashWithGroupId":
    """Block keys without an adapter are what vLLM calls its blocks."""
    return cast("BlockHashWithGroupId", key)
