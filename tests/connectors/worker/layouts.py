"""KV memory in every layout vLLM has, filled with random bytes, and naive ways to look at
one block of it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from connectors.groups import GroupGeometry
from tracker.ids import GroupId

BLOCKS = 7
TOKENS = 4
HEADS, HEAD_SIZE, LAYERS = 2, 8, 3

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class KvMemory:
    """What a worker registers. ``block(tensor, b)`` indexes block ``b`` as attention does."""

    groups: tuple[GroupGeometry, ...]
    caches: dict[str, torch.Tensor]
    block: Callable[[torch.Tensor, int], torch.Tensor]
    num_blocks: int = BLOCKS

    def fill(self, seed: int = 0) -> "KvMemory":
        """Random bytes everywhere, paddings and other groups included."""
        generator = torch.Generator().manual_seed(seed)
        for storage in self.storages():
            storage.random_(0, 256, generator=generator)
        return self

    def storages(self) -> list[torch.Tensor]:
        """All bytes of each storage once."""
        found = {t.untyped_storage().data_ptr(): t for t in self.caches.values()}
        empty = torch.empty(0, dtype=torch.uint8)
        return [empty.clone().set_(t.untyped_storage()) for t in found.values()]

    def snapshot(self) -> list[torch.Tensor]:
        """A copy of everything."""
        return [storage.clone() for storage in self.storages()]

    def equals(self, snapshot: Iterable[torch.Tensor]) -> bool:
        """Whether every byte is as it was."""
        pairs = zip(self.storages(), snapshot, strict=True)
        return all(torch.equal(now, then) for now, then in pairs)

    def block_bytes(self, group: GroupGeometry, block_id: int) -> bytes:
        """One block over all layers, each layer in the order of its memory."""
        return b"".join(_bytes_of(part) for part in self._blocks(group, block_id))

    def write_block(self, group: GroupGeometry, block_id: int, payload: bytes) -> None:
        """Inverse of :meth:`block_bytes`, through the tensors."""
        at = 0
        for part in self._blocks(group, block_id):
            size = part.numel() * part.element_size()
            raw = torch.frombuffer(bytearray(payload[at : at + size]), dtype=torch.uint8)
            part.copy_(raw.view(part.dtype).reshape(part.shape))
            at += size

    def _blocks(self, group: GroupGeometry, block_id: int) -> Iterator[torch.Tensor]:
        for name in group.layer_names:
            block = self.block(self.caches[name], block_id)
            axes = sorted(range(block.dim()), key=block.stride, reverse=True)
            yield block.permute(axes)


def _bytes_of(part: torch.Tensor) -> bytes:
    dense = torch.empty(part.numel(), dtype=part.dtype)
    dense.view(part.shape).copy_(part)
    return dense.view(torch.uint8).numpy().tobytes()


def geometry(*names: str, group: int = 0) -> GroupGeometry:
    """A group of full-attention layers."""
    return GroupGeometry(GroupId(group), TOKENS, None, 0, names)


def leading(tensor: torch.Tensor, block_id: int) -> torch.Tensor:
    """``[blocks, ...]``"""
    return tensor[block_id]


def leading_pairs(tensor: torch.Tensor, block_id: int) -> torch.Tensor:
    """``[2 * blocks, ...]``: two kernel blocks a block."""
    return tensor[2 * block_id : 2 * block_id + 2]


def second(tensor: torch.Tensor, block_id: int) -> torch.Tensor:
    """``[2, blocks, ...]``"""
    return tensor[:, block_id]


def second_pairs(tensor: torch.Tensor, block_id: int) -> torch.Tensor:
    """``[2, 2 * blocks, ...]``"""
    return tensor[:, 2 * block_id : 2 * block_id + 2]


def from_vllm(
    layout: KVCacheLayout,
    groups: list[KVCacheGroupSpec],
    kernel_tokens: int | None = None,
    num_blocks: int = BLOCKS,
) -> KvMemory:
    """Memory placed and viewed by vLLM's own code."""
    config: Any = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=num_blocks,
            prefix_cache_retention_interval=None,
        ),
    )
    placed = get_kv_cache_config_from_groups(config, groups, 1 << 24)
    sizes = [kernel_tokens] * len(groups) if kernel_tokens is not None else None
    caches = allocate_kv_cache(placed, torch.device("cpu"), layout, sizes)
    geometries = tuple(geometry(*g.layer_names, group=i) for i, g in enumerate(groups))
    block = leading_pairs if kernel_tokens is not None else leading
    return KvMemory(geometries, caches, block, num_blocks).fill()


def attention(dtype: torch.dtype = torch.bfloat16, head_size: int = HEAD_SIZE) -> AttentionSpec:
    """Full attention, K and V fused in the last dimension."""
    return FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=head_size, dtype=dtype
    )


def names(prefix: str = "layer", count: int = LAYERS) -> list[str]:
    return [f"{prefix}.{index}" for index in range(count)]


def uniform(layout: KVCacheLayout, **kwargs: int) -> KvMemory:
    """One group of equal layers."""
    return from_vllm(layout, [KVCacheGroupSpec(names(), attention())], **kwargs)


