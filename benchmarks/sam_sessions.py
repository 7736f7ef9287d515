"""Many sessions on one pool: what a boundary costs, and what a session's block weighs.

The scheduler half is the real one, called as the connector calls it. Around it is vLLM's block
pool and just enough of its cache manager to say which blocks a request has.
"""

import gc
import itertools
import tracemalloc
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from time import thread_time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from vllm import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from benchmarks.sam_conversations import BLOCK_TOKENS
from benchmarks.sam_parts import NO_HINTS, PRESSED, SETTINGS
from benchmarks.scheduler_parts import kv_cache_config, vllm_config
from connectors.assembly import build_scheduler_half
from spm.config import SamConfig, SpmConfig
from spm.events import BlocksAssociated
from spm.hints import DEFAULT_TENANT
from spm.metrics import Counters
from spm.sam.attach import attach
from tracker.ids import BlockHash, GroupId, SessionId, SessionRef, make_block_key

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

TURN_BLOCKS = 100
_SHARED_BLOCKS = 8
_TURN_S = 0.01
"""Between turns: all sessions are heard of again before they count as idle."""
_END_EVERY = 10
_LOAD = PRESSED
_NO_NEWS = SchedulerOutput.make_empty()
_GROUP = GroupId(0)


@dataclass(slots=True)
class _CacheManager:
    """What the half asks of vLLM's cache manager."""

    block_pool: BlockPool
    owned: dict[str, list[KVCacheBlock]]

    @property
    def coordinator(self) -> SimpleNamespace:
        return SimpleNamespace(single_type_managers=())

    def get_blocks(self, request_id: str) -> SimpleNamespace:
        return SimpleNamespace(blocks=(self.owned[request_id],))


class World:
    """A pool and a number of open sessions, each of which comes back in turn."""

    def __init__(self, sessions: int, directory: Path) -> None:
        self._now_s = 0.0
        self.pool = BlockPool(_LOAD.pool_blocks, True, BLOCK_TOKENS)
        self.half = build_scheduler_half(
            SpmConfig.from_extra_config(SETTINGS),
            vllm_config(directory, _LOAD.limits, NO_HINTS.transfer, asynchronous=False),
            kv_cache_config(_LOAD.limits),
            Counters(),
            lambda: self._now_s,
        )
        self._numbers = itertools.count(1)
        self._manager = _CacheManager(self.pool, {})
        self.half.bind(cast("KVCacheManager", self._manager))
        self._shared = self._new_blocks(_SHARED_BLOCKS)
        self._waiting = deque(f"session-{number}" for number in range(sessions))

    def open_all(self) -> None:
        """A first turn of every session."""
        for _ in range(len(self._waiting)):
            self.turn()

    def turn(self) -> float:
        """The session idle longest comes back and ends a turn; now and then one is ended.
        Returns the CPU seconds of our part."""
        self._now_s += _TURN_S
        session = self._waiting[0]
        self._waiting.rotate(-1)
        number = next(self._numbers)
        request = make_request(f"request-{number}", session)
        end = {"v": 1, "op": "end_session", "tenant": DEFAULT_TENANT, "session_id": session}
        end |= {"tree": False, "operation_id": f"end-{number}"}
        seconds = 0.0
        if number % _END_EVERY == 0:
            started = thread_time()
            self.half.manage(end)
            seconds += thread_time() - started
        self._manager.owned[request.request_id] = blocks = self.allocate()
        started = thread_time()
        self.half.on_new_request(request)
        self.half.build_commands(_NO_NEWS)  # between arrival and end there is always a step
        self.half.request_finished(request)
        self.half.gauges()
        seconds += thread_time() - started
        del self._manager.owned[request.request_id]
        self.pool.free_blocks(reversed(blocks))
        return seconds

    def allocate(self) -> list[KVCacheBlock]:
        """The blocks of one turn: a shared prefix, and the rest computed anew."""
        self.pool.touch(self._shared)
        return self._shared + self._new_blocks(TURN_BLOCKS - _SHARED_BLOCKS)

    def _new_blocks(self, count: int) -> list[KVCacheBlock]:
        blocks = self.pool.get_new_blocks(count)
        for block in blocks:
            key = make_block_hash_with_group_id(
                kv_cache_utils.BlockHash(next(self._numbers).to_bytes(32, "big")), 0
            )
            block.set_block_hash(key)
            self.pool.cached_block_hash_to_block.insert(key, block)
        return blocks

    def finish(self, turns: list[tuple[Request, list[KVCacheBlock]]]) -> None:
        """Requests arrive and end, and keep their blocks."""
        for request, blocks in turns:
            self._manager.owned[request.request_id] = blocks
            self.half.on_new_request(request)
            self.half.request_finished(request)
            del self._manager.owned[request.request_id]


def make_request(request_id: str, session: str) -> Request:
    """A hinted request. Its prompt does not matter: its blocks are given."""
    hint = {"session_id": session, "cache_control": {"ttl": 300}}
    params = SamplingParams(extra_args={"kv_transfer_params": {"agent_hint": hint}})
    return Request(request_id, [0] * BLOCK_TOKENS, params, None)


def bytes_per_pool_block() -> float:
    """What taking over a pool's order allocates, beyond vLLM's own queue."""
    pool = BlockPool(_LOAD.pool_blocks, True, BLOCK_TOKENS)
    with Memory() as memory:
        table = attach(pool, SamConfig(), Counters(), lambda: 0.0)
    assert table is not None
    return memory.grown_bytes / _LOAD.pool_blocks


def bytes_per_session_block(directory: Path, sessions: int = 200) -> tuple[float, float]:
    """Bytes of a pair of a session and a block it holds: without and with pooling's keys."""
    world = World(0, directory)
    turns: list[tuple[Request, list[KVCacheBlock]]] = []
    for number in range(sessions):
        request = make_request(f"request-{number}", f"session-{number}")
        turns.append((request, world.allocate()))
    hashes = [[_hash_of(block) for block in blocks] for _, blocks in turns]
    with Memory() as claims:
        world.finish(turns)
    with Memory() as keys:
        for number, names in enumerate(hashes):
            ref = SessionRef(DEFAULT_TENANT, SessionId(f"session-{number}"))
            made = [make_block_key(name, _GROUP) for name in names]
            world.half.manager.handle(BlocksAssociated(ref, {_GROUP: made}))
    assert world.half.manager.tracker.num_references == sessions * TURN_BLOCKS
    pairs = sessions * TURN_BLOCKS
    return claims.grown_bytes / pairs, (claims.grown_bytes + keys.grown_bytes) / pairs


def _hash_of(block: KVCacheBlock) -> BlockHash:
    assert block.block_hash is not None
    return BlockHash(kv_cache_utils.get_block_hash(block.block_hash))


class Memory:
    """How much more Python has allocated at the end than at the start."""

    grown_bytes = 0

    def __enter__(self) -> "Memory":
        gc.collect()
        tracemalloc.start()
        return self

    def __exit__(self, *_: Any) -> None:  # noqa: ANN401
        gc.collect()
        self.grown_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
