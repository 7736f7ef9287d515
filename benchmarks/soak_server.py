"""The server of a soak: vLLM's own OpenAI server, on a small made model whose KV matters."""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.soak_stock import BLOCK_TOKENS, MAX_MODEL_LEN
from spm.demo.process import ManagedProcess, free_port
from spm.demo.server import ConnectorSettings, ServerSpec, build_command, is_healthy

MAX_SEQS = 16
_STEP_TOKENS = 256
"""So that prompts are computed in many chunks."""
POOL_BLOCKS = 360
"""Fewer than what so many requests need: some are preempted."""
HOST_BYTES = 24 << 20
"""192 blocks of 128 KiB: full within the first half minute."""
_STAGING_BYTES = 16 << 20
_EXTENSION = "benchmarks.soak_worker.WorkerChecks"
_START_TIMEOUT_S = 240.0
_POLL_S = 0.2
_ROOT = Path(__file__).parent.parent

PATIENCE: dict[str, Any] = {
    "load_deadline_s": 3.0,
    "batch_deadline_s": 1.0,
    "save_deadline_s": 5.0,
    "session_ttl_s": 60,
    "max_operations": 32,
    "prefetch_inflight_bytes": 8 << 20,
}
"""Shorter waits than the defaults, so that every one of them is met in a few minutes."""


@dataclass(frozen=True)
class SoakServer:
    """A running server: where it is, and the process group it runs in."""

    url: str
    log_path: Path
    process: ManagedProcess


@dataclass(frozen=True)
class SoakServerSpec:
    """What to start. ``redis_url`` None: stock vLLM, without a connector."""

    model: Path
    log_path: Path
    redis_url: str | None
    pool_blocks: int = POOL_BLOCKS
    settings: dict[str, Any] = field(default_factory=lambda: dict(PATIENCE))
    host_bytes: int = HOST_BYTES


@contextlib.asynccontextmanager
async def running_soak_server(spec: SoakServerSpec) -> AsyncIterator[SoakServer]:
    """Start it, wait until it is healthy, stop it at the end."""
    port = free_port()
    with ManagedProcess(_command(spec, port), spec.log_path, _environment()) as process:
        server = SoakServer(f"http://127.0.0.1:{port}", spec.log_path, process)
        await _wait_until_healthy(server)
        yield server


def _command(spec: SoakServerSpec, port: int) -> list[str]:
    connector = None
    if spec.redis_url is not None:
        settings = {"staging_bytes": _STAGING_BYTES, "save_inflight_bytes": _STAGING_BYTES // 2}
        connector = ConnectorSettings(spec.host_bytes, None, settings | spec.settings)
    base = ServerSpec(
        spec.model,
        spec.pool_blocks,
        spec.log_path,
        block_size=BLOCK_TOKENS,
        max_model_len=MAX_MODEL_LEN,
    )
    command = build_command(base, port)
    # The last of each counts. Prompts are tokens, so there is nothing to tokenize.
    command += ["--dtype", "float32", "--max-num-seqs", str(MAX_SEQS), "--skip-tokenizer-init"]
    command += ["--max-num-batched-tokens", str(_STEP_TOKENS), "--disable-uvicorn-access-log"]
    if connector is not None:
        transfer = connector.transfer_config()
        extra = transfer["kv_connector_extra_config"]
        remote = {"kind": "redis", "url": spec.redis_url, "connect_timeout_s": 0.5}
        extra["remote"] = {**remote, **extra.get("remote", {})}
        command += ["--kv-transfer-config", json.dumps(transfer)]
        command += ["--worker-extension-cls", _EXTENSION]
    return command


def _environment() -> dict[str, str]:
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache, /collective_rpc
        "VLLM_PLUGINS": "spm",
        # Left alone, the CPU backend's matrix library keeps code and buffers for every shape it
        # meets: stock vLLM's worker grows by hundreds of MiB, and would hide a leak of ours.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
        "GOMP_SPINCOUNT": "30000",  # threads that spin for long starve whoever shares their core
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(":"),
    }


async def _wait_until_healthy(server: SoakServer) -> None:
    give_up_s = time.monotonic() + _START_TIMEOUT_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http:
        while server.process.exit_code is None and time.monotonic() < give_up_s:
            if await is_healthy(http, server.url):
                return
            await asyncio.sleep(_POLL_S)
    raise RuntimeError(f"vLLM did not start. The end of its log:\n{server.process.log_tail()}")
