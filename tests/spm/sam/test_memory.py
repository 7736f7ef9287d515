"""Constant memory a block and a pair of session and block, measured."""

import gc
import sys
import tracemalloc
from array import array
from collections.abc import Iterator

import pytest

from spm.sam.block_table import BlockTable
from tests.spm.sam.kit import Rig, ref_of, ttl

NUM_BLOCKS = 2001
PATH = range(NUM_BLOCKS - 1)


@pytest.fixture
def traced() -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    yield
    tracemalloc.stop()


def table_bytes(table: BlockTable) -> int:
    """Of every array and list of the table that has an entry a block."""
    columns = [
        value
        for value in vars(table).values()
        if isinstance(value, (array, bytearray, list)) and len(value) == NUM_BLOCKS
    ]
    assert len(columns) >= 3, "blocks, holders, owners"
    return sum(map(sys.getsizeof, columns)) - sys.getsizeof(table.blocks)


def test_the_table_takes_at_most_120_bytes_a_block() -> None:
    rig = Rig(NUM_BLOCKS)
    empty = table_bytes(rig.table)
    rig.turn(ref_of("a"), ttl(60), *PATH)
    owners = {id(owner): sys.getsizeof(owner) for owner in rig.table.owners if owner is not None}
    assert table_bytes(rig.table) == empty
    assert (empty + sum(owners.values())) / NUM_BLOCKS <= 120


def pair_bytes(rig: Rig, sessions: int, *, apart: bool) -> float:
    """Bytes a pair of session and block, the blocks' own claims included. ``apart``: each
    session makes another claim."""
    running = [rig.start(*PATH) for _ in range(sessions)]
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for n, one in enumerate(running):
        seconds = 60.0 + n if apart else 60.0
        rig.sam.finished(ref_of(str(n)), ttl(seconds), one.arrived_s, [one.blocks])
    gc.collect()
    return (tracemalloc.get_traced_memory()[0] - before) / (sessions * len(PATH))


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("sessions", [1, 2, 3, 16])
@pytest.mark.parametrize("apart", [False, True])
def test_a_pair_takes_at_most_200_bytes(sessions: int, apart: bool) -> None:
    rig = Rig(NUM_BLOCKS)
    assert pair_bytes(rig, sessions, apart=apart) <= 200


def test_memory_does_not_grow_with_the_number_of_turns() -> None:
    rig = Rig(64, max_records=200)

    def turns(count: int) -> None:
        for n in range(count):
            rig.turn(ref_of(str(n % 7)), ttl(30.0 + n % 5), 1, 2, n % 11)
            rig.after(1.5)

    turns(200)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        turns(400)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(rig.segments()) < 100
    assert grown < 64 << 10