def of_dtype(dtype: torch.dtype) -> KvMemory:
    group = KVCacheGroupSpec(names(), attention(dtype))
    return from_vllm(KVCacheLayout.LBNHC, [group])


def hybrid(layout: KVCacheLayout) -> KvMemory:
    """Two groups over the same bytes, as vLLM places hybrid models."""
    window = SlidingWindowSpec(
        block_size=TOKENS,
        num_kv_heads=HEADS,
        head_size=HEAD_SIZE,
        dtype=torch.bfloat16,
        sliding_window=8,
    )
    return from_vllm(
        layout,
        [
            KVCacheGroupSpec(names("full"), attention()),
            KVCacheGroupSpec(names("window", LAYERS - 1), window),
        ],
    )


def mixed() -> KvMemory:
    """Layers of different types and sizes in one group."""
    specs = {
        "half": attention(),
        "quantized": attention(FP8),
        "wide": attention(torch.float32, 16),
        "raw": attention(torch.uint8),
    }
    spec = UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=dict(specs))
    return from_vllm(KVCacheLayout.BLNHC, [KVCacheGroupSpec(list(specs), spec)])


def latent() -> KvMemory:
    """Multi-head latent attention: one vector a token."""
    spec = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)
    return from_vllm(KVCacheLayout.LBNHC, [KVCacheGroupSpec(names(), spec)])


def padded() -> KvMemory:
    """Pages larger than what a layer puts into them."""
    spec = FullAttentionSpec(
        block_size=TOKENS,
        num_kv_heads=HEADS,
        head_size=HEAD_SIZE,
        dtype=torch.bfloat16,
        page_size_padded=320,
    )
    return from_vllm(KVCacheLayout.LBNHC, [KVCacheGroupSpec(names(), spec)])


def apart(
    shape: tuple[int, ...],
    block: Callable[[torch.Tensor, int], torch.Tensor],
    permutation: tuple[int, ...] | None = None,
    num_blocks: int = BLOCKS,
) -> KvMemory:
    """Each layer a storage of its own, ``shape`` permuted as older backends do."""
    order = permutation or tuple(range(len(shape)))
    caches = {n: torch.zeros(shape, dtype=torch.bfloat16).permute(order) for n in names()}
    return KvMemory((geometry(*caches),), caches, block, num_blocks).fill()


def packed() -> KvMemory:
    """``[blocks, layers, ...]`` in one tensor, a layer a slice of it."""
    whole = torch.zeros((BLOCKS, LAYERS, 2, TOKENS, HEADS, HEAD_SIZE), dtype=torch.bfloat16)
    caches = {name: whole[:, index] for index, name in enumerate(names())}
    return KvMemory((geometry(*caches),), caches, leading).fill()


MEMORIES: dict[str, Callable[[], KvMemory]] = {
    **{f"vllm-{layout.name}": partial(uniform, layout) for layout in KVCacheLayout},
    "vllm-kernel-blocks-LBHNC": lambda: uniform(KVCacheLayout.LBHNC, kernel_tokens=2),
    "vllm-kernel-blocks-LBNHC": lambda: uniform(KVCacheLayout.LBNHC, kernel_tokens=2),
    "vllm-hybrid-LBHNC": lambda: hybrid(KVCacheLayout.LBHNC),
    "vllm-hybrid-BLNHC": lambda: hybrid(KVCacheLayout.BLNHC),
    "vllm-mla": latent,
    "vllm-padded": padded,
    "vllm-mixed-dtypes": mixed,
    "vllm-fp8": lambda: of_dtype(FP8),
    "vllm-uint8": lambda: of_dtype(torch.uint8),
    "vllm-float32": lambda: of_dtype(torch.float32),
    "kv-apart-NHD": lambda: apart((2, BLOCKS, TOKENS, HEADS, HEAD_SIZE), second),
    "kv-apart-HND": lambda: apart((2, BLOCKS, HEADS, TOKENS, HEAD_SIZE), second, (0, 1, 3, 2, 4)),
    "kv-apart-kernel-blocks": lambda: apart((2, 2 * BLOCKS, 2, HEADS, HEAD_SIZE), second_pairs),
    "kv-in-block": lambda: apart((BLOCKS, 2, TOKENS, HEADS, HEAD_SIZE), leading),
    "kv-in-block-HND": lambda: apart(
        (BLOCKS, 2, HEADS, TOKENS, HEAD_SIZE), leading, (0, 1, 3, 2, 4)
    ),
    "kv-in-block-kernel-blocks": lambda: apart((2 * BLOCKS, 2, 2, HEADS, HEAD_SIZE), leading_pairs),
    "blocks-inside-heads": lambda: apart(
        (HEADS, BLOCKS, TOKENS, 2 * HEAD_SIZE), leading, (1, 0, 2, 3)
    ),
    "mla": lambda: apart((BLOCKS, TOKENS, 24), leading),
    "packed": packed,
}
"""Fresh memory by name; the same bytes every time."""
