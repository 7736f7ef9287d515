"""Proof at start that the derived layout is the real one: one block, out and in again.

Runs before any request, on block 1 (block 0 is vLLM's null block), through the tensors
as the attention backend indexes them. What was there is put back.
"""

from collections.abc import Mapping

import numpy as np
import torch

from connectors.groups import GroupGeometry
from connectors.worker.block_mover import BlockMover
from connectors.worker.layout import GroupLayout, block_view
from spm.errors import LayoutError

_TESTED_BLOCK = 1


def verify_layout(
    geometry: GroupGeometry,
    layout: GroupLayout,
    kv_caches: Mapping[str, torch.Tensor],
    num_blocks: int,
    mover: BlockMover,
) -> None:
    """Raise :class:`LayoutError` unless a round trip restores every byte of every layer
    and leaves the neighbouring blocks alone."""
    views = [
        block_view(kv_caches[name], num_blocks)
        for name in geometry.layer_names
        if name in kv_caches
    ]
    if not views:
        return
    if num_blocks < 3:
        raise LayoutError(f"a pool of {num_blocks} blocks is too small to verify its layout")
    around = slice(_TESTED_BLOCK - 1, _TESTED_BLOCK + 2)
    before = [view[around].clone() for view in views]
    try:
        _round_trip(layout, views, mover)
    finally:
        for view, saved in zip(views, before, strict=True):
            view[around] = saved


def _round_trip(layout: GroupLayout, views: list[torch.Tensor], mover: BlockMover) -> None:
    generator = torch.Generator().manual_seed(layout.payload_bytes)
    patterns = [_random_like(view[0], generator) for view in views]
    for view, pattern in zip(views, patterns, strict=True):
        view[_TESTED_BLOCK - 1] = 0
        view[_TESTED_BLOCK] = pattern
        view[_TESTED_BLOCK + 1] = 0
    payload = mover.allocate(layout.payload_bytes)
    payload.fill(0)
    mover.finish_gather(mover.gather(layout, [(_TESTED_BLOCK, payload)]))
    total = sum(pattern.numel() * pattern.element_size() for pattern in patterns)
    if total != layout.payload_bytes:
        raise LayoutError(f"a block has {total} bytes but the layout moves {layout.payload_bytes}")
    for view in views:
        view[_TESTED_BLOCK] = 0
    mover.fence()  # or the zeros, written on the compute stream, could land after the scatter
    mover.scatter(layout, [(_TESTED_BLOCK, np.array(payload))])
    for index, (view, pattern) in enumerate(zip(views, patterns, strict=True)):
        if not torch.equal(_bytes(view[_TESTED_BLOCK]), _bytes(pattern)):
            raise LayoutError(f"layer {index}: a block's round trip changed its bytes")
        if _bytes(view[_TESTED_BLOCK - 1]).any() or _bytes(view[_TESTED_BLOCK + 1]).any():
            raise LayoutError(f"layer {index}: a block's round trip touched its neighbours")


def _random_like(block: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random bytes in the shape and type of one block; every bit pattern may occur."""
    size = block.numel() * block.element_size()
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(block.dtype).reshape(block.shape).to(block.device)


def _bytes(block: torch.Tensor) -> torch.Tensor:
    dense = block.clone(memory_format=torch.contiguous_format)
    return dense.view(-1).view(torch.uint8)
