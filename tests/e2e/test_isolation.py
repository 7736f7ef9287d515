"""What must never be shared: two cache salts, two adapters, two models behind one path."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.checked_engine import checked_engine
from tests.e2e.conversations import replay
from tests.e2e.stock import Stock, fill
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.fault("F8", breaks="the same, and the load is called done")
@pytest.mark.fault("F24", breaks="blocks are copied out before the step has computed them")
def test_two_cache_salts_never_share_a_stored_block(stock: Stock, redis: RedisServer) -> None:
    prompt = stock.first[0].prompt
    with checked_engine(stock.engine(redis.tcp_url, host_bytes=1 << 28)) as engine:
        first = engine.one(prompt, cache_salt="tenant-a")
        engine.settle()
        assert engine.drop_gpu_cache()
        assert engine.one(prompt, cache_salt="tenant-b").cached_tokens == 0
        assert engine.one(prompt).cached_tokens == 0
        engine.settle()
        assert engine.drop_gpu_cache()
        again = engine.one(prompt, cache_salt="tenant-a")
        assert again.cached_tokens == len(prompt) // 32 * 32
        assert again.token_ids == first.token_ids


@pytest.mark.fault("F28", breaks="an adapter is its name and path")
def test_two_adapters_never_share_even_behind_one_name_and_path(
    stock: Stock, redis: RedisServer, tmp_path: Path
) -> None:
    path = tmp_path / "adapter"
    spec = replace(
        stock.engine(redis.tcp_url), extra={"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    )
    prompt = stock.first[0].prompt
    answers = []
    for seed in (1, 2):  # the second deployment has other weights under the same name
        _write_adapter(path, seed)
        with checked_engine(spec) as engine:
            adapted = engine.one(prompt, adapter=("helper", str(path)))
            assert adapted.cached_tokens == 0
            assert engine.one(prompt).cached_tokens in (0, len(prompt) // 32 * 32)
            engine.settle()
            assert engine.drop_gpu_cache()
            again = engine.one(prompt, adapter=("helper", str(path)))
            assert again.cached_tokens == len(prompt) // 32 * 32
            assert again.token_ids == adapted.token_ids
            answers.append(adapted.logprobs)
    assert answers[0] != answers[1]


def test_new_weights_behind_the_same_path_do_not_find_the_old_kv(
    stock: Stock, redis: RedisServer, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(stock.spec.model, model)
    spec = replace(stock.engine(redis.tcp_url), model=str(model))
    with checked_engine(spec) as engine:
        fill(engine, stock)
        assert all(turn.cached_tokens for turn in replay(engine, stock.again))
    weights = load_file(model / "model.safetensors")
    save_file(
        {name: tensor + 0.01 * torch.ones_like(tensor) for name, tensor in weights.items()},
        model / "model.safetensors",
        {"format": "pt"},
    )
    with checked_engine(spec) as engine:
        assert engine.one(stock.again[0].prompt).cached_tokens == 0


def _write_adapter(path: Path, seed: int) -> None:
    """A LoRA adapter of the made model's attention, with weights that depend on ``seed``."""
    path.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(4):
        for name, outputs in (("q_proj", 256), ("v_proj", 128)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(8, 256, generator=generator) * 0.2
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, 8, generator=generator) * 0.2
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
