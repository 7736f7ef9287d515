"""SavePlanner: each block once, only under the hash the pool says it has, in bounded bytes."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from connectors.metadata import BlockMove
from connectors.scheduler.records import RequestRecord
from connectors.scheduler.save_planner import SavePlanner
from connectors.scheduler.transfer_queue import MAX_SAVES, TransferQueue
from spm.config import SpmConfig
from spm.metrics import Counters
from spm.work import WorkClass
from tests.clock import FakeClock
from tests.connectors.scheduler.kit import geometry_of, keys_of, record_of
from tests.connectors.scheduler.vllm_parts import FULL, HYBRID, UNEVEN, Attention
from tracker.ids import BlockKey

VALUE_BYTES = 100


def publish(block: KVCacheBlock, key: BlockKey | None) -> None:
    """What the pool says a block holds, whatever it said before."""
    block._block_hash = None if key is None else BlockHashWithGroupId(key)


@dataclass
class Rig:
    """A planner and the blocks of requests as vLLM's pool would have them."""

    model: tuple[Attention, ...] = FULL
    limit_blocks: int = 100
    world_size: int = 1

    def __post_init__(self) -> None:
        self.geometry = geometry_of(self.model)
        self.counters = Counters()
        self.stored: set[BlockKey] = set()
        config = SpmConfig(save_inflight_bytes=max(1, self.limit_blocks * VALUE_BYTES))
        self.queue = TransferQueue(config, FakeClock())
        self.queue.set_value_bytes(dict.fromkeys([g.group for g in self.geometry.groups], 100))
        self.planner = SavePlanner(
            self.geometry,
            self.stored.__contains__,
            self.queue,
            self.world_size,
            self.counters,
        )
        self.next_id = 1

    def arrive(self, name: str = "r", num_tokens: int = 33) -> RequestRecord:
        return record_of(self.geometry, name, num_tokens)

    def blocks(self, record: RequestRecord, *, published: bool = True) -> list[list[KVCacheBlock]]:
        """One block for every key, published under its hash or not (yet)."""
        table = []
        for group in range(len(self.model)):
            row = []
            for key in keys_of(self.geometry, record.request, group):
                block = KVCacheBlock(self.next_id)
                self.next_id += 1
                if published:
                    publish(block, key)
                row.append(block)
            table.append(row)
        return table

    def consider(
        self, record: RequestRecord, tokens: int, blocks: list[list[KVCacheBlock]]
    ) -> None:
        self.planner.consider(record, tokens, lambda: blocks)
        self.planner.check_integrity()

    def moves(self) -> list[BlockMove]:
        moves = self.planner.hand_out(self.queue.take().get(WorkClass.SAVE, ()))
        self.planner.check_integrity()
        self.queue.check_integrity()
        return moves

    def hand_out(self) -> list[BlockKey]:
        return [move.key for move in self.moves()]

    def skipped(self) -> dict[str, float]:
        return {key.split("|")[1]: n for key, n in self.counters.drain().items()}


def test_full_blocks_are_saved_as_they_fill_up_each_once() -> None:
    rig = Rig()
    record = rig.arrive()
    blocks, keys = rig.blocks(record), keys_of(rig.geometry, record.request)
    rig.consider(record, 3, blocks)
    assert rig.hand_out() == []
    rig.consider(record, 9, blocks)
    assert rig.hand_out() == keys[:2]
    rig.consider(record, 10, blocks)
    rig.consider(record, 16, blocks)
    moves = rig.moves()
    assert [(move.key, move.block_id) for move in moves] == [
        (keys[2], blocks[0][2].block_id),
        (keys[3], blocks[0][3].block_id),
    ]


def test_the_block_table_is_not_read_when_no_block_became_full() -> None:
    rig = Rig()
    record = rig.arrive()
    rig.consider(record, 8, rig.blocks(record))
    rig.planner.consider(record, 11, lambda: pytest.fail("read for nothing"))


def test_a_shared_prefix_is_queued_once_whatever_became_of_it() -> None:
    rig = Rig()
    first, second, third = rig.arrive("a"), rig.arrive("b"), rig.arrive("c")
    rig.consider(first, 16, rig.blocks(first))
    rig.consider(second, 16, rig.blocks(second))  # waiting
    keys = rig.hand_out()
    assert len(keys) == 4
    rig.consider(third, 16, rig.blocks(third))  # on its way
    assert rig.hand_out() == []
    rig.planner.done(keys)
    rig.stored.update(keys)
    again = rig.arrive("d")
    rig.consider(again, 16, rig.blocks(again))  # stored
    assert rig.hand_out() == []
    assert not rig.planner.busy


@pytest.mark.fault("F23", breaks="a block is saved whoever has it by now")
def test_a_block_that_changed_hands_before_hand_out_is_skipped_and_counted() -> None:
    rig = Rig()
    record = rig.arrive()
    blocks, keys = rig.blocks(record), keys_of(rig.geometry, record.request)
    rig.consider(record, 16, blocks)
    publish(blocks[0][1], None)  # evicted
    publish(blocks[0][2], keys[7])  # evicted and used for something else
    assert rig.hand_out() == [keys[0], keys[3]]
    assert rig.skipped() == {"evicted": 2}


