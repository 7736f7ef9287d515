"""LMCache's in-process connector between its memory and vLLM's pool, for the KV layout of vLLM
on CPUs, which LMCache has none for. See :mod:`tests.e2e.lmcache_on_cpu`.

A layer is ``[blocks, heads, tokens of a block, keys and values]`` there; LMCache's memory is
``[keys or values, layers, tokens, heads and their sizes]``.
"""

from typing import Any

import torch
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface


class FusedCpuConnector(GPUConnectorInterface):  # type: ignore[misc]
    """Worker's main thread, as LMCache calls it."""

    def __init__(self, kv_shape: tuple[int, ...]) -> None:
        """``kv_shape``: layers, 2, tokens of a chunk, heads, head size."""
        self._layers, _, _, heads, head_size = kv_shape
        self._hidden = heads * head_size

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, self._layers, num_tokens, self._hidden])

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:  # noqa: ANN401
        for at, cache, blocks, offsets in _layers(start, end, kwargs):
            values = cache[blocks, :, offsets]
            for part, half in enumerate(values.chunk(2, dim=-1)):
                memory_obj.tensor[part, at] = half.reshape(end - start, self._hidden)

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:  # noqa: ANN401
        skipped = min(end, max(start, kwargs.get("vllm_cached_tokens", 0)))
        for at, cache, blocks, offsets in _layers(skipped, end, kwargs):
            stored = memory_obj.tensor[:, at, skipped - start :]
            halves = [half.reshape(end - skipped, cache.shape[1], -1) for half in stored]
            cache[blocks, :, offsets] = torch.cat(halves, dim=-1)

    def batched_from_gpu(
        self,
        memory_objs: Any,  # noqa: ANN401
        starts: list[int],
        ends: list[int],
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(one, start, end, **kwargs)

    def batched_to_gpu(
        self,
        memory_objs: Any = None,  # noqa: ANN401
        starts: list[int] | None = None,
        ends: list[int] | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        for one, start, end in zip(memory_objs, starts or (), ends or (), strict=True):
            self.to_gpu(one, start, end, **kwargs)


def _layers(start: int, end: int, how: dict[str, Any]) -> Any:  # noqa: ANN401
    """Each layer's number, its blocks, and where in them tokens ``start`` to ``end`` are."""
    slots = how["slot_mapping"][start:end]
    for at, cache in enumerate(how["kvcaches"]):
        yield at, cache, slots // cache.shape[2], slots % cache.shape[2]


def create(config: Any, metadata: Any, *_: object, **__: object) -> FusedCpuConnector:  # noqa: ANN401
    """In place of :func:`lmcache.v1.gpu_connector.CreateGPUConnector`."""
    return FusedCpuConnector(metadata.kv_shape)
