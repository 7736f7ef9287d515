"""Builds the halves from vLLM's configuration: the only place that knows all parts."""

import logging
import secrets
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from connectors.fingerprint import engine_fingerprint, require_shareable_hashes
from connectors.groups import block_geometry, cache_geometry
from connectors.kernels import attention_kernels
from connectors.scheduler.half import SchedulerHalf
from connectors.scheduler.lookup import LookupService
from connectors.scheduler.store_keeper import StoreKeeper
from connectors.stores.base import KVStore
from connectors.stores.buffers import BufferPool
from connectors.stores.factory import create_remote_store
from connectors.stores.prober import remote_breaker
from connectors.worker.half import WorkerHalf
from connectors.worker.idle import IdleWorkerHalf
from connectors.wrapping.half import WrappingHalf
from spm.config import SpmConfig
from spm.keys import Rank
from spm.metrics import Counters
from spm.value_auth import key_id

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from connectors.wrapping.gate import RequestGate

logger = logging.getLogger(__name__)


def build_scheduler_half(
    config: SpmConfig,
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    counters: Counters,
    clock: Callable[[], float] = time.monotonic,
) -> SchedulerHalf:
    """Raises :class:`spm.errors.ConfigError` or ``LayoutError``: better now than later."""
    if config.pools:
        geometry = cache_geometry(vllm_config, kv_cache_config)
    else:  # nothing is moved, so any model will do
        geometry = block_geometry(kv_cache_config)
    if config.remote is not None:
        require_shareable_hashes(vllm_config)
    auth_key_id = key_id(config.remote)
    _warn(vllm_config)
    half = SchedulerHalf(
        config,
        geometry,
        vllm_config.parallel_config.world_size,
        lambda layouts: engine_fingerprint(vllm_config, geometry, layouts, auth_key_id),
        *_remote_parts(config, vllm_config.parallel_config.world_size, counters),
        _engine_id(),
        counters,
        clock,
    )
    events = vllm_config.kv_events_config
    if events is not None and events.enable_kv_cache_events:
        half.publish_kv_events()
    return half


def build_wrapping_half(
    config: SpmConfig,
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    inner: "KVConnectorBase_V1",
    gate: "RequestGate",
    counters: Counters,
    clock: Callable[[], float] = time.monotonic,
) -> WrappingHalf:
    """Sessions beside a wrapped connector. Any model will do: nothing is moved by us."""
    _warn(vllm_config)
    half = WrappingHalf(
        config,
        block_geometry(kv_cache_config),
        inner,
        gate,
        vllm_config,
        vllm_config.parallel_config.world_size,
        _engine_id(),
        counters,
        clock,
    )
    events = vllm_config.kv_events_config
    if events is not None and events.enable_kv_cache_events:
        half.publish_kv_events()
    return half


def _engine_id() -> str:
    """Unique among engines and starts."""
    return f"{socket.gethostname()[:32]}-{secrets.token_hex(8)}"


def _remote_parts(
    config: SpmConfig, world_size: int, counters: Counters
) -> tuple[LookupService | None, StoreKeeper | None]:
    """They have a connection each, so that neither waits for the other, and one breaker: one
    of them knows what is true for both."""
    asked, kept = _key_store(config), _key_store(config)
    if asked is None or kept is None:
        return None, None
    breaker = remote_breaker(config, time.monotonic, counters, "scheduler")
    return (
        LookupService(asked, breaker, counters),
        StoreKeeper(kept, breaker, counters, config, world_size),
    )


def _key_store(config: SpmConfig) -> KVStore | None:
    """A client of the remote store for what is not about values."""
    remote = config.remote
    if remote is None:
        return None
    return create_remote_store(
        remote.kind,
        pool=BufferPool(1),
        url=remote.url,
        connect_timeout_s=min(remote.connect_timeout_s, config.lookup_deadline_s),
        ttl_s=remote.ttl_s or None,
        password=remote.password,
        faults=remote.faults,
    )


def _warn(vllm_config: "VllmConfig") -> None:
    """Settings of vLLM's that make the connector useless or harmful: said once, loudly."""
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_load_failure_policy != "recompute":
        logger.error(
            "kv_load_failure_policy=%r: a block the store lost will FAIL its request. "
            'Set "kv_load_failure_policy": "recompute" in --kv-transfer-config.',
            transfer.kv_load_failure_policy,
        )
    if vllm_config.scheduler_config.policy == "priority":
        logger.warning(
            "scheduling policy 'priority': vLLM 0.32 can publish blocks of a request that it "
            "preempts in the same step, uncomputed; such a block would be stored. Use 'fcfs'"
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        logger.error("prefix caching is off: no block is ever published, nothing will be kept")


def build_worker_half(
    config: SpmConfig,
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    counters: Counters,
) -> WorkerHalf | IdleWorkerHalf:
    """One rank's half; starts nothing until the KV caches are registered."""
    if not config.pools:
        return IdleWorkerHalf()
    geometry = cache_geometry(vllm_config, kv_cache_config)
    parallel = vllm_config.parallel_config
    rank = Rank(parallel.rank % parallel.world_size)
    layer_names = [name for group in geometry.groups for name in group.layer_names]
    return WorkerHalf(
        config,
        geometry,
        rank,
        kv_cache_config.num_blocks,
        counters,
        kernels=lambda: attention_kernels(vllm_config, layer_names),
    )
