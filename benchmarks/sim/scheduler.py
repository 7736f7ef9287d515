"""vLLM's real scheduler for a simulated engine, with or without our real connector."""

from collections.abc import Callable, Mapping
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
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.sim.costs import CostModel
from connectors.assembly import build_scheduler_half
from connectors.metadata import LayoutHandshake
from connectors.session_aware import SessionAwareConnector
from spm.config import SpmConfig
from spm.keys import Rank

MAX_MODEL_LEN = 262_144
WaitingPolicy = Literal["fcfs", "priority"]
"""Of vLLM's waiting queue."""


def make_scheduler(
    costs: CostModel,
    settings: Mapping[str, Any] | None,
    directory: Path,
    policy: WaitingPolicy = "fcfs",
) -> Scheduler:
    """``settings``: of our connector; None: stock vLLM. ``policy``: of its waiting queue."""
    config = _vllm_config(costs, settings, directory, policy)
    spec = FullAttentionSpec(
        block_size=costs.block_tokens, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    groups = [KVCacheGroupSpec(["layer0"], spec)]
    kv_cache = KVCacheConfig(costs.pool_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    kv_cache.hash_block_size = costs.block_tokens
    return Scheduler(
        config,
        kv_cache,
        StructuredOutputManager(config),
        costs.block_tokens,
        costs.block_tokens,
        log_stats=False,
    )


def _vllm_config(
    costs: CostModel, settings: Mapping[str, Any] | None, directory: Path, policy: WaitingPolicy
) -> VllmConfig:
    transfer = None
    if settings is not None:
        transfer = KVTransferConfig(
            kv_connector="SessionAwareConnector",
            kv_connector_module_path="connectors.session_aware",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=dict(settings),
        )
    cache = CacheConfig(block_size=costs.block_tokens, enable_prefix_caching=True)
    cache.num_gpu_blocks = costs.pool_blocks
    return VllmConfig(
        model_config=ModelConfig(
            model=str(directory),
            tokenizer=str(directory),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            seed=0,
        ),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=costs.max_seqs,
            max_num_batched_tokens=costs.step_tokens,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
            policy=policy,
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer,
    )


def use_virtual_clock(
    scheduler: Scheduler, settings: Mapping[str, Any], clock: Callable[[], float], block_bytes: int
) -> SessionAwareConnector:
    """Our connector as it made itself, but on a clock of ours, and with a worker's layout."""
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
    if connector.scheduler_half.pooling is not None:
        layout = LayoutHandshake(Rank(0), "simulated", (block_bytes,))
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): layout})
    return connector