def test_a_block_is_never_saved_under_the_hash_of_a_part_of_it() -> None:
    rig = Rig(UNEVEN)  # blocks of 8 tokens hashed by 4
    record = rig.arrive()
    blocks = rig.blocks(record)
    part_keys = rig.geometry.published_keys(record.request, rig.geometry.groups[1], 0, 8)
    publish(blocks[0][1], BlockKey(part_keys[2][:-4] + bytes(4)))
    rig.consider(record, 16, blocks)
    saved = rig.hand_out()
    assert keys_of(rig.geometry, record.request)[0] in saved
    assert keys_of(rig.geometry, record.request)[1] not in saved
    assert len(saved) == 1 + 4


def test_unpublished_and_null_blocks_are_passed_over_and_later_ones_still_saved() -> None:
    rig = Rig(HYBRID)
    record = rig.arrive()
    blocks, keys = rig.blocks(record), keys_of(rig.geometry, record.request, 1)
    blocks[0] = []
    blocks[1][0].is_null = True  # left the window
    publish(blocks[1][1], None)  # vLLM does not publish every block of a window
    publish(blocks[1][3], None)
    rig.consider(record, 16, blocks)
    assert rig.hand_out() == [keys[2]]
    publish(blocks[1][3], keys[3])
    rig.consider(record, 17, blocks)
    assert rig.hand_out() == [keys[3]]
    publish(blocks[1][1], keys[1])
    rig.consider(record, 17, blocks)
    assert rig.hand_out() == []


@pytest.mark.fault("F31", breaks="any number of bytes may be on its way")
def test_bytes_in_flight_are_bounded_and_the_rest_waits() -> None:
    rig = Rig(limit_blocks=3)
    record = rig.arrive()
    keys = keys_of(rig.geometry, record.request)
    rig.consider(record, 32, rig.blocks(record))
    assert rig.hand_out() == keys[:3]
    assert rig.hand_out() == []
    rig.planner.done([keys[1]])
    assert rig.hand_out() == [keys[3]]
    rig.planner.done(keys)
    assert rig.hand_out() == keys[4:7]


def test_a_block_above_the_limit_goes_alone() -> None:
    rig = Rig(limit_blocks=0)
    record = rig.arrive()
    keys = keys_of(rig.geometry, record.request)
    rig.consider(record, 8, rig.blocks(record))
    assert rig.hand_out() == keys[:1]
    assert rig.hand_out() == []
    rig.planner.done(keys)
    assert rig.hand_out() == keys[1:2]


def test_what_waits_is_bounded_and_a_prefix_stays() -> None:
    rig = Rig(limit_blocks=MAX_SAVES * 2)
    record = rig.arrive(num_tokens=4 * (MAX_SAVES + 3))
    keys = rig.geometry.keys_of(record.request, rig.geometry.groups[0], 0, MAX_SAVES + 3)
    rig.consider(record, record.request.num_tokens, rig.blocks(record))
    assert rig.hand_out() == keys[:MAX_SAVES]
    assert rig.skipped() == {"queue_full": 3}


def test_a_save_ends_when_every_rank_has_answered() -> None:
    rig = Rig(limit_blocks=1, world_size=2)
    record = rig.arrive()
    keys = keys_of(rig.geometry, record.request)
    rig.consider(record, 8, rig.blocks(record))
    assert rig.hand_out() == keys[:1]
    rig.planner.done(keys[:1])
    assert rig.hand_out() == []
    rig.planner.done(keys[:1])
    assert rig.hand_out() == keys[1:2]


def test_a_reset_drops_what_waits_and_not_what_is_on_its_way() -> None:
    rig = Rig(limit_blocks=2)
    record = rig.arrive()
    rig.consider(record, 32, rig.blocks(record))
    handed_out = rig.hand_out()
    rig.planner.drop_waiting()
    assert rig.planner.busy
    rig.planner.done(handed_out)
    assert not rig.planner.busy
    assert rig.hand_out() == []


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_reports_in_any_order_leave_the_books_right(data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, 3))
    rig = Rig(limit_blocks=data.draw(st.integers(0, 6)), world_size=world_size)
    record = rig.arrive()
    blocks, keys = rig.blocks(record), keys_of(rig.geometry, record.request)
    owed: list[BlockKey] = []
    for tokens in sorted(data.draw(st.lists(st.integers(0, 33), max_size=12))):
        rig.consider(record, tokens, blocks)
        new = rig.hand_out()
        assert not set(new) & set(owed)
        owed += new * world_size
        assert len(set(owed)) <= max(1, rig.limit_blocks)
        for key in data.draw(st.lists(st.sampled_from(owed or keys), unique=True)):
            if key in owed:
                owed.remove(key)
            rig.planner.done([key])
            rig.planner.check_integrity()
        rig.planner.done([BlockKey(b"nobody knows" + bytes(4))])
    while owed or rig.planner.busy:
        rig.planner.done(owed)
        owed = rig.hand_out() * world_size
    rig.planner.check_integrity()
