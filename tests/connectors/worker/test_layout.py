"""Which bytes make up a block: derived, compared with naive indexing, and proven at start."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_layout import KVCacheLayout

from connectors.groups import GroupGeometry
from connectors.stores.buffers import ByteArray
from connectors.worker.block_mover import CpuBlockMover
from connectors.worker.layout import GroupLayout, block_view, group_layout
from connectors.worker.layout_check import verify_layout
from spm.errors import LayoutError
from tests.connectors.worker.layouts import (
    BLOCKS,
    FP8,
    HEADS,
    MEMORIES,
    TOKENS,
    KvMemory,
    apart,
    geometry,
    leading,
    names,
    of_dtype,
    second,
    uniform,
)


def derive(memory: KvMemory, group: GroupGeometry) -> tuple[GroupLayout, CpuBlockMover]:
    layout = group_layout(group, memory.caches, memory.num_blocks)
    return layout, CpuBlockMover([layout])


def gather(layout: GroupLayout, block_id: int) -> bytes:
    payload = np.full(layout.payload_bytes, 0xEE, dtype=np.uint8)
    CpuBlockMover([layout]).gather(layout, [(block_id, payload)])
    return payload.tobytes()


def random_payload(size: int) -> ByteArray:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


def assert_moves_exactly_its_blocks(build: Callable[[], KvMemory]) -> None:
    memory = build()
    for group in memory.groups:
        layout, mover = derive(memory, group)
        for block_id in range(memory.num_blocks):
            expected = memory.block_bytes(group, block_id)
            assert gather(layout, block_id) == expected
            untouched, payload = build(), random_payload(layout.payload_bytes)
            untouched.write_block(group, block_id, payload.tobytes())
            mover.scatter(layout, [(block_id, payload)])
            assert memory.equals(untouched.snapshot()), "the block, and nothing but the block"
            mover.scatter(layout, [(block_id, np.frombuffer(expected, dtype=np.uint8))])
        before = memory.snapshot()
        verify_layout(group, layout, memory.caches, memory.num_blocks, mover)
        assert memory.equals(before)


@pytest.mark.parametrize("name", MEMORIES)
def test_a_block_is_exactly_the_bytes_attention_would_index(name: str) -> None:
    assert_moves_exactly_its_blocks(MEMORIES[name])


@st.composite
def strided_memories(draw: st.DrawFn) -> Callable[[], KvMemory]:
    """Any number of dimensions in any order in memory, with holes between them."""
    num_blocks = draw(st.integers(3, 6))
    inner = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    shape = (num_blocks, *inner)
    order = draw(st.permutations(range(len(shape))))
    strides, extent = [0] * len(shape), 1
    for axis in order:
        strides[axis] = extent + draw(st.sampled_from([0, 0, 3]))
        extent = strides[axis] * shape[axis]
    layers = draw(st.integers(1, 3))
    distance = extent + draw(st.sampled_from([0, 5]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32, torch.uint8, FP8]))

    def build() -> KvMemory:
        storage = torch.zeros(layers * distance, dtype=dtype)
        caches = {
            name: storage.as_strided(shape, strides, index * distance)
            for index, name in enumerate(names(count=layers))
        }
        return KvMemory((geometry(*caches),), caches, leading, num_blocks).fill()

    return build


@settings(max_examples=60, deadline=None)
@given(strided_memories())
def test_any_shape_in_any_order_with_any_holes_moves_exactly(build: Callable[[], KvMemory]) -> None:
    assert_moves_exactly_its_blocks(build)


def test_groups_over_the_same_bytes_stay_apart_by_block() -> None:
    memory = MEMORIES["vllm-hybrid-LBHNC"]()
    full, window = memory.groups
    assert len(memory.storages()) == 1
    kept = [memory.block_bytes(window, b) for b in range(BLOCKS)]
    layout, mover = derive(memory, full)
    mover.scatter(layout, [(2, random_payload(layout.payload_bytes))])
    now = [memory.block_bytes(window, b) for b in range(BLOCKS)]
    assert [b for b in range(BLOCKS) if now[b] != kept[b]] == [2]


def test_layers_of_one_storage_are_copied_together() -> None:
    memory = uniform(KVCacheLayout.LBNHC)
    layout, _ = derive(memory, memory.groups[0])
    assert [tuple(run.view.shape[:2]) for run in layout.runs] == [(3, BLOCKS)]


def test_a_group_without_layers_here_moves_nothing() -> None:
    memory = uniform(KVCacheLayout.LBNHC)
    elsewhere = geometry("another.stage")
    layout, mover = derive(memory, elsewhere)
    assert layout.payload_bytes == 0
    assert gather(layout, 1) == b""
    verify_layout(elsewhere, layout, memory.caches, BLOCKS, mover)


# --- refused with words ----------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (2, 5, 4), (4, 2, 2), (2, 2)])
def test_without_a_dimension_of_blocks_it_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="unknown layout") as refusal:
        block_view(torch.zeros(shape), 6)
    assert str(shape) in str(refusal.value)


OVERLAPPING: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "heads are one head expanded": ((6, 4, 8), (8, 0, 1)),
    "blocks are one block expanded": ((6, 4, 8), (0, 8, 1)),
    "tokens overlap": ((6, 4, 8), (64, 7, 1)),
    "blocks overlap": ((6, 4, 8), (31, 8, 1)),
    "blocks overlap between heads": ((4, 6, 8), (12, 17, 1)),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_memory_that_overlaps_itself_is_refused(name: str) -> None:
    shape, strides = OVERLAPPING[name]
    caches = {"layer": torch.zeros(400, dtype=torch.float16).as_strided(shape, strides)}
    with pytest.raises(LayoutError, match="overlaps itself"):
        group_layout(geometry("layer"), caches, shape[0])


def test_a_block_in_too_many_pieces_is_refused() -> None:
    caches = {"layer": torch.zeros(3, 5000, 2)[:, :, 0]}
    with pytest.raises(LayoutError, match="byte ranges"):
        group_layout(geometry("layer"), caches, 3)


def test_a_pool_too_small_to_be_verified_is_refused() -> None:
    memory = apart((2, TOKENS, 8), leading, num_blocks=2)
    layout, mover = derive(memory, memory.groups[0])
    with pytest.raises(LayoutError, match="too small"):
        verify_layout(memory.groups[0], layout, memory.caches, 2, mover)


# --- the digest: who may share ---------------------------------------------------------


def digest(memory: KvMemory) -> str:
    return derive(memory, memory.groups[0])[0].digest


@pytest.mark.parametrize("layout", KVCacheLayout)
def test_engines_with_more_or_fewer_blocks_share(layout: KVCacheLayout) -> None:
    assert digest(uniform(layout)) == digest(uniform(layout, num_blocks=11))


def test_engines_with_keys_and_values_apart_share_whatever_their_number_of_blocks() -> None:
    few, many = (
        apart((2, blocks, TOKENS, HEADS, 8), second, num_blocks=blocks) for blocks in (5, 9)
    )
    assert digest(few) == digest(many)


def test_the_digest_tells_orders_types_and_layers_apart() -> None:
    shape = (BLOCKS, TOKENS, TOKENS, 8)
    different = [
        apart(shape, leading),
        apart(shape, leading, (0, 2, 1, 3)),
        apart((BLOCKS, TOKENS, 8, TOKENS), leading),
        of_dtype(FP8),
        of_dtype(torch.uint8),
        MEMORIES["vllm-LBHNC"](),
        MEMORIES["vllm-LBNHC"](),
    ]
    assert len({digest(memory) for memory in different}) == len(different)
