"""Where the bytes of a block are in vLLM's KV tensors, derived and then proven.

vLLM may keep K and V separate or fused, heads before or after tokens, layers apart or
packed, one latent vector instead of K and V. None of that is assumed: from shape and
strides of each layer's tensor we compute the byte ranges that make up one block, and
:func:`connectors.worker.layout_check.verify_layout` then moves one block out and in and
compares through the tensors as the attention backend indexes them.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from connectors.groups import GroupGeometry
from spm.errors import LayoutError
from tracker.ids import GroupId

_MAX_SEGMENTS_PER_LAYER = 4096


@dataclass(frozen=True, slots=True)
class Segment:
    """One contiguous byte range of block 0; block ``b`` is ``b * block_stride`` further."""

    storage: int
    """Address of the storage, to tell whether segments can share a view."""
    offset: int
    size: int
    block_stride: int


@dataclass(frozen=True, slots=True)
class Run:
    """Segments at a constant distance in one storage: a ``[segments, blocks, bytes]`` view."""

    view: torch.Tensor
    """uint8, shape ``[count, num_blocks, size]``, aliasing vLLM's KV memory."""

    @property
    def block_bytes(self) -> int:
        """Bytes this run contributes to one block."""
        return int(self.view.shape[0] * self.view.shape[2])


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """All bytes of one group's blocks on this rank, in the order they are stored."""

    group: GroupId
    runs: tuple[Run, ...]
    digest: str

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block over all layers of the group; 0 without layers on this rank."""
        return sum(run.block_bytes for run in self.runs)


def block_view(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """The layer's tensor with vLLM's manager blocks as dimension 0.

    Accepts ``[blocks, ...]``, kernel blocks that divide manager blocks evenly, and
    ``[2, blocks, ...]`` (K and V apart). Raises :class:`LayoutError` otherwise.
    """
    shape = tuple(tensor.shape)
    if shape and shape[0] >= num_blocks and shape[0] % num_blocks == 0:
        return tensor if shape[0] == num_blocks else tensor.unflatten(0, (num_blocks, -1))
    if len(shape) > 1 and shape[0] == 2 and shape[1] % num_blocks == 0:
        moved = tensor.movedim(1, 0)
        return moved if shape[1] == num_blocks else moved.unflatten(0, (num_blocks, -1))
    raise LayoutError(
        f"KV tensor of shape {shape} has no dimension of {num_blocks} blocks: unknown layout"
    )


def group_layout(
    geometry: GroupGeometry, kv_caches: Mapping[str, torch.Tensor], num_blocks: int
) -> GroupLayout:
    """Derive the layout of one group from the tensors vLLM registered on this rank."""
    segments: list[Segment] = []
    views: list[torch.Tensor] = []
    digest = hashlib.sha256()
    for name in geometry.layer_names:
        if name not in kv_caches:
            continue  # another pipeline stage's layer, or one that shares this rank's KV
        view = block_view(kv_caches[name], num_blocks)
        _refuse_overlap(view)
        digest.update(f"{name} {view.dtype} {_memory_order(view)};".encode())
        views.append(view)
        segments.extend(_segments(view))
    return GroupLayout(
        geometry.group, tuple(_runs(segments, views, num_blocks)), digest.hexdigest()
    )


def _refuse_overlap(view: torch.Tensor) -> None:
    """Raise :class:`LayoutError` if two elements may share memory, as in expanded tensors."""
    extent = 1
    dims = zip(view.stride(), view.shape, strict=True)
    for stride, size in sorted(dim for dim in dims if dim[1] > 1):
        if stride < extent:
            raise LayoutError(
                f"KV tensor of shape {tuple(view.shape)} with strides {view.stride()} overlaps "
                "itself: unknown layout"
            )
        extent += stride * (size - 1)


def _memory_order(view: torch.Tensor) -> list[tuple[int, int]]:
    """Axes of a block and their sizes, outermost in memory first: what the order of a
    payload's bytes depends on. Strides would also tell the number of blocks, in which
    engines that share a store may differ."""
    axes = [axis for axis in range(1, view.dim()) if view.shape[axis] > 1]
    axes.sort(key=view.stride, reverse=True)
    return [(axis, int(view.shape[axis])) for axis in axes]


def _segments(view: torch.Tensor) -> list[Segment]:
    """Byte ranges of block 0, in memory order."""
    width = view.element_size()
    dims = [
        (size, stride * width)
        for size, stride in zip(view.shape[1:], view.stride()[1:], strict=True)
        if size > 1
    ]
    dims.sort(key=lambda dim: dim[1])
    dense = width
    while dims and dims[0][1] == dense:
        dense *= dims.pop(0)[0]
    offsets = [view.storage_offset() * width]
    for size, stride in dims:
        offsets = [base + index * stride for base in offsets for index in range(size)]
        if len(offsets) > _MAX_SEGMENTS_PER_LAYER:
            raise LayoutError(
                f"a block of shape {tuple(view.shape[1:])} is scattered over more than "
                f"{_MAX_SEGMENTS_PER_LAYER} byte ranges: unknown layout"
            )
    storage = view.untyped_storage().data_ptr()
    block_stride = int(view.stride(0)) * width
    return [Segment(storage, int(at), int(dense), block_stride) for at in sorted(offsets)]


def _runs(
    segments: Sequence[Segment], views: Iterable[torch.Tensor], num_blocks: int
) -> Iterable[Run]:
    """Merge neighbours at a constant distance, so that layers are copied together."""
    storages = {view.untyped_storage().data_ptr(): view for view in views}
    start = 0
    while start < len(segments):
        stop, step = start + 1, 0
        while stop < len(segments) and _extends(segments, start, stop, step):
            step = segments[stop].offset - segments[stop - 1].offset
            stop += 1
        first = segments[start]
        source = storages[first.storage]
        yield Run(
            torch.empty(0, dtype=torch.uint8, device=source.device).set_(
                source.untyped_storage(),
                first.offset,
                (stop - start, num_blocks, first.size),
                (step or first.size, first.block_stride, 1),
            )
        )
        start = stop


def _extends(segments: Sequence[Segment], start: int, stop: int, step: int) -> bool:
    """Whether ``segments[stop]`` continues the run that begins at ``start``."""
    first, previous, following = segments[start], segments[stop - 1], segments[stop]
    same = (first.storage, first.size, first.block_stride) == (
        following.storage,
        following.size,
        following.block_stride,
    )
    distance = following.offset - previous.offset
    return same and distance > 0 and (stop == start + 1 or distance == step)
