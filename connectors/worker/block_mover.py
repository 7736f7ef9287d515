"""Copies blocks between vLLM's KV memory and host buffers: one gather or scatter across
all layers a block.

Two implementations of one small contract. On CPU a copy is a strided memcpy without
torch's thread pool, which belongs to the model. On CUDA copies run on a stream of their
own, ordered after the compute that wrote the blocks and before the compute that reuses
them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from connectors.stores.buffers import Allocator, ByteArray, allocate_pageable
from connectors.worker.layout import GroupLayout

Place = tuple[int, ByteArray]
"""A block id and the payload bytes that belong there, or come from there."""


class BlockMover(ABC):
    """Moves blocks of all groups. ``gather`` and ``fence`` belong to the worker's main
    thread; ``scatter`` and ``finish_gather`` are called from I/O threads."""

    @abstractmethod
    def gather(self, layout: GroupLayout, places: Sequence[Place]) -> object:
        """Start copying blocks out, after all compute submitted so far. The result goes
        to :meth:`finish_gather`, which must be called before the bytes are read."""

    @abstractmethod
    def finish_gather(self, ticket: object) -> None:
        """Block until the bytes of a gather are in host memory."""

    @abstractmethod
    def scatter(self, layout: GroupLayout, places: Sequence[Place]) -> None:
        """Copy blocks in, after all compute submitted before the last :meth:`fence`;
        returns when they are visible to compute submitted later."""

    @abstractmethod
    def fence(self) -> None:
        """Make compute submitted from now on wait for the gathers started so far, and
        scatters from now on wait for the compute submitted so far: it may still use the
        blocks they fill, for the requests that had them before."""

    @property
    @abstractmethod
    def allocate(self) -> Allocator:
        """How host buffers must be allocated for fast copies."""


class CpuBlockMover(BlockMover):
    """KV memory is host memory: copies are done when the call returns."""

    def __init__(self, layouts: Sequence[GroupLayout]) -> None:
        self._views = {
            layout.group: [run.view.numpy() for run in layout.runs] for layout in layouts
        }

    def gather(self, layout: GroupLayout, places: Sequence[Place]) -> object:
        for block_id, payload in places:
            for view, part in self._parts(layout, payload):
                np.copyto(part, view[:, block_id, :])
        return None

    def finish_gather(self, ticket: object) -> None:
        return

    def scatter(self, layout: GroupLayout, places: Sequence[Place]) -> None:
        for block_id, payload in places:
            for view, part in self._parts(layout, payload):
                np.copyto(view[:, block_id, :], part)

    def fence(self) -> None:
        return

    @property
    def allocate(self) -> Allocator:
        return allocate_pageable

    def _parts(self, layout: GroupLayout, payload: ByteArray) -> list[tuple[ByteArray, ByteArray]]:
        parts: list[tuple[ByteArray, ByteArray]] = []
        offset = 0
        for view in self._views[layout.group]:
            size = view.shape[0] * view.shape[2]
            part = payload[offset : offset + size].reshape(view.shape[0], view.shape[2])
            parts.append((view, part))
            offset += size
        return parts


class CudaBlockMover(BlockMover):
    """KV memory is device memory: index_select on the device, one copy a block range."""

    def __init__(self, layouts: Sequence[GroupLayout], device: torch.device) -> None:
        self._device = device
        self._save_stream = torch.cuda.Stream(device)
        self._load_stream = torch.cuda.Stream(device)

    def gather(self, layout: GroupLayout, places: Sequence[Place]) -> object:
        compute = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._save_stream):
            # Not on the compute stream, which could reuse this memory before it is read here.
            ids = self._ids(places)
            self._save_stream.wait_stream(compute)
            gathered = gather_rows(layout, ids)
            for row, (_, payload) in zip(gathered, places, strict=True):
                torch.from_numpy(payload).copy_(row, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._save_stream)
        return done, gathered

    def finish_gather(self, ticket: object) -> None:
        assert isinstance(ticket, tuple)
        ticket[0].synchronize()

    def scatter(self, layout: GroupLayout, places: Sequence[Place]) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._load_stream):
            ids = self._ids(places)
            rows = torch.empty(
                (len(places), layout.payload_bytes), dtype=torch.uint8, device=self._device
            )
            for row, (_, payload) in zip(rows, places, strict=True):
                row.copy_(torch.from_numpy(payload), non_blocking=True)
            scatter_rows(layout, ids, rows)
            self._load_stream.synchronize()

    def fence(self) -> None:
        compute = torch.cuda.current_stream(self._device)
        compute.wait_stream(self._save_stream)
        self._load_stream.wait_stream(compute)

    @property
    def allocate(self) -> Allocator:
        return allocate_pinned

    def _ids(self, places: Sequence[Place]) -> torch.Tensor:
        """Block ids on the device, in memory of the current stream, without waiting for it."""
        ids = torch.tensor([block_id for block_id, _ in places], pin_memory=True)
        return ids.to(self._device, non_blocking=True)


def gather_rows(layout: GroupLayout, ids: torch.Tensor) -> torch.Tensor:
    """``[blocks, payload_bytes]`` uint8 on the device of the KV memory."""
    if not layout.runs:
        return torch.empty((len(ids), 0), dtype=torch.uint8, device=ids.device)
    parts = [
        run.view.index_select(1, ids).movedim(1, 0).reshape(len(ids), -1) for run in layout.runs
    ]
    return torch.cat(parts, dim=1)


def scatter_rows(layout: GroupLayout, ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Inverse of :func:`gather_rows`."""
    offset = 0
    for run in layout.runs:
        part = rows[:, offset : offset + run.block_bytes]
        shaped = part.reshape(len(ids), run.view.shape[0], run.view.shape[2]).movedim(1, 0)
        run.view.index_copy_(1, ids, shaped)
        offset += run.block_bytes


def allocate_pinned(size_bytes: int) -> ByteArray:
    """Host memory that a device copies to and from without a detour."""
    try:
        tensor = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:  # what torch raises when no more memory can be pinned
        raise MemoryError(f"cannot pin {size_bytes} bytes") from error
    array: ByteArray = tensor.numpy()
    return array


def block_mover(layouts: Sequence[GroupLayout], device: torch.device) -> BlockMover:
    """The mover for the device vLLM keeps its KV on."""
    if device.type == "cpu":
        return CpuBlockMover(layouts)
    return CudaBlockMover(layouts, device)
