"""Our free-block queue, nothing marked, against vLLM's: the same calls, the same answers."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from spm.metrics import Counters
from spm.sam.block_table import BlockTable
from spm.sam.free_queue import ZonedFreeBlockQueue
from spm.sam.ledger import Caps
from tests.clock import FakeClock


def both_queues(count: int) -> tuple[list[FreeKVCacheBlockQueue], list[list[KVCacheBlock]]]:
    blocks = [[KVCacheBlock(i) for i in range(count)] for _ in range(2)]
    ours = BlockTable(blocks[1], blocks[1], Caps(count, count), Counters(), FakeClock()).queue
    assert isinstance(ours, ZonedFreeBlockQueue)
    return [FreeKVCacheBlockQueue(blocks[0]), ours], blocks


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.used: list[int] = []

    @initialize(count=st.integers(0, 9))
    def start(self, count: int) -> None:
        self.queues, self.blocks = both_queues(count)

    def both(self, call: Any) -> list[int]:  # noqa: ANN401
        """``call(queue, blocks)`` on both; the ids it returned, which must agree."""
        answers = []
        for queue, blocks in zip(self.queues, self.blocks, strict=True):
            try:
                answers.append([block.block_id for block in call(queue, blocks) or []])
            except (ValueError, AssertionError, RuntimeError) as error:
                answers.append([type(error).__name__])
        assert answers[0] == answers[1]
        return [one for one in answers[0] if isinstance(one, int)]

    @rule()
    def popleft(self) -> None:
        self.used += self.both(lambda queue, _: [queue.popleft()])

    @rule(n=st.integers(0, 10))
    def popleft_n(self, n: int) -> None:
        self.used += self.both(lambda queue, _: queue.popleft_n(n))

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """Also a block that is not free: an error in both, and nothing changes."""
        if self.blocks[0]:
            index = data.draw(st.integers(0, len(self.blocks[0]) - 1))
            self.both(lambda queue, blocks: queue.remove(blocks[index]))
            if index not in self.used:
                self.used.append(index)

    @precondition(lambda self: self.used)
    @rule()
    def append(self) -> None:
        index = self.used.pop()
        self.both(lambda queue, blocks: queue.append(blocks[index]))

    @rule(data=st.data(), front=st.booleans())
    def put_back(self, data: st.DataObject, front: bool) -> None:
        chosen = data.draw(
            st.lists(st.sampled_from(self.used), unique=True) if self.used else st.just([])
        )
        self.used = [i for i in self.used if i not in chosen]
        self.both(
            lambda queue, blocks: (queue.prepend_n if front else queue.append_n)(
                [blocks[i] for i in chosen]
            )
        )

    @invariant()
    def same_order(self) -> None:
        if not hasattr(self, "queues"):
            return
        stock, ours = self.queues
        assert ours.num_free_blocks == stock.num_free_blocks
        self.both(lambda queue, _: queue.get_all_free_blocks())
        for index in range(len(self.blocks[0])):
            self.both(lambda queue, blocks, i=index: list(queue.iter_blocks_after(blocks[i])))
        self.both(lambda queue, _: list(queue.iter_blocks_after(None)))
        assert isinstance(ours, ZonedFreeBlockQueue)
        segments = ours.segments()
        assert sum(len(blocks) for _, blocks in segments) == ours.num_free_blocks


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_removed_block_is_unlinked_as_in_vllm() -> None:
    queues, blocks = both_queues(3)
    for queue, own in zip(queues, blocks, strict=True):
        queue.popleft_n(2)
        queue.remove(own[2])
        assert all(b.prev_free_block is None and b.next_free_block is None for b in own)
        with pytest.raises(RuntimeError, match="invalid block"):
            queue.remove(own[2])
        with pytest.raises(ValueError, match="No free blocks"):
            queue.popleft()
