"""Builds what sessions over LMCache are made of: names, threads and their connections."""

import logging

from connectors.lmcache.chunk_keys import LMCacheModel, lmcache_model
from connectors.lmcache.control import LMCacheControl
from connectors.lmcache.control_worker import ControlWorker
from connectors.lmcache.in_process import InProcessChunkKeys, in_process_chunk_keys
from connectors.lmcache.in_process_pooling import InProcessPooling
from connectors.lmcache.pooling import LMCachePooling
from connectors.scheduler.store_keeper import StoreKeeper
from connectors.stores.buffers import BufferPool
from connectors.stores.factory import create_remote_store
from connectors.stores.prober import remote_breaker
from connectors.wrapping.pooling import PoolingParts, WrappedPooling
from spm.breaker import CircuitBreaker
from spm.errors import ConfigError
from spm.redis_url import redacted_url

logger = logging.getLogger(__name__)

IN_PROCESS = "LMCacheConnectorV1"
"""vLLM's name of the connector that has an LMCache of its own in every worker."""


def create_lmcache_pooling(parts: PoolingParts) -> WrappedPooling:
    """As ``store`` or ``wrap.remote_url`` say. Connects to nothing yet. Raises
    :class:`ConfigError`."""
    if parts.config.store is not None:
        model = lmcache_model(parts.vllm_config, len(parts.geometry.groups))
        return build_server_pooling(parts, model)
    wrap = parts.config.wrap
    assert wrap is not None
    if wrap.kv_connector != IN_PROCESS:
        raise ConfigError(
            f"wrap.remote_url: names of values are known of {IN_PROCESS} only, not of "
            f"{wrap.kv_connector!r}"
        )
    try:
        chunk_keys = in_process_chunk_keys(parts.vllm_config, len(parts.geometry.groups))
    except ConfigError as error:
        logger.warning("wrap.remote_url is of no use: %s", error)
        return WrappedPooling(parts)
    return build_in_process_pooling(parts, chunk_keys)


def build_in_process_pooling(
    parts: PoolingParts, chunk_keys: InProcessChunkKeys
) -> InProcessPooling:
    """``chunk_keys``: as the workers' LMCaches have them."""
    assert parts.config.wrap is not None
    url = parts.config.wrap.remote_url
    keeper = _redis_keeper(parts, url, chunk_keys.values_a_chunk)
    return InProcessPooling(parts, chunk_keys, keeper)


def build_server_pooling(parts: PoolingParts, model: LMCacheModel) -> LMCachePooling:
    """``model``: as LMCache's connector registers it with the server."""
    store = parts.config.store
    assert store is not None
    control = ControlWorker(
        LMCacheControl(store.control_url, model.name, model.world_size, parts.clock),
        _breaker(parts, f"LMCache's control API at {store.control_url}"),
        parts.counters,
        parts.config,
        store.control_deadline_s,
        clock=parts.clock,
    )
    keeper = None
    if store.l2_url and not model.unnamed:
        keeper = _redis_keeper(parts, store.l2_url, model.world_size)
    return LMCachePooling(parts, model, control, keeper)


def _redis_keeper(parts: PoolingParts, url: str, values_a_chunk: int) -> StoreKeeper:
    store = create_remote_store(
        "redis",
        pool=BufferPool(1),
        url=url,
        connect_timeout_s=min(1.0, parts.config.batch_deadline_s),
        ttl_s=None,  # LMCache gives its values none
    )
    place = f"LMCache's Redis at {redacted_url(url)}"
    config, clock = parts.config, parts.clock
    breaker = _breaker(parts, place)
    return StoreKeeper(store, breaker, parts.counters, config, values_a_chunk, clock=clock)


def _breaker(parts: PoolingParts, place: str) -> CircuitBreaker:
    return remote_breaker(parts.config, parts.clock, parts.counters, "scheduler", place)
