"""The two ways to copy blocks are one: strided memcpy on the host, index_select on a device
(whose arithmetic also runs on the host)."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.stores.buffers import ByteArray
from connectors.worker.block_mover import (
    BlockMover,
    CpuBlockMover,
    allocate_pinned,
    block_mover,
    gather_rows,
    scatter_rows,
)
from connectors.worker.layout import GroupLayout, group_layout
from connectors.worker.layout_check import verify_layout
from tests.connectors.worker.layouts import BLOCKS, MEMORIES, KvMemory, geometry

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def layouts_of(memory: KvMemory) -> list[GroupLayout]:
    return [group_layout(group, memory.caches, memory.num_blocks) for group in memory.groups]


def random_rows(count: int, size: int) -> ByteArray:
    return np.random.default_rng(size).integers(0, 256, (count, size), dtype=np.uint8)


def gathered(mover: BlockMover, layout: GroupLayout, ids: Sequence[int]) -> ByteArray:
    rows = np.zeros((len(ids), layout.payload_bytes), dtype=np.uint8)
    mover.finish_gather(mover.gather(layout, list(zip(ids, rows, strict=True))))
    return rows


@pytest.mark.parametrize("name", MEMORIES)
def test_both_gathers_give_the_same_bytes_in_any_order(name: str) -> None:
    memory = MEMORIES[name]()
    ids = [*range(BLOCKS), 3, 3]
    random.Random(name).shuffle(ids)
    for group, layout in zip(memory.groups, layouts_of(memory), strict=True):
        by_host = gathered(CpuBlockMover([layout]), layout, ids)
        by_device = gather_rows(layout, torch.tensor(ids)).numpy()
        assert np.array_equal(by_host, by_device)
        assert [row.tobytes() for row in by_host] == [memory.block_bytes(group, i) for i in ids]


@pytest.mark.parametrize("name", MEMORIES)
def test_both_scatters_change_the_same_bytes(name: str) -> None:
    host, device = MEMORIES[name](), MEMORIES[name]()
    ids = random.Random(name).sample(range(BLOCKS), 4)
    for here, there in zip(layouts_of(host), layouts_of(device), strict=True):
        rows = random_rows(len(ids), here.payload_bytes)
        CpuBlockMover([here]).scatter(here, list(zip(ids, rows, strict=True)))
        scatter_rows(there, torch.tensor(ids), torch.from_numpy(rows))
    assert host.equals(device.snapshot())
    assert not host.equals(MEMORIES[name]().snapshot())


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(MEMORIES)), st.permutations(range(BLOCKS)), st.integers(1, BLOCKS))
def test_blocks_moved_out_and_in_elsewhere_are_copies(
    name: str, order: list[int], count: int
) -> None:
    memory = MEMORIES[name]()
    sources, targets = order[:count], list(reversed(order))[:count]
    for group, layout in zip(memory.groups, layouts_of(memory), strict=True):
        mover = CpuBlockMover([layout])
        was = [memory.block_bytes(group, b) for b in range(BLOCKS)]
        rows = gathered(mover, layout, sources)
        mover.scatter(layout, list(zip(targets, rows, strict=True)))
        moved = dict(zip(targets, sources, strict=True))
        expected = [was[moved.get(b, b)] for b in range(BLOCKS)]
        assert [memory.block_bytes(group, b) for b in range(BLOCKS)] == expected


def test_a_block_outside_the_pool_is_an_error_and_writes_nothing() -> None:
    memory = MEMORIES["vllm-LBNHC"]()
    (layout,) = layouts_of(memory)
    before = memory.snapshot()
    payload = np.zeros(layout.payload_bytes, dtype=np.uint8)
    with pytest.raises(IndexError):
        CpuBlockMover([layout]).scatter(layout, [(BLOCKS, payload)])
    assert memory.equals(before)


def test_a_group_without_layers_moves_empty_rows() -> None:
    layout = group_layout(geometry("elsewhere"), {}, BLOCKS)
    assert gather_rows(layout, torch.tensor([1, 2])).shape == (2, 0)
    scatter_rows(layout, torch.tensor([1, 2]), torch.empty((2, 0), dtype=torch.uint8))


def test_host_memory_gets_the_host_mover() -> None:
    mover = block_mover([], torch.device("cpu"))
    assert isinstance(mover, CpuBlockMover)
    assert mover.allocate(10).nbytes == 10


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned here")
def test_memory_that_cannot_be_pinned_is_out_of_memory() -> None:
    with pytest.raises(MemoryError):
        allocate_pinned(10)


@needs_cuda
@pytest.mark.parametrize("name", ["vllm-LBNHC", "vllm-hybrid-BLNHC", "kv-apart-HND"])
def test_on_a_device_blocks_arrive_as_on_the_host(name: str) -> None:
    memory, device = MEMORIES[name](), torch.device("cuda")
    bytes_of = {
        storage.untyped_storage().data_ptr(): storage.to(device) for storage in memory.storages()
    }
    caches = {
        key: bytes_of[t.untyped_storage().data_ptr()]
        .view(t.dtype)
        .as_strided(t.shape, t.stride(), t.storage_offset())
        for key, t in memory.caches.items()
    }
    for group, here in zip(memory.groups, layouts_of(memory), strict=True):
        there = group_layout(group, caches, BLOCKS)
        mover = block_mover([there], device)
        verify_layout(group, there, caches, BLOCKS, mover)
        ids = [5, 1, 3]
        expected = gathered(CpuBlockMover([here]), here, ids)
        assert np.array_equal(gathered(mover, there, ids), expected)
        mover.fence()
        mover.scatter(there, list(zip([2, 4, 6], expected, strict=True)))
        assert np.array_equal(gathered(mover, there, [2, 4, 6]), expected)
