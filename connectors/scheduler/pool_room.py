"""How much of vLLM's block pool may be filled ahead without being in the way of inference.
Scheduler thread only."""

from connectors.scheduler.gpu_pool import GpuPool
from spm.sam.manager import SessionAwareManager


class PoolRoom:
    """Of one engine's pool."""

    def __init__(self, reserve_share: float, sam: SessionAwareManager) -> None:
        self._reserve_share = reserve_share
        self._sam = sam

    def offer(self, pool: GpuPool, wanted: int, promised: int = 0) -> int:
        """Blocks that may be taken for something new: of those nobody wants kept at most a
        half, and the reserve is left to inference; what others were promised is not
        promised twice."""
        reserve = self._reserve(pool)
        low = self._sam.low_free(2 * (wanted + promised) + reserve)
        return max(0, min(low // 2, low - reserve) - promised)

    def has(self, pool: GpuPool, count: int) -> bool:
        """Whether so many can be taken now, of those nobody wants kept and beside the reserve."""
        limit = count + self._reserve(pool)
        return self._sam.low_free(limit) >= limit

    def is_short(self, pool: GpuPool) -> bool:
        """Whether requests have used much of the reserve."""
        return pool.num_free < self._reserve(pool) // 2

    def _reserve(self, pool: GpuPool) -> int:
        return int(self._reserve_share * pool.num_blocks)
