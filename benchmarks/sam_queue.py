"""Our free-block queue against vLLM's, over the operations a busy scheduler makes.

A round is what one step does to the queue, several times over: decoding requests take a block
each, prefills take many, prefix hits are removed, finished requests put theirs back. It is
recorded once on a twin of each queue, so that what is timed is queue operations and a loop.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import thread_time
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId

from benchmarks.sam_conversations import BLOCK_TOKENS
from spm.config import SamConfig
from spm.metrics import Counters
from spm.sam.attach import attach
from spm.sam.holders import Reservation
from spm.sam.zones import ORDINARY, Zone, target_of

_POOL_BLOCKS = 20_000
_CHAIN_BLOCKS = 150
_CHAINS = 100
_DECODES = 60
_PREFILLS = 4
_PREFILL_BLOCKS = 40
_DEADLINES = 20
_FRESH_BLOCKS = (_DECODES + _PREFILLS * _PREFILL_BLOCKS) // _PREFILLS

Operation = tuple[str, Any]
"""A method of the queue and its argument, with block ids for blocks."""


@dataclass(frozen=True, slots=True)
class QueueKind:
    """Whose queue, and how many of each 3 chains a session protects."""

    ours: bool
    marked_of_3: int = 0


def make_pool(kind: QueueKind) -> BlockPool:
    """A pool full of cached blocks, all free."""
    pool = BlockPool(_POOL_BLOCKS, True, BLOCK_TOKENS)
    for block in pool.blocks[1:]:
        block.set_block_hash(BlockHashWithGroupId(block.block_id.to_bytes(36, "big")))
    if not kind.ours:
        return pool
    table = attach(pool, SamConfig(), Counters(), lambda: 0.0)
    assert table is not None
    for number, chain in enumerate(_chains()):
        if number % 3 < kind.marked_of_3:
            one = Reservation(ORDINARY, 0)
            table.retarget(one, target_of(Zone.LATER, 300 + number % _DEADLINES))
            for block_id in reversed(chain):
                block = pool.blocks[block_id]
                assert block.block_hash is not None
                table.claim(block, block.block_hash, one)
    return pool


def _chains() -> list[list[int]]:
    """The blocks of each conversation; the blocks before them are nobody's, and oldest."""
    first = _POOL_BLOCKS - _CHAINS * _CHAIN_BLOCKS
    starts = range(first, _POOL_BLOCKS, _CHAIN_BLOCKS)
    return [list(range(start, start + _CHAIN_BLOCKS)) for start in starts]


class _Recorder:
    """Makes the rounds on a queue, live, because what is taken decides what is put back."""

    def __init__(self, pool: BlockPool, seed: int) -> None:
        self.operations: list[Operation] = []
        self._pool = pool
        self._rng = random.Random(seed)
        self._chains = _chains()
        self._owner = {block: chain for chain in self._chains for block in chain}

    def round(self) -> None:
        fresh: deque[int] = deque()
        for _ in range(_DECODES):
            fresh += self._take(1)
        for _ in range(_PREFILLS):
            fresh += self._take(_PREFILL_BLOCKS)
        for chain in self._rng.sample(self._chains, _PREFILLS):
            for block_id in chain:
                self._do("remove", block_id)
            new = [fresh.popleft() for _ in range(_FRESH_BLOCKS)]
            chain += new[:-1]
            # Marked blocks lie in the first part of a chain and stay there.
            self._do("prepend_n", new[-1:])
            self._do("append_n", chain[::-1])
            self._owner |= dict.fromkeys(chain[:_CHAIN_BLOCKS], chain)
            del chain[_CHAIN_BLOCKS:]

    def _take(self, count: int) -> list[int]:
        taken = [block.block_id for block in self._do("popleft_n", count)]
        for block_id in taken:
            owner = self._owner.pop(block_id, None)
            if owner is not None:
                owner.remove(block_id)
        return taken

    def _do(self, name: str, argument: Any) -> Any:  # noqa: ANN401
        self.operations.append((name, argument))
        return getattr(self._pool.free_block_queue, name)(_blocks(self._pool, name, argument))


def _blocks(pool: BlockPool, name: str, argument: Any) -> Any:  # noqa: ANN401
    """Block objects of ``pool`` in place of ids."""
    if name == "popleft_n":
        return argument
    return pool.blocks[argument] if name == "remove" else [pool.blocks[i] for i in argument]


class QueueReplay:
    """The recorded operations of several repeats, to be made on a second queue and timed."""

    def __init__(self, kind: QueueKind, repeats: int, rounds: int, seed: int) -> None:
        self._twin, self._pool = make_pool(kind), make_pool(kind)
        recorder = _Recorder(self._twin, seed)
        self._repeats: deque[list[tuple[Callable[[Any], Any], Any]]] = deque()
        self._sizes: deque[int] = deque()
        for _ in range(repeats):
            recorder.operations = []
            for _ in range(rounds):
                recorder.round()
            self._repeats.append([self._bound(*operation) for operation in recorder.operations])
            self._sizes.append(sum(_size(*operation) for operation in recorder.operations))

    def _bound(self, name: str, argument: Any) -> tuple[Callable[[Any], Any], Any]:  # noqa: ANN401
        method = getattr(self._pool.free_block_queue, name)
        return method, _blocks(self._pool, name, argument)

    def seconds_per_block(self) -> float:
        """CPU seconds of the next repeat, by blocks moved."""
        operations = self._repeats.popleft()
        started = thread_time()
        for method, argument in operations:
            method(argument)
        return (thread_time() - started) / self._sizes.popleft()

    def order(self) -> list[int]:
        """Ids of the free blocks in the order in which they would be taken."""
        return _order(self._pool)

    def check(self) -> None:
        """After the last repeat: the queue is as the recorded one."""
        assert self.order() == _order(self._twin), "other operations were made than recorded"


def _order(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]


def _size(name: str, argument: Any) -> int:  # noqa: ANN401
    if name == "popleft_n":
        return int(argument)
    return 1 if name == "remove" else len(argument)
