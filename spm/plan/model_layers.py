"""Which layers a model has: attention to all tokens, to a window of them, or a fixed state.

``layer_types`` (transformers >= 4.53) says it for each layer. Older configs say it in ways of
their own; each that is understood here is that of the model's code in transformers.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from spm.plan.config_fields import ConfigFields, ModelConfigError, quoted


class LayerKind(Enum):
    """What a layer keeps of a session."""

    FULL = "full"
    SLIDING = "sliding"
    LINEAR = "linear"
    """Gated delta net of Qwen3-Next: a state that does not grow."""
    MAMBA = "mamba"
    """Mamba-2: a state that does not grow."""


@dataclass(frozen=True, slots=True)
class Layer:
    """``window_tokens``: of the past that it can need; None: all of it."""

    kind: LayerKind
    window_tokens: int | None = None


_FULL: Final = Layer(LayerKind.FULL)
_WINDOW_EVERYWHERE = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})
"""Models whose ``sliding_window`` is that of all layers."""
_DEFAULT_PATTERN = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}
"""Every n-th layer is full; in transformers' code where a config does not say it."""
_NOT_UNDERSTOOD = (
    "is_encoder_decoder",
    "block_configs",
    "block_types",
    "hybrid_override_pattern",
    "hybrid_layer_pattern",
    "attn_type_list",
    "attn_layer_period",
    "attn_layer_indices",
    "cross_attention_layers",
    "global_head_dim",
    "index_topk",
    "compress_ratios",
    "ssm_cfg",
    "state_size",
)
"""Signs of layers that keep something else, or differ from each other."""
_STATE_ONLY_WITH_TYPES = ("mamba_d_state", "linear_num_value_heads")


def layers_of(fields: ConfigFields) -> list[Layer]:
    """All layers that have a cache of their own. Raises ModelConfigError."""
    for name in _NOT_UNDERSTOOD:
        if fields.has(name):
            raise ModelConfigError(
                name,
                f"{quoted(fields.raw(name))} says that its layers keep something not known here",
                "measure it: vLLM logs the size of its KV cache in tokens at start",
            )
    count = fields.needed("num_hidden_layers", "n_layer")
    types = fields.raw("layer_types")
    layers = _by_pattern(fields, count) if types is None else _by_types(fields, types, count)
    shared = fields.count("num_kv_shared_layers") if fields.has("num_kv_shared_layers") else 0
    return layers[: count - (shared or 0)]  # Gemma-3n: the last ones read caches of earlier ones


def _by_types(fields: ConfigFields, types: object, count: int) -> list[Layer]:
    if not isinstance(types, list) or len(types) != count:
        raise ModelConfigError(
            "layer_types",
            f"one type for each of {count} layers is needed, not {quoted(types)}",
            "correct a copy of config.json",
        )
    return [_of_type(fields, name) for name in types]


def _of_type(fields: ConfigFields, name: object) -> Layer:
    if name in ("full_attention", "attention"):
        return _FULL
    if name == "sliding_attention":
        return Layer(LayerKind.SLIDING, fields.needed("sliding_window"))
    if name == "chunked_attention":  # sees no more than its chunk of the past
        return Layer(LayerKind.SLIDING, fields.needed("attention_chunk_size"))
    if name == "linear_attention":
        return Layer(LayerKind.LINEAR)
    if name == "mamba":
        return Layer(LayerKind.MAMBA)
    raise ModelConfigError(
        "layer_types",
        f"{quoted(name)} is not known",
        "measure it: vLLM logs the size of its KV cache in tokens at start",
    )


def _by_pattern(fields: ConfigFields, count: int) -> list[Layer]:
    for name in _STATE_ONLY_WITH_TYPES:
        if fields.has(name) and not fields.has("full_attention_interval"):
            raise ModelConfigError(
                name,
                "some layers keep a state, and layer_types does not say which",
                "add layer_types to a copy of config.json",
            )
    interval = fields.count("full_attention_interval")
    if interval is not None:  # Qwen3-Next
        return _every(interval, count, Layer(LayerKind.LINEAR))
    if not fields.has("sliding_window") or fields.raw("use_sliding_window") is False:
        return [_FULL] * count
    windowed = Layer(LayerKind.SLIDING, fields.needed("sliding_window"))
    pattern = fields.count("sliding_window_pattern") or _DEFAULT_PATTERN.get(fields.model_type)
    if pattern is not None:
        return _every(pattern, count, windowed)
    if fields.raw("use_sliding_window") is True:  # Qwen2: from this layer on
        start = fields.raw("max_window_layers")
        if type(start) is int and start >= 0:
            return [windowed if n >= start else _FULL for n in range(count)]
    if fields.model_type in _WINDOW_EVERYWHERE:
        return [windowed] * count
    raise ModelConfigError(
        "sliding_window",
        f"which layers have the window of {windowed.window_tokens} is not told for model_type "
        f"{quoted(fields.model_type)}",
        "add layer_types to a copy of config.json, or sliding_window null if no layer has",
    )


def _every(interval: int, count: int, other: Layer) -> list[Layer]:
    """Full attention in each ``interval``-th layer, ``other`` in those between."""
    return [_FULL if n % interval == 0 else other for n in range(1, count + 1)]
