"""The proof at start catches a layout that lies, and leaves memory as it was."""

from collections.abc import Callable, Sequence

import pytest
import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

from connectors.groups import GroupGeometry
from connectors.worker.block_mover import CpuBlockMover, Place
from connectors.worker.layout import GroupLayout, Run, group_layout
from connectors.worker.layout_check import verify_layout
from spm.errors import LayoutError
from tests.connectors.worker.layouts import (
    BLOCKS,
    HEADS,
    TOKENS,
    KvMemory,
    apart,
    geometry,
    leading,
    uniform,
)


def derive(memory: KvMemory, group: GroupGeometry) -> tuple[GroupLayout, CpuBlockMover]:
    layout = group_layout(group, memory.caches, memory.num_blocks)
    return layout, CpuBlockMover([layout])


# --- layouts that lie ------------------------------------------------------------------


def lie(runs: Sequence[torch.Tensor]) -> GroupLayout:
    return GroupLayout(geometry().group, tuple(Run(view) for view in runs), "")


def honest_views(memory: KvMemory) -> list[torch.Tensor]:
    return [run.view for run in derive(memory, memory.groups[0])[0].runs]


def keys_as_if_apart(memory: KvMemory) -> GroupLayout:
    """K and V of a block, taken for all K and then all V: mixes two blocks."""
    blocks = memory.num_blocks
    caches = {n: t.view(2, blocks, *t.shape[2:]) for n, t in memory.caches.items()}
    return group_layout(memory.groups[0], caches, blocks)


def shifted(view: torch.Tensor, by: int) -> torch.Tensor:
    count, blocks, size = view.shape
    return view.as_strided((count, blocks - 1, size), view.stride(), view.storage_offset() + by)


LIES: dict[str, Callable[[KvMemory], GroupLayout]] = {
    "a layer is left out": lambda m: lie(honest_views(m)[:-1]),
    "a layer comes twice": lambda m: lie([*honest_views(m)[:-1], honest_views(m)[0]]),
    "one layer too many": lambda m: lie([*honest_views(m), honest_views(m)[0]]),
    "off by one byte": lambda m: lie([shifted(view, 1) for view in honest_views(m)]),
    "off by one block": lambda m: lie([view[:, 1:] for view in honest_views(m)]),
    "half of every block": lambda m: lie([v[..., : v.shape[2] // 2] for v in honest_views(m)]),
    "blocks twice as large": lambda m: group_layout(m.groups[0], m.caches, m.num_blocks // 2),
    "K and V mix blocks": keys_as_if_apart,
}


@pytest.mark.parametrize("name", LIES)
@pytest.mark.fault("F9", breaks="the layout is believed")
def test_a_layout_that_lies_is_caught_and_memory_is_put_back(name: str) -> None:
    memory = apart((8, 2, TOKENS, HEADS, 8), leading, num_blocks=8)
    layout = LIES[name](memory)
    before = memory.snapshot()
    with pytest.raises(LayoutError):
        verify_layout(memory.groups[0], layout, memory.caches, 8, CpuBlockMover([layout]))
    # What a wrong layout scattered elsewhere cannot be known; the blocks written through
    # the tensors are as they were.
    storages = zip(memory.storages(), before, strict=True)
    tested = slice(0, 3 * len(before[0]) // 8)
    assert all(torch.equal(now[tested], then[tested]) for now, then in storages)


class BrokenMover(CpuBlockMover):
    """Fails as a device would."""

    def scatter(self, layout: GroupLayout, places: Sequence[Place]) -> None:
        raise RuntimeError("device lost")


def test_memory_is_put_back_when_the_device_fails() -> None:
    memory = uniform(KVCacheLayout.BLHNC)
    layout, _ = derive(memory, memory.groups[0])
    before = memory.snapshot()
    with pytest.raises(RuntimeError, match="device lost"):
        verify_layout(memory.groups[0], layout, memory.caches, BLOCKS, BrokenMover([layout]))
    assert memory.equals(before)


class CarelessMover(CpuBlockMover):
    """Writes a block, and the one beside it."""

    def __init__(self, layout: GroupLayout, beside: int) -> None:
        super().__init__([layout])
        self._beside = beside

    def scatter(self, layout: GroupLayout, places: Sequence[Place]) -> None:
        super().scatter(layout, [(b + self._beside, payload) for b, payload in places])
        super().scatter(layout, places)


@pytest.mark.parametrize("beside", [-1, 1])
def test_a_mover_that_touches_neighbours_is_caught_and_they_are_put_back(beside: int) -> None:
    memory = uniform(KVCacheLayout.LHBNC)
    layout, _ = derive(memory, memory.groups[0])
    before, mover = memory.snapshot(), CarelessMover(layout, beside)
    with pytest.raises(LayoutError, match="neighbours"):
        verify_layout(memory.groups[0], layout, memory.caches, BLOCKS, mover)
    assert memory.equals(before)


class StreamMover(CpuBlockMover):
    """Copies on a stream of its own: without a fence since the gather, what the caller
    wrote meanwhile lands after the scatter."""

    fenced = False

    def gather(self, layout: GroupLayout, places: Sequence[Place]) -> object:
        self.fenced = False
        return super().gather(layout, places)

    def fence(self) -> None:
        self.fenced = True

    def scatter(self, layout: GroupLayout, places: Sequence[Place]) -> None:
        if self.fenced:
            super().scatter(layout, places)


def test_verification_orders_its_own_writes_before_the_scatter() -> None:
    memory = uniform(KVCacheLayout.LBNHC)
    layout, _ = derive(memory, memory.groups[0])
    verify_layout(memory.groups[0], layout, memory.caches, BLOCKS, StreamMover([layout]))
