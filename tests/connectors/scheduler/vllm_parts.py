"""Real vLLM configurations, schedulers' inputs and requests, made by hand and tiny."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_hints import KvHintsEnvelope
from vllm.v1.request import Request

VOCAB = 199
MAX_MODEL_LEN = 192
kv_cache_utils.init_none_hash(sha256)


@dataclass(frozen=True)
class Attention:
    """One KV cache group: block size and, for a sliding window, its width, in tokens."""

    block_tokens: int
    window: int | None = None

    def spec(self) -> KVCacheSpec:
        sizes: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        if self.window is None:
            return FullAttentionSpec(block_size=self.block_tokens, **sizes)
        return SlidingWindowSpec(block_size=self.block_tokens, sliding_window=self.window, **sizes)


FULL = (Attention(4),)
HYBRID = (Attention(4), Attention(4, window=8))
UNEVEN = (Attention(8), Attention(4, window=10))
"""Block sizes that differ but nest."""
SLIDING = (Attention(4, window=9),)


def kv_cache_config(
    model: Sequence[Attention], num_blocks: int, *, sparse: bool = False
) -> KVCacheConfig:
    """``sparse``: of a sliding window only what a hit at the prompt's end needs is published,
    which is vLLM's default; else every block is."""
    groups = [KVCacheGroupSpec([f"layer{i}"], part.spec()) for i, part in enumerate(model)]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=0 if sparse else None,
    )


def write_model(directory: Path) -> Path:
    """A model directory with nothing in it but its configuration."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@cache
def _model_config(directory: str) -> ModelConfig:
    return ModelConfig(
        model=directory,
        tokenizer=directory,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        seed=0,
    )


def vllm_config(
    directory: Path,
    model: Sequence[Attention],
    *,
    asynchronous: bool,
    num_blocks: int,
    step_tokens: int = 64,
    world_size: int = 1,
    policy: Literal["recompute", "fail"] = "recompute",
    extra: dict[str, Any],
) -> VllmConfig:
    cache_config = CacheConfig(
        block_size=max(part.block_tokens for part in model), enable_prefix_caching=True
    )
    cache_config.num_gpu_blocks = num_blocks
    return VllmConfig(
        model_config=_model_config(str(directory)),
        cache_config=cache_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=step_tokens,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=asynchronous,
        ),
        parallel_config=ParallelConfig(tensor_parallel_size=world_size),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="SessionAwareConnector",
            kv_connector_module_path="connectors.session_aware",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config=extra,
        ),
    )


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    hash_tokens: int = 4,
    max_tokens: int = 4,
    session: str | None = None,
    hint: dict[str, Any] | None = None,
    kv_hints: KvHintsEnvelope | None = None,
) -> Request:
    extra = {"kv_transfer_params": {"agent_hint": hint}} if hint is not None else None
    return Request(
        request_id,
        list(prompt),
        SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, extra_args=extra),
        None,
        session_id=session,
        kv_hints=kv_hints,
        block_hasher=kv_cache_utils.get_request_block_hasher(hash_tokens, sha256),
    )


@cache
def block_hash_of(tokens: tuple[int, ...], hash_tokens: int) -> bytes:
    """vLLM's hash of the block that ends with the last of ``tokens``."""
    parent = None
    if len(tokens) > hash_tokens:
        parent = kv_cache_utils.BlockHash(block_hash_of(tokens[:-hash_tokens], hash_tokens))
    return kv_cache_utils.hash_block_tokens(sha256, parent, tokens[-hash_tokens:], None)
