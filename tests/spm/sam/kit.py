"""vLLM's real block pool with our queue in it, and requests that use it as vLLM's manager does."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from spm.agent_hint import AgentHint, CacheControl, SessionState
from spm.config import SamConfig
from spm.hints import DEFAULT_TENANT
from spm.metrics import Counters, Metric, metric_key
from spm.sam.block_table import BlockTable
from spm.sam.claims import SessionClaims
from spm.sam.free_queue import ZonedFreeBlockQueue
from spm.sam.manager import SessionAwareManager
from spm.sam.zones import Zone, target_tick, target_zone
from tests.clock import FakeClock
from tests.connectors.scheduler.vllm_parts import make_request
from tracker.ids import SessionId, SessionRef, TenantId

BLOCK_TOKENS = 4
FINISHED_HINT = AgentHint(state=SessionState.FINISHED)


def ref_of(name: str, tenant: str = DEFAULT_TENANT) -> SessionRef:
    return SessionRef(TenantId(tenant), SessionId(name))


def ttl(seconds: float, offset: int | None = None, resume_s: float | None = None) -> AgentHint:
    return AgentHint(cache_control=CacheControl(seconds, offset), expected_resume_s=resume_s)


@dataclass
class Running:
    """A request that holds blocks."""

    request: Request
    arrived_s: float
    blocks: list[KVCacheBlock] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [block.block_id for block in self.blocks]


class Rig:
    """One pool and one manager of sessions. ``share`` and ``tenant_share``: the caps."""

    def __init__(
        self,
        num_blocks: int = 16,
        *,
        share: float = 1.0,
        tenant_share: float = 1.0,
        max_records: int = 100_000,
        scales: Sequence[int] = (1,),
    ) -> None:
        self.clock = FakeClock(1000.25)
        self.counters = Counters()
        self.pool = BlockPool(num_blocks, True, BLOCK_TOKENS)
        config = SamConfig(max_protected_share=share, max_tenant_protected_share=tenant_share)
        self.sam = SessionAwareManager(config, scales, max_records, self.counters, self.clock)
        self.sam.bind(self.pool)
        self._names = 0

    @property
    def queue(self) -> ZonedFreeBlockQueue:
        queue = self.pool.free_block_queue
        assert isinstance(queue, ZonedFreeBlockQueue)
        return queue

    @property
    def table(self) -> BlockTable:
        return cast(BlockTable, self.queue._marks)

    @property
    def claims(self) -> SessionClaims:
        assert self.sam.claims is not None
        return self.sam.claims

    # --- requests -----------------------------------------------------------------------

    def request(self, *path: int, arrived_s: float | None = None) -> Running:
        """A request whose n-th block is filled with the n-th number."""
        self._names += 1
        tokens = [token for token in path for _ in range(BLOCK_TOKENS)]
        request = make_request(f"r{self._names}", tokens, hash_tokens=BLOCK_TOKENS)
        return Running(request, self.clock.now_s if arrived_s is None else arrived_s)

    def start(self, *path: int, arrived_s: float | None = None) -> Running:
        """The same, and it runs."""
        running = self.request(*path, arrived_s=arrived_s)
        self.serve(running)
        return running

    def hits(self, request: Request) -> list[KVCacheBlock]:
        found: list[KVCacheBlock] = []
        for name in request.block_hashes:
            cached = self.pool.get_cached_block(name, [0])
            if cached is None:
                break
            found += cached
        return found

    def serve(self, running: Running) -> None:
        """Take what is cached, allocate the rest, and compute it."""
        hits = self.hits(running.request)
        self.pool.touch(hits)
        total = len(running.request.block_hashes)
        running.blocks = hits + self.pool.get_new_blocks(total - len(hits))
        self.pool.cache_full_blocks(
            running.request, running.blocks, len(hits), total, BLOCK_TOKENS, 0
        )

    def free(self, running: Running) -> None:
        self.pool.free_blocks(reversed(running.blocks))

    def end(self, running: Running, ref: SessionRef, hint: AgentHint | None = None) -> None:
        self.sam.finished(ref, hint, running.arrived_s, [running.blocks])
        self.free(running)
        self.sam.check_integrity()

    def turn(self, ref: SessionRef, hint: AgentHint | None, *path: int) -> list[int]:
        """One request from start to end; the ids of its blocks."""
        running = self.start(*path)
        self.end(running, ref, hint)
        return running.ids

    def other(self, *path: int) -> list[int]:
        """A request of nobody's session."""
        running = self.start(*path)
        self.free(running)
        return running.ids

    def after(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.sam.tick(int(self.clock.now_s))

    # --- questions ----------------------------------------------------------------------

    def segments(self) -> list[tuple[Zone, int, list[int]]]:
        """Zone, tick and block ids of every segment, by the queue's links alone."""
        ends = {id(end): target for target, end in self.queue._ends.items()}
        found, ids = [], list[int]()
        node = self.queue.fake_free_list_head.next_free_block
        while node is not None and node is not self.queue.fake_free_list_tail:
            if node.block_id >= 0:
                ids.append(node.block_id)
            else:
                target = ends[id(node)]
                found.append((target_zone(target), target_tick(target), ids))
                ids = []
            node = node.next_free_block
        assert not ids
        return found

    def zones(self, ids: Sequence[int]) -> list[Zone | None]:
        """Where these blocks are; None: not free."""
        where = {i: zone for zone, _, members in self.segments() for i in members}
        return [where.get(i) for i in ids]

    def zone(self, ids: Sequence[int]) -> Zone | None:
        """Where all of these are."""
        (zone,) = set(self.zones(ids))
        return zone

    def order(self) -> list[int]:
        return [block.block_id for block in self.queue.get_all_free_blocks()]

    def take_all(self) -> list[int]:
        """Every free block, one at a time, in the order in which vLLM gets them."""
        return [
            self.pool.get_new_blocks(1)[0].block_id for _ in range(self.pool.get_num_free_blocks())
        ]

    def counted(self, metric: Metric) -> float:
        return self.counters.drain().get(metric_key(metric), 0)
