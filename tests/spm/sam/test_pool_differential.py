"""vLLM's pool with vLLM's queue next to one with ours: without hints nothing may differ.

Also with sessions that named themselves and said nothing: theirs are ordinary blocks.
"""

from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from spm.config import SamConfig
from spm.metrics import Counters
from spm.sam.attach import attach
from spm.sam.claims import SessionClaims
from spm.sam.policy import UNHINTED
from spm.sam.zones import ORDINARY
from tests.clock import FakeClock
from tests.connectors.scheduler.vllm_parts import make_request
from tests.spm.sam.kit import BLOCK_TOKENS, ref_of

NUM_BLOCKS = 13
PATHS = st.lists(st.integers(1, 2), min_size=1, max_size=5)
SESSIONS = [ref_of("a"), ref_of("b")]


def note(log: list[int], block: KVCacheBlock) -> None:
    log.append(block.block_id)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.pools = [BlockPool(NUM_BLOCKS, True, BLOCK_TOKENS) for _ in range(2)]
        table = attach(self.pools[1], SamConfig(), Counters(), self.clock)
        assert table is not None
        self.table = table
        self.claims = SessionClaims(table, (1,), 10_000, self.clock)
        self.running: list[tuple[Request, list[int]]] = []
        self.loose: list[int] = []
        self.reused: list[list[int]] = [[], []]
        self.names = 0

    def blocks(self, pool: BlockPool, ids: list[int]) -> list[KVCacheBlock]:
        return [pool.blocks[i] for i in ids]

    def allocate_in_both(self, n: int) -> list[int]:
        taken = [[b.block_id for b in pool.get_new_blocks(n)] for pool in self.pools]
        assert taken[0] == taken[1]
        return taken[0]

    @rule(path=PATHS, cached=st.booleans())
    def start(self, path: list[int], cached: bool) -> None:
        self.names += 1
        tokens = [token for token in path for _ in range(BLOCK_TOKENS)]
        request = make_request(str(self.names), tokens, hash_tokens=BLOCK_TOKENS)
        found: list[list[int]] = [[], []]
        for pool, ids in zip(self.pools, found, strict=True):
            for name in request.block_hashes:
                hit = pool.get_cached_block(name, [0])
                if hit is None:
                    break
                ids.append(hit[0].block_id)
        assert found[0] == found[1]
        hits = found[0]
        for pool in self.pools:
            pool.touch(self.blocks(pool, hits))
        missing = len(path) - len(hits)
        if missing > self.pools[0].get_num_free_blocks():
            self.running.append((request, hits))
            return
        ids = hits + self.allocate_in_both(missing)
        for pool in self.pools if cached else []:
            pool.cache_full_blocks(
                request, self.blocks(pool, ids), len(hits), len(ids), BLOCK_TOKENS, 0
            )
        self.running.append((request, ids))

    @rule(n=st.integers(0, 4))
    def take(self, n: int) -> None:
        if n <= self.pools[0].get_num_free_blocks():
            self.loose += self.allocate_in_both(n)

    @rule()
    def popleft(self) -> None:
        if self.pools[0].get_num_free_blocks():
            popped = [pool.free_block_queue.popleft() for pool in self.pools]
            assert popped[0].block_id == popped[1].block_id
            for pool, block in zip(self.pools, popped, strict=True):
                pool._maybe_evict_cached_block(block)
                block.ref_cnt += 1
            self.loose.append(popped[0].block_id)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), session=st.sampled_from([*SESSIONS, None]))
    def end(self, data: st.DataObject, session: object) -> None:
        """Half of the requests are of sessions that say nothing about retention."""
        _, ids = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        for ref in SESSIONS:
            if ref == session:
                claimed = self.blocks(self.pools[1], ids)
                self.claims.associate(ref, -1.0, [claimed], UNHINTED)
        for pool in self.pools:
            pool.free_blocks(reversed(self.blocks(pool, ids)))

    @rule(session=st.sampled_from(SESSIONS))
    def forget(self, session: object) -> None:
        for ref in SESSIONS:
            if ref == session:
                self.claims.forget(ref, ORDINARY)

    @rule(data=st.data(), unpin=st.booleans())
    def give_back(self, data: st.DataObject, unpin: bool) -> None:
        chosen = data.draw(
            st.lists(st.sampled_from(self.loose), unique=True) if self.loose else st.just([])
        )
        self.loose = [i for i in self.loose if i not in chosen]
        for pool, log in zip(self.pools, self.reused, strict=True):
            if unpin:
                pool.unpin_blocks(self.blocks(pool, chosen), partial(note, log))
            else:
                pool.free_blocks(self.blocks(pool, chosen))

    @rule(ids=st.sets(st.integers(1, NUM_BLOCKS - 1), max_size=4))
    def evict(self, ids: set[int]) -> None:
        for pool in self.pools:
            pool.evict_blocks(ids)

    @rule()
    def reset(self) -> None:
        done = [pool.reset_prefix_cache() for pool in self.pools]
        assert done[0] == done[1]
        if done[0]:
            self.table.reset()
            self.claims.clear()

    @rule(seconds=st.sampled_from([0.3, 1.0, 5000.0]))
    def tick(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.table.tick(int(self.clock.now_s))

    @invariant()
    def same(self) -> None:
        states = []
        for pool in self.pools:
            queue = pool.free_block_queue
            tails = [
                [b.block_id for b in queue.iter_blocks_after(cursor)]
                for cursor in [None, *pool.blocks]
            ]
            facts = [(b.ref_cnt, b.block_hash, b.is_null) for b in pool.blocks]
            order = [b.block_id for b in queue.get_all_free_blocks()]
            states.append((order, tails, facts, queue.num_free_blocks))
        assert states[0] == states[1]
        assert self.reused[0] == self.reused[1]
        self.claims.check_integrity()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
