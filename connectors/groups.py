"""KV cache groups as the connector sees them, and the models it refuses, with words."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from connectors.weights import AdapterIdentities
from spm.errors import LayoutError
from tracker.ids import BlockHash, BlockKey, GroupId, make_block_key, split_block_key

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_SUPPORTED_SPECS = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One KV cache group: which tokens one of its blocks covers and which it still needs."""

    group: GroupId
    block_tokens: int
    window_tokens: int | None
    """Sliding window; ``None``: every earlier token is attended to."""
    retained_tokens: int
    """Tokens vLLM keeps below the window."""
    layer_names: tuple[str, ...]

    def first_needed_block(self, computed_tokens: int) -> int:
        """Index of the first block attended to when ``computed_tokens`` are done.

        The same rule as vLLM's ``SlidingWindowManager.get_num_skipped_tokens``.
        """
        if self.window_tokens is None:
            return 0
        skipped = computed_tokens - self.window_tokens + 1 - self.retained_tokens
        return max(0, skipped) // self.block_tokens


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """All groups of an engine."""

    groups: tuple[GroupGeometry, ...]
    hash_tokens: int
    """Tokens one of a request's block hashes covers."""
    alignment_tokens: int
    """vLLM's scheduler block size: hits are multiples of it."""
    adapters: AdapterIdentities = field(default_factory=AdapterIdentities, compare=False)

    @property
    def scales(self) -> list[int]:
        """By group, its blocks in one logical block, which is as long as the alignment."""
        return [self.alignment_tokens // group.block_tokens for group in self.groups]

    @property
    def has_windows(self) -> bool:
        """Whether some group attends to a sliding window only."""
        return any(group.window_tokens is not None for group in self.groups)

    @property
    def keeps_prefix_of_failed_load(self) -> bool:
        """Whether the blocks before the first failed one are enough to go on from there.

        Not below a sliding window, where they were never loaded, and not with several
        groups, whose failures vLLM takes by request and not by block.
        """
        return len(self.groups) == 1 and self.groups[0].window_tokens is None

    def published_keys(
        self, request: "Request", group: GroupGeometry, start: int, stop: int
    ) -> list[BlockKey]:
        """Keys under which vLLM publishes blocks ``start..stop``, as far as hashes exist."""
        hashes = resolve_block_hashes(request.block_hashes, self.hash_tokens, group.block_tokens)
        stop = min(stop, len(hashes))
        return [make_block_key(BlockHash(hashes[i]), group.group) for i in range(start, stop)]

    def keys_of(
        self, request: "Request", group: GroupGeometry, start: int, stop: int
    ) -> list[BlockKey]:
        """Keys under which we store the same blocks: with an adapter, salted by its weights."""
        keys = self.published_keys(request, group, start, stop)
        salt = self.adapters.salt(request.lora_request)
        return [_salted(key, salt) for key in keys] if salt else keys


def _salted(key: BlockKey, salt: bytes) -> BlockKey:
    block_hash, group = split_block_key(key)
    return make_block_key(BlockHash(hashlib.sha256(block_hash + salt).digest()), group)


def cache_geometry(vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig) -> CacheGeometry:
    """Read the groups; raise :class:`LayoutError` for what cannot be moved safely."""
    _refuse_unsupported_parallelism(vllm_config)
    groups = tuple(
        _geometry(GroupId(index), group.layer_names, group.kv_cache_spec)
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
    )
    if not groups:
        raise LayoutError("the model has no KV cache: there is nothing to keep")
    for index, spec_group in enumerate(kv_cache_config.kv_cache_groups):
        if not spec_group.enable_kv_transfer or not spec_group.kv_cache_spec.prefix_cacheable:
            raise LayoutError(f"KV cache group {index} is not stored by prefix hash in vLLM")
    block_sizes = [group.block_tokens for group in groups]
    alignment = max(block_sizes)
    if any(alignment % size for size in block_sizes):
        raise LayoutError(f"block sizes {block_sizes} of the KV cache groups do not nest")
    hash_tokens = kv_cache_config.hash_block_size or min(block_sizes)
    if any(size % hash_tokens for size in block_sizes):
        raise LayoutError(f"blocks of {block_sizes} tokens are hashed by {hash_tokens} tokens")
    return CacheGeometry(groups, hash_tokens, alignment)


def block_geometry(kv_cache_config: KVCacheConfig) -> CacheGeometry:
    """Block sizes and windows by group: enough to count blocks, not to move them."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    sizes = [spec.block_size for spec in specs]
    windows = [getattr(spec, "sliding_window", None) for spec in specs]
    groups = tuple(
        GroupGeometry(GroupId(index), size, window, 0, ())
        for index, (size, window) in enumerate(zip(sizes, windows, strict=True))
    )
    smallest, largest = min(sizes, default=1), max(sizes, default=1)
    return CacheGeometry(groups, kv_cache_config.hash_block_size or smallest, largest)


def _refuse_unsupported_parallelism(vllm_config: "VllmConfig") -> None:
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise LayoutError("context parallelism splits a block over ranks: not supported")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.use_eagle():
        raise LayoutError(
            f"speculative decoding with {speculative.method!r} keeps draft KV that lags behind "
            "the block hash: not supported"
        )


def _geometry(group: GroupId, layer_names: Sequence[str], spec: KVCacheSpec) -> GroupGeometry:
    layer_specs = list(iter_layer_specs(spec))
    for layer_spec in layer_specs:
        if type(layer_spec) not in _SUPPORTED_SPECS:
            raise LayoutError(
                f"KV cache group {group} holds {type(layer_spec).__name__} layers; supported: "
                f"{', '.join(cls.__name__ for cls in _SUPPORTED_SPECS)}"
            )
    windows = {
        (s.sliding_window, s.extra_retained_tokens) if isinstance(s, SlidingWindowSpec) else None
        for s in layer_specs
    }
    sizes = {s.block_size for s in layer_specs}
    if len(windows) != 1 or len(sizes) != 1:
        raise LayoutError(f"KV cache group {group} mixes windows {windows} or blocks {sizes}")
    window = windows.pop()
    tokens, retained = window if window is not None else (None, 0)
    return GroupGeometry(group, sizes.pop(), tokens, retained, tuple(layer_names))
