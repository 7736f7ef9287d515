"""A vLLM with LMCache's own connector, LMCache's server, and the Redis that we use too."""

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import redis

from benchmarks.report import Report
from benchmarks.resumes import BLOCK_TOKENS, FULL_BLOCKS, Arm, Resume, Times, server_spec
from benchmarks.served import Server
from spm.demo.lmcache_process import (
    CHUNK_TOKENS,
    LMCACHE_ENV,
    LMCacheSpec,
    free_ports_spec,
    running_lmcache,
)
from spm.demo.redis_process import DemoRedis
from spm.demo.server import ConnectorSettings, ServerSpec

CHUNKS = FULL_BLOCKS * BLOCK_TOKENS // CHUNK_TOKENS
"""Of one prompt: as many tokens as our full blocks have."""
_SETTLE_TIMEOUT_S = 30.0
_POLL_S = 0.1


@dataclass(frozen=True)
class OtherConnector(ConnectorSettings):
    """A connector of vLLM's own, without us."""

    name: str = "LMCacheMPConnector"
    extra: Mapping[str, Any] = field(default_factory=dict)

    def transfer_config(self) -> dict[str, Any]:
        return {
            "kv_connector": self.name,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": dict(self.extra),
        }


def our_url(store: DemoRedis) -> str:
    """A database of our own in the same Redis: LMCache's adapter knows only the first one."""
    return f"{store.url}/1"


async def start_lmcache(
    stack: contextlib.AsyncExitStack, log_path: Path, store: DemoRedis | None
) -> LMCacheSpec:
    """LMCache's server, with ``store`` behind its host memory if there is one; it ends with
    ``stack``."""
    os.environ.update(LMCACHE_ENV)  # for vLLM's processes too
    spec = free_ports_spec(store.url if store is not None else None)
    await stack.enter_async_context(running_lmcache(spec, log_path))
    return spec


async def lmcache_server(
    stack: contextlib.AsyncExitStack, logs: Path, store: DemoRedis
) -> tuple[str, ServerSpec]:
    """Start LMCache's server; its control URL, and the vLLM that is to be started with it."""
    spec = await start_lmcache(stack, logs / "lmcache-server.log", store)
    connector = OtherConnector(0, extra={"lmcache.mp.server_urls": [spec.url]})
    return spec.control_url, server_spec(logs, "lmcache", connector)


def lmcache_arm(server: Server, control_url: str, store: DemoRedis) -> Arm:
    """A vLLM whose prompts come back from LMCache's host memory, and from Redis.

    In this order: what LMCache loads from Redis it does not keep in its host memory.
    """
    peer = _Peer(server, control_url, store)
    resumes = {"host": Resume(server.drop_gpu_cache, 0), "redis": Resume(peer.forget, CHUNKS)}
    return Arm(server, resumes, peer.wait_stored)


class _Peer:
    def __init__(self, server: Server, control_url: str, store: DemoRedis) -> None:
        self._server = server
        self._control_url = control_url
        self._redis = redis.Redis(port=store.port)

    async def forget(self) -> None:
        """Empty the GPU cache and LMCache's host memory."""
        await self._server.drop_gpu_cache()
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{self._control_url}/cache/clear") as response,
        ):
            response.raise_for_status()

    async def wait_stored(self, prompts: int) -> None:
        """Until Redis has every chunk."""
        give_up_s = time.monotonic() + _SETTLE_TIMEOUT_S
        while self._redis.dbsize() < prompts * CHUNKS:
            if time.monotonic() > give_up_s:
                raise TimeoutError("LMCache did not store all chunks in Redis")
            await asyncio.sleep(_POLL_S)


def add_lmcache_ratios(report: Report, times: Times) -> None:
    """Of times to first token; above one, ours was faster."""
    slower = "LMCache's time over ours"
    report.add_ratio(
        "lmcache_redis_over_ours", times["lmcache redis"], times["redis resumed"], slower
    )
    report.add_ratio("lmcache_host_over_ours", times["lmcache host"], times["host resumed"], slower)
    stock = times["stock gpu"]
    report.add_ratio("lmcache_redis_over_stock_gpu_hit", times["lmcache redis"], stock)
    report.add_ratio("lmcache_host_over_stock_gpu_hit", times["lmcache host"], stock)
    report.add_ratio("lmcache_cold_over_ours", times["lmcache cold"], times["redis cold"], slower)
