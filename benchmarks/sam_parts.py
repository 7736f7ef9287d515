"""vLLM's schedulers for the benchmark: their configuration, and a connector that does nothing."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from benchmarks import scheduler_parts
from benchmarks.sam_conversations import AGENTS, BLOCK_TOKENS, SHORT, VOCABULARY, Shape
from benchmarks.scheduler_parts import OURS, Limits, transfer_config

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

SETTINGS: dict[str, Any] = {"host_bytes": 0}
"""Hints only: nothing is moved."""
_MAX_MODEL_LEN = 20_480
_STEP_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Load:
    """How much runs at a time."""

    shape: Shape = AGENTS
    pool_blocks: int = 130_000
    sessions: int = 110
    """Conversations open at any time; those that end are replaced."""
    max_num_seqs: int = 64

    @property
    def limits(self) -> Limits:
        """Of the engine."""
        return Limits(
            self.pool_blocks, BLOCK_TOKENS, self.max_num_seqs, _STEP_TOKENS, _MAX_MODEL_LEN
        )


ENOUGH = Load()
"""The pool holds what open conversations need, so that hints change no hit: both sides do
the same work, and what is measured is the cost of the hints alone."""
PRESSED = Load(SHORT, 20_000, 150)
"""Many short turns on a pool that holds a third of what they need: hints change what is hit,
caps clip, and every step takes claimed blocks."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What one side is made of."""

    connector: str | None = None
    module: str = OURS
    named: bool = False
    hinted: bool = False
    settings: Mapping[str, Any] = field(default_factory=lambda: SETTINGS)

    @property
    def transfer(self) -> KVTransferConfig | None:
        """None: stock vLLM."""
        if self.connector is None:
            return None
        return transfer_config(self.connector, self.module, self.settings)


STOCK = Kind()
NOOP = Kind("NoopConnector", "benchmarks.sam_parts")
NO_HINTS = Kind("SessionAwareConnector")
NAMED = Kind("SessionAwareConnector", named=True)
HINTED = Kind("SessionAwareConnector", hinted=True)
_WRAP: dict[str, Any] = {
    "wrap": {"kv_connector": "NoopConnector", "kv_connector_module_path": "benchmarks.sam_parts"}
}
WRAPPED = Kind("SessionAwareConnector", settings=_WRAP)
PASSED_THROUGH = Kind("SessionAwareConnector", settings={**_WRAP, "sam": {"enabled": False}})


class NoopConnector(KVConnectorBase_V1, SupportsHMA):
    """The cheapest connector there can be: what vLLM itself pays for having one."""

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Nothing."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:  # noqa: ANN401
        """Nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""


def make_scheduler(kind: Kind, directory: Path, load: Load, *, asynchronous: bool) -> Scheduler:
    """As vLLM's engine core makes it for ``vllm serve``."""
    return scheduler_parts.make_scheduler(
        directory, load.limits, kind.transfer, asynchronous=asynchronous, log_stats=True
    )


def write_model(directory: Path, max_model_len: int = _MAX_MODEL_LEN) -> Path:
    """A model directory with nothing in it but its configuration."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_model_len,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory
