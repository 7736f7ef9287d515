"""Bytes of KV from configs written by hand, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spm.errors import SpmError
from spm.plan.config_fields import ModelConfigError, read_config
from spm.plan.model_shape import model_shape
from tests.spm.plan import configs

_LONG = 100_000
_STATE_OF_QWEN3_NEXT = 36 * (32 * 128 * 128 + (2 * 16 * 128 + 32 * 128) * 3) * 2


@pytest.mark.parametrize(
    ("config", "dtype", "token_bytes", "growth_bytes", "long_bytes"),
    [
        (configs.QWEN3_32B, "auto", 262_144, 262_144, 262_144 * _LONG),
        (configs.QWEN3_32B, "fp8", 131_072, 131_072, 131_072 * _LONG),
        (configs.LLAMA_31_8B, "auto", 131_072, 131_072, 131_072 * _LONG),
        (configs.LLAMA_31_8B, "fp32", 262_144, 262_144, 262_144 * _LONG),
        (configs.MISTRAL_7B, "auto", 131_072, 0, 131_072 * 4096),
        (
            configs.GEMMA3_4B,  # 5 of 34 layers are full; 4 KV heads of 256
            "auto",
            34 * 4096,
            5 * 4096,
            (5 * _LONG + 29 * 1024) * 4096,
        ),
        (configs.DEEPSEEK_V3, "auto", 61 * 576 * 2, 61 * 576 * 2, 61 * 576 * 2 * _LONG),
        (configs.FALCON_7B, "auto", 8_192, 8_192, 8_192 * _LONG),
        (configs.QWEN3_NEXT, "auto", 24_576, 24_576, 24_576 * _LONG + _STATE_OF_QWEN3_NEXT),
        (configs.GPT2, "auto", 36_864, 36_864, 36_864 * _LONG),
        (configs.SMOLLM2_135M, "auto", 23_040, 23_040, 23_040 * _LONG),
    ],
)
def test_bytes_of_known_models(
    config: dict[str, Any], dtype: str, token_bytes: int, growth_bytes: int, long_bytes: int
) -> None:
    shape = model_shape(config, dtype)
    assert shape.token_bytes() == token_bytes
    assert shape.growth_bytes() == growth_bytes
    assert shape.rank_bytes(_LONG) == shape.total_bytes(_LONG) == long_bytes


@pytest.mark.parametrize(
    ("config", "tensor_parallel", "rank_bytes"),
    [
        (configs.QWEN3_32B, 4, 65_536),
        (configs.QWEN3_32B, 16, 32_768),  # 8 KV heads, each on two ranks
        (configs.DEEPSEEK_V3, 8, 61 * 576 * 2),  # the latent is on every rank
        (configs.FALCON_7B, 4, 8_192),
    ],
)
def test_tensor_parallel(config: dict[str, Any], tensor_parallel: int, rank_bytes: int) -> None:
    shape = model_shape(config)
    assert shape.token_bytes(tensor_parallel) == rank_bytes
    assert shape.total_bytes(10, tensor_parallel) == 10 * rank_bytes * tensor_parallel


def test_layer_types_say_what_each_layer_keeps() -> None:
    types = ["sliding_attention", "full_attention", "linear_attention", "chunked_attention"]
    config = {**configs.QWEN3_NEXT, "num_hidden_layers": 4, "layer_types": types}
    shape = model_shape({**config, "sliding_window": 10, "attention_chunk_size": 20})
    assert shape.rank_bytes(100) == (10 + 100 + 20) * 2048 + _STATE_OF_QWEN3_NEXT // 36


def test_mamba_layers_keep_a_state() -> None:
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1}
    config = {
        **configs.LLAMA_31_8B,
        **mamba,
        "mamba_d_conv": 4,
        "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"],
    }
    assert model_shape(config).rank_bytes(10) == 10 * 4096 + (512 + 64 * 3) * 2


def test_qwen2_windows_begin_at_a_layer() -> None:
    windows = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 60}
    assert model_shape({**configs.QWEN3_32B, **windows}).rank_bytes(100) == 4096 * (
        60 * 100 + 4 * 8
    )


def test_the_newer_falcon_has_groups() -> None:
    config = {**configs.FALCON_7B, "new_decoder_architecture": True, "num_kv_heads": 8}
    assert model_shape(config).token_bytes() == 8 * 8_192


_WITHOUT_HEADS = {k: v for k, v in configs.LLAMA_31_8B.items() if k != "num_attention_heads"}


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({}, "num_hidden_layers"),
        (_WITHOUT_HEADS, "num_attention_heads"),
        ({**configs.LLAMA_31_8B, "num_key_value_heads": [8, 4]}, "num_key_value_heads"),
        ({**configs.LLAMA_31_8B, "num_hidden_layers": True}, "num_hidden_layers"),
        ({**configs.LLAMA_31_8B, "hidden_size": 4097}, "head_dim"),
        ({**configs.LLAMA_31_8B, "sliding_window": 512}, "sliding_window"),
        ({**configs.LLAMA_31_8B, "layer_types": ["full_attention"]}, "layer_types"),
        ({**configs.LLAMA_31_8B, "layer_types": ["rwkv"] * 32}, "layer_types"),
        ({**configs.LLAMA_31_8B, "layer_types": ["linear_attention"] * 32}, "linear_key_head_dim"),
        ({**configs.LLAMA_31_8B, "layer_types": ["sliding_attention"] * 32}, "sliding_window"),
        ({**configs.LLAMA_31_8B, "torch_dtype": "int4"}, "torch_dtype"),
        ({**configs.LLAMA_31_8B, "hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
        ({**configs.LLAMA_31_8B, "is_encoder_decoder": True}, "is_encoder_decoder"),
        ({**configs.LLAMA_31_8B, "mamba_d_state": 128}, "mamba_d_state"),
        ({**configs.DEEPSEEK_V3, "index_topk": 2048}, "index_topk"),
        ({**configs.DEEPSEEK_V3, "qk_rope_head_dim": None}, "qk_rope_head_dim"),
        (
            {**configs.LLAMA_31_8B, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}},
            "quantization_config.kv_cache_scheme",
        ),
    ],
)
def test_what_is_not_recognised_is_refused(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelConfigError) as refused:
        model_shape(config)
    assert refused.value.field == field
    assert refused.value.advice
    assert str(refused.value).startswith(f"{field}: ")
    assert isinstance(refused.value, SpmError)


def test_heads_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(ModelConfigError, match="8 KV heads cannot be split over 3 ranks"):
        model_shape(configs.QWEN3_32B).token_bytes(3)


def test_a_directory_or_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(ModelConfigError, match="cannot be read"):
        read_config(tmp_path)
    for text, why in (("[]", "not an object"), ("{", "not JSON")):
        file.write_text(text)
        with pytest.raises(ModelConfigError, match=why):
            read_config(file)
    file.write_text(json.dumps(configs.GPT2))
    assert read_config(tmp_path) == read_config(file) == configs.GPT2


@given(
    st.sampled_from([configs.QWEN3_32B, configs.MISTRAL_7B, configs.GEMMA3_4B, configs.QWEN3_NEXT]),
    st.integers(0, 300_000),
    st.integers(0, 300_000),
)
def test_more_context_is_never_fewer_bytes(config: dict[str, Any], first: int, more: int) -> None:
    shape = model_shape(config)
    assert shape.rank_bytes(first) <= shape.rank_bytes(first + more)
