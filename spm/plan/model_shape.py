"""How many bytes of KV a session of a model has, as a function of its context.

A layer of attention keeps, for each token, ``2 x kv_heads x head_dim`` numbers (K and V; MHA:
as many KV heads as heads, GQA: fewer, MQA: one). MLA keeps one latent, shared by all heads, of
``kv_lora_rank + qk_rope_head_dim`` numbers (DeepSeek-V2, arXiv 2405.04434, 2.1.2). A sliding
window bounds the tokens kept. Linear attention and Mamba keep a state of fixed size.

With tensor parallelism KV heads are split over the ranks, and repeated where there are more
ranks than KV heads; every rank has all of an MLA latent (both as in vLLM).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spm.plan.config_fields import ConfigFields, ModelConfigError, quoted
from spm.plan.model_layers import Layer, LayerKind, layers_of

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
_BY_CONFIG_NAME = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    # What published configs leave out, from Gemma3TextConfig of transformers.
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
}


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """Layers that are alike. ``elements``: numbers that one KV head keeps of a token."""

    layers: int
    kv_heads: int
    elements: int
    window_tokens: int | None
    latent: bool = False

    def heads_of_rank(self, tensor_parallel: int) -> int:
        """KV heads, or latents, on one rank. Raises ModelConfigError if they cannot be split."""
        if self.latent:
            return 1
        more, fewer = max(self.kv_heads, tensor_parallel), min(self.kv_heads, tensor_parallel)
        if more % fewer:
            raise ModelConfigError(
                "num_key_value_heads",
                f"{self.kv_heads} KV heads cannot be split over {tensor_parallel} ranks",
                "choose a --tp that divides them, or that they divide",
            )
        return max(1, self.kv_heads // tensor_parallel)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What determines the size of a session's KV. Immutable.

    ``state_bytes``: of all layers with a state, over all ranks, however long the context is.
    """

    attention: tuple[AttentionLayers, ...]
    state_bytes: int
    dtype: str
    kind: str

    @property
    def element_bytes(self) -> int:
        """Of one number."""
        return DTYPE_BYTES[self.dtype]

    def rank_bytes(self, context_tokens: int, tensor_parallel: int = 1) -> int:
        """KV of one session on one rank. Raises ModelConfigError."""
        kept = sum(
            layer.layers
            * layer.heads_of_rank(tensor_parallel)
            * layer.elements
            * min(context_tokens, layer.window_tokens or context_tokens)
            for layer in self.attention
        )
        state_bytes = -(-self.state_bytes // tensor_parallel) if context_tokens else 0
        return kept * self.element_bytes + state_bytes

    def total_bytes(self, context_tokens: int, tensor_parallel: int = 1) -> int:
        """KV of one session over all ranks, copies included. Raises ModelConfigError."""
        return self.rank_bytes(context_tokens, tensor_parallel) * tensor_parallel

    def token_bytes(self, tensor_parallel: int = 1) -> int:
        """KV of one token in all layers, on one rank, while it is inside all windows."""
        return self.element_bytes * sum(
            layer.layers * layer.heads_of_rank(tensor_parallel) * layer.elements
            for layer in self.attention
        )

    def growth_bytes(self, tensor_parallel: int = 1) -> int:
        """What one more token adds on one rank once all windows are full; 0: nothing."""
        return self.element_bytes * sum(
            layer.layers * layer.heads_of_rank(tensor_parallel) * layer.elements
            for layer in self.attention
            if layer.window_tokens is None
        )


def model_shape(raw: Mapping[str, Any], dtype: str = "auto") -> ModelShape:
    """Of a parsed ``config.json``; ``dtype``: auto or one of ``DTYPE_BYTES``.

    Raises :class:`ModelConfigError` for what cannot be recognised."""
    fields = ConfigFields(raw)
    layers = layers_of(fields)
    kv_dtype = _kv_dtype(fields, dtype)
    heads, elements, latent = _heads_and_elements(fields)
    counts = Counter(layer for layer in layers if layer.kind in (LayerKind.FULL, LayerKind.SLIDING))
    attention = tuple(
        AttentionLayers(number, heads, elements, layer.window_tokens, latent)
        for layer, number in counts.items()
    )
    state = sum(_state_bytes(fields, layer, DTYPE_BYTES[kv_dtype]) for layer in layers)
    return ModelShape(attention, state, kv_dtype, _kind(fields, layers, heads, latent))


def _kv_dtype(fields: ConfigFields, dtype: str) -> str:
    """vLLM's ``auto`` is the weights' type, and 16 bits for weights of 32 or of no type."""
    if dtype != "auto":
        return dtype
    asked = fields.kv_quantization()
    if asked is not None:
        raise ModelConfigError(asked[0], f"is {quoted(asked[1])}", "say --dtype fp8, bf16 or fp16")
    told = fields.dtype()
    if told is None or told == "float32":
        return "fp16"
    if told not in _BY_CONFIG_NAME:
        raise ModelConfigError("torch_dtype", f"{quoted(told)} is not known", "say --dtype")
    return _BY_CONFIG_NAME[told]


def _heads_and_elements(fields: ConfigFields) -> tuple[int, int, bool]:
    """KV heads, numbers that one keeps of a token, and whether it is a latent."""
    latent = fields.count("kv_lora_rank")
    if latent is not None:
        return 1, latent + fields.needed("qk_rope_head_dim"), True
    defaults = _DEFAULTS.get(fields.model_type, {})
    heads = fields.count("num_attention_heads", "n_head") or defaults.get("num_attention_heads")
    heads = heads or fields.needed("num_attention_heads", "n_head")
    head_dim = fields.count("head_dim") or defaults.get("head_dim")
    if head_dim is None:
        hidden = fields.needed("hidden_size", "n_embd")
        if hidden % heads:
            raise ModelConfigError(
                "head_dim",
                f"missing, and {hidden} (hidden_size) is not a multiple of {heads} heads",
                "add it to a copy of config.json",
            )
        head_dim = hidden // heads
    return _kv_heads(fields, heads, defaults), 2 * head_dim, False


def _kv_heads(fields: ConfigFields, heads: int, defaults: Mapping[str, int]) -> int:
    """Falcon's and GPTBigCode's ``multi_query`` is one head, unless it is the newer Falcon."""
    if fields.has("multi_query") and not fields.has("new_decoder_architecture"):
        return 1
    given = fields.count("num_key_value_heads", "num_kv_heads", "n_head_kv")
    return given or defaults.get("num_key_value_heads", heads)


def _state_bytes(fields: ConfigFields, layer: Layer, element_bytes: int) -> int:
    """Of one layer: the recurrent state, and the last inputs of the convolution before it."""
    if layer.kind is LayerKind.LINEAR:
        key_dim = fields.needed("linear_key_head_dim")
        value_dim = fields.needed("linear_value_head_dim")
        value_heads = fields.needed("linear_num_value_heads")
        keys = 2 * fields.needed("linear_num_key_heads") * key_dim
        recurrent = value_heads * key_dim * value_dim
        convolved = keys + value_heads * value_dim
        kernel = fields.needed("linear_conv_kernel_dim")
    elif layer.kind is LayerKind.MAMBA:
        inner = fields.needed("mamba_n_heads") * fields.needed("mamba_d_head")
        state = fields.needed("mamba_d_state")
        recurrent = inner * state
        convolved = inner + 2 * fields.needed("mamba_n_groups") * state
        kernel = fields.needed("mamba_d_conv")
    else:
        return 0
    recurrent_bytes = 4 if fields.raw("mamba_ssm_dtype") == "float32" else element_bytes
    return recurrent * recurrent_bytes + convolved * (kernel - 1) * element_bytes


def _kind(fields: ConfigFields, layers: list[Layer], heads: int, latent: bool) -> str:
    """For people, e.g. ``GQA, 8 KV heads, sliding window``."""
    all_heads = fields.count("num_attention_heads", "n_head")
    if latent:
        name = "MLA"
    elif heads == 1:
        name = "MQA"
    else:
        name = ("MHA" if heads == all_heads else "GQA") + f", {heads} KV heads"
    kinds = {layer.kind for layer in layers}
    windows = ", sliding window" if LayerKind.SLIDING in kinds else ""
    states = ", layers with a state" if kinds & {LayerKind.LINEAR, LayerKind.MAMBA} else ""
    return name + windows + states
