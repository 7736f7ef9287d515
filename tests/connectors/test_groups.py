"""Which KV cache layouts are understood, and that windows follow vLLM's own rule."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from connectors.groups import CacheGeometry, GroupGeometry, cache_geometry
from spm.errors import LayoutError
from tracker.ids import GroupId

SHAPE: dict[str, Any] = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.float16}


def full(block_size: int = 16, **more: Any) -> FullAttentionSpec:  # noqa: ANN401
    return FullAttentionSpec(block_size=block_size, **SHAPE, **more)


def window(block_size: int = 16, tokens: int = 64, **more: Any) -> SlidingWindowSpec:  # noqa: ANN401
    return SlidingWindowSpec(block_size=block_size, sliding_window=tokens, **SHAPE, **more)


def kv_cache(*groups: KVCacheSpec | KVCacheGroupSpec, **more: Any) -> KVCacheConfig:  # noqa: ANN401
    made = [
        group if isinstance(group, KVCacheGroupSpec) else KVCacheGroupSpec([f"layer.{i}"], group)
        for i, group in enumerate(groups)
    ]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=made, **more)


def vllm_config(*, dcp: int = 1, pcp: int = 1, speculative: object = None) -> Any:  # noqa: ANN401
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=dcp, prefill_context_parallel_size=pcp
        ),
        speculative_config=speculative,
    )


def geometry(*groups: KVCacheSpec | KVCacheGroupSpec, **more: Any) -> CacheGeometry:  # noqa: ANN401
    return cache_geometry(vllm_config(), kv_cache(*groups, **more))


def test_one_group_of_full_attention() -> None:
    assert geometry(full()) == CacheGeometry(
        (GroupGeometry(GroupId(0), 16, None, 0, ("layer.0",)),), hash_tokens=16, alignment_tokens=16
    )


def test_full_attention_recorded_with_a_window_needs_every_block() -> None:
    """vLLM's fallback without the hybrid manager: all blocks are kept, so all are needed."""
    assert geometry(full(sliding_window=32)).groups[0].window_tokens is None


def test_latent_attention() -> None:
    spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    assert geometry(spec).groups[0].block_tokens == 64


def test_a_hybrid_of_full_and_sliding_window() -> None:
    got = geometry(full(32), window(16, 100, extra_retained_tokens=3), hash_block_size=8)
    assert got.groups[1] == GroupGeometry(GroupId(1), 16, 100, 3, ("layer.1",))
    assert (got.hash_tokens, got.alignment_tokens) == (8, 32)
    assert geometry(full(32), window(16)).hash_tokens == 16


def test_layers_of_one_type_may_differ_in_heads() -> None:
    layers: dict[str, KVCacheSpec] = {
        "a": full(),
        "b": FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=4, dtype=torch.float16),
    }
    group = KVCacheGroupSpec(
        list(layers), UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=layers)
    )
    assert geometry(group).groups[0].layer_names == ("a", "b")


@pytest.mark.parametrize(
    "spec",
    [
        ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=32, **SHAPE),
        CrossAttentionSpec(block_size=16, **SHAPE),
        EncoderOnlyAttentionSpec(block_size=16, **SHAPE),
        SinkFullAttentionSpec(block_size=16, sink_len=4, **SHAPE),
        MambaSpec(block_size=16, shapes=((2, 4),), dtypes=(torch.float16,)),
        SlidingWindowMLASpec(block_size=16, sliding_window=64, **SHAPE),
        CircularBufferSpec(block_size=16, **SHAPE),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_other_layers_are_refused_by_name(spec: KVCacheSpec) -> None:
    with pytest.raises(LayoutError) as caught:
        geometry(full(), spec)
    assert "KV cache group 1" in str(caught.value)
    assert type(spec).__name__ in str(caught.value)
    assert "FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec" in str(caught.value)


@pytest.mark.parametrize(
    "layers", [{"a": window(tokens=64), "b": window(tokens=32)}, {"a": full(), "b": window()}]
)
def test_a_group_of_several_windows_is_refused(layers: dict[str, KVCacheSpec]) -> None:
    spec = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=layers)
    with pytest.raises(LayoutError, match="group 0 mixes windows"):
        geometry(KVCacheGroupSpec(list(layers), spec))


def test_a_model_without_kv_cache_is_refused() -> None:
    with pytest.raises(LayoutError, match="nothing to keep"):
        geometry()


def test_a_group_vllm_does_not_transfer_is_refused() -> None:
    with pytest.raises(LayoutError, match="group 0 is not stored by prefix hash"):
        geometry(KVCacheGroupSpec(["a"], full(), enable_kv_transfer=False))


def test_block_sizes_that_do_not_nest_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"\[16, 24\] .* do not nest"):
        geometry(full(16), full(24))
    assert geometry(full(8), full(16), full(32)).alignment_tokens == 32


@pytest.mark.parametrize("parallel", [{"dcp": 2}, {"pcp": 2}])
def test_context_parallelism_is_refused(parallel: dict[str, int]) -> None:
    with pytest.raises(LayoutError, match="context parallelism"):
        cache_geometry(vllm_config(**parallel), kv_cache(full()))


def test_draft_kv_that_lags_behind_is_refused_by_method() -> None:
    eagle = SimpleNamespace(method="eagle3", use_eagle=lambda: True)
    ngram = SimpleNamespace(method="ngram", use_eagle=lambda: False)
    with pytest.raises(LayoutError, match="'eagle3' keeps draft KV"):
        cache_geometry(vllm_config(speculative=eagle), kv_cache(full()))
    assert cache_geometry(vllm_config(speculative=ngram), kv_cache(full())).groups


def vllm_skipped_tokens(tokens: int, retained: int, computed: int) -> int:
    manager = SlidingWindowManager.__new__(SlidingWindowManager)
    manager.sliding_window, manager.extra_retained_tokens = tokens, retained
    return manager.get_num_skipped_tokens(computed)


@given(st.integers(1, 64), st.integers(1, 300), st.integers(0, 40), st.integers(0, 1000))
def test_the_first_needed_block_follows_vllms_window(
    block: int, tokens: int, retained: int, computed: int
) -> None:
    group = GroupGeometry(GroupId(0), block, tokens, retained, ())
    first = group.first_needed_block(computed)
    skipped = vllm_skipped_tokens(tokens, retained, computed)
    assert first * block <= skipped < (first + 1) * block, "whole skipped blocks, no others"
    assert GroupGeometry(GroupId(0), block, None, 0, ()).first_needed_block(computed) == 0


def test_windows_by_example() -> None:
    group = GroupGeometry(GroupId(0), 4, 8, 0, ())
    assert [group.first_needed_block(n) for n in (0, 7, 10, 11, 14, 15)] == [0, 0, 0, 1, 1, 2]
    kept = GroupGeometry(GroupId(0), 4, 8, 4, ())
    assert kept.first_needed_block(15) == 1
