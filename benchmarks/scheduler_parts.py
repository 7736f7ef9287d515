"""vLLM's scheduler without a model: its configuration, and our connector on a clock of ours."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

from connectors.assembly import build_scheduler_half
from connectors.session_aware import SessionAwareConnector
from spm.config import SpmConfig

OURS = "connectors.session_aware"
"""Where vLLM finds our connector."""
WaitingPolicy = Literal["fcfs", "priority"]
"""Of vLLM's waiting queue."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one engine."""

    pool_blocks: int
    block_tokens: int
    max_num_seqs: int
    step_tokens: int
    """Most tokens in one step."""
    max_model_len: int
    policy: WaitingPolicy = "fcfs"


def transfer_config(connector: str, module: str, settings: Mapping[str, Any]) -> KVTransferConfig:
    """As the README says."""
    return KVTransferConfig(
        kv_connector=connector,
        kv_connector_module_path=module,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=dict(settings),
    )


def vllm_config(
    directory: Path, limits: Limits, transfer: KVTransferConfig | None, *, asynchronous: bool
) -> VllmConfig:
    """A server's, but for the model. ``transfer`` None: without a connector."""
    cache = CacheConfig(block_size=limits.block_tokens, enable_prefix_caching=True)
    cache.num_gpu_blocks = limits.pool_blocks
    return VllmConfig(
        model_config=ModelConfig(
            model=str(directory),
            tokenizer=str(directory),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=limits.max_model_len,
            seed=0,
        ),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.step_tokens,
            max_model_len=limits.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=asynchronous,
            policy=limits.policy,
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer,
    )


def kv_cache_config(limits: Limits) -> KVCacheConfig:
    """One group of full attention."""
    spec = FullAttentionSpec(
        block_size=limits.block_tokens, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    groups = [KVCacheGroupSpec(["layer0"], spec)]
    config = KVCacheConfig(limits.pool_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    config.hash_block_size = limits.block_tokens
    return config


def make_scheduler(
    directory: Path,
    limits: Limits,
    transfer: KVTransferConfig | None,
    *,
    asynchronous: bool = False,
    log_stats: bool,
) -> Scheduler:
    """As vLLM's engine core makes it; ``vllm serve`` logs stats."""
    config = vllm_config(directory, limits, transfer, asynchronous=asynchronous)
    return (AsyncScheduler if asynchronous else Scheduler)(
        config,
        kv_cache_config(limits),
        StructuredOutputManager(config),
        limits.block_tokens,
        limits.block_tokens,
        log_stats=log_stats,
    )


def put_on_clock(
    scheduler: Scheduler, settings: Mapping[str, Any], clock: Callable[[], float]
) -> SessionAwareConnector:
    """The same half as our connector made for itself, but on another clock."""
    connector = scheduler.connector
    assert isinstance(connector, SessionAwareConnector)
    pool = scheduler.kv_cache_manager.block_pool  # back to vLLM's own queue, then ours again
    pool.free_block_queue = FreeKVCacheBlockQueue(pool.free_block_queue.get_all_free_blocks())
    connector.scheduler_half = build_scheduler_half(
        SpmConfig.from_extra_config(settings),
        scheduler.vllm_config,
        scheduler.kv_cache_config,
        connector._counters,
        clock,
    )
    connector.bind_kv_cache_manager(scheduler.kv_cache_manager)
    return connector
