"""Small models with made weights: fast, and with logprobs that really depend on the KV.

Standard deviation 0.05 or more: with tiny or constant weights wrong KV would go unseen.
"""

import subprocess
import sys
from pathlib import Path

from spm.demo.model import ensure_model

_VOCAB = 2048
_MAX_POSITIONS = 4096

FULL = "full"
"""Llama: one KV cache group of full attention."""
HYBRID = "hybrid"
"""Gemma 3: sliding window and full attention, two KV cache groups."""

REAL = "real"
"""Not made: SmolLM2-135M-Instruct, the demo's model."""


def made_model(kind: str, cache_dir: Path) -> Path:
    """Directory of the model, built once in a process of its own (torch stays out of ours)."""
    if kind == REAL:
        return ensure_model()
    target = cache_dir / kind
    if not (target / "config.json").exists():
        subprocess.run([sys.executable, __file__, kind, str(target)], check=True, timeout=300)
    return target


def _build(kind: str, target: Path) -> None:
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    shared = {
        "vocab_size": _VOCAB,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": _MAX_POSITIONS,
        "initializer_range": 0.08,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    if kind == FULL:
        config = LlamaConfig(num_hidden_layers=4, tie_word_embeddings=False, **shared)
        model = LlamaForCausalLM(config)
    else:
        layers = ["sliding_attention", "full_attention"] * 2
        config = Gemma3TextConfig(
            num_hidden_layers=4, layer_types=layers, sliding_window=64, **shared
        )
        model = Gemma3ForCausalLM(config)
    model.to(torch.float32).save_pretrained(target)


if __name__ == "__main__":
    _build(sys.argv[1], Path(sys.argv[2]))
