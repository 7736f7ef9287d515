"""How attention kernels pack a block, as far as vLLM tells.

Shape and strides do not say it all: vLLM's CPU kernels order K and V inside a block by the
instructions of the CPU they run on, and backends that give equal shapes may fill them in
another order. Bytes may only be exchanged between engines that agree here too.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def attention_kernels(vllm_config: "VllmConfig", layer_names: Iterable[str]) -> str:
    """Backend, instruction set and device of these layers, and vLLM's version. Worker
    process, once the attention backends are set up (they are when KV caches are registered)."""
    layers = vllm_config.compilation_config.static_forward_context
    packings = [(name, _packing(layers.get(name))) for name in sorted(layer_names)]
    return repr((vllm.__version__, _device(vllm_config.device_config.device_type), packings))


def _packing(layer: object) -> str:
    backend = getattr(layer, "attn_backend", None)
    name = backend.get_name() if backend is not None else type(layer).__name__
    return f"{name} {getattr(layer, 'isa', '')}"


def _device(device_type: str) -> str:
    if device_type == "cuda":
        return f"cuda {torch.cuda.get_device_capability()}"
    return device_type
