"""vLLM's own OpenAI server as a child process: how it is started, and when it is ready."""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from spm.demo.lmcache_process import LMCACHE_ENV
from spm.demo.process import ManagedProcess, free_port
from spm.errors import SpmError

SERVED_NAME = "demo"
BLOCK_SIZE = 32
MAX_MODEL_LEN = 4608

_START_TIMEOUT_S = 300.0
_POLL_S = 0.5
_PROGRESS_EVERY_S = 5.0

_CPU_INFO = Path("/proc/cpuinfo")
_NATIVE_BF16 = ("avx512_bf16", "amx_bf16", "bf16")

_ENV = {
    **LMCACHE_ENV,
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Eager everywhere: without it the first request of every server waits for a C++ compiler.
    "TORCHDYNAMO_DISABLE": "1",
    # By default vLLM leaves a core or two to other threads: how many depends on whether there
    # is a connector, and results depend (in their last bits) on the number of threads.
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
}


class ServerStartError(SpmError):
    """vLLM did not come up; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class ConnectorSettings:
    """What the demo varies in the connector's configuration."""

    host_bytes: int
    redis_url: str | None = None
    others: Mapping[str, Any] = field(default_factory=dict)
    """More settings of ``kv_connector_extra_config``."""

    def transfer_config(self) -> dict[str, Any]:
        """The value of vLLM's ``--kv-transfer-config``."""
        extra: dict[str, Any] = {**self.others, "host_bytes": self.host_bytes}
        if self.redis_url is not None:
            extra["remote"] = {"kind": "redis", "url": self.redis_url}
        return {
            "kv_connector": "SessionAwareConnector",
            "kv_connector_module_path": "connectors.session_aware",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }


@dataclass(frozen=True)
class ServerSpec:
    """One server: which model, how many GPU blocks, with or without the connector."""

    model: Path
    pool_blocks: int
    log_path: Path
    connector: ConnectorSettings | None = None
    block_size: int = BLOCK_SIZE
    max_model_len: int = MAX_MODEL_LEN
    dev_endpoints: bool = False
    """vLLM's own, for development: ``/reset_prefix_cache`` and others."""
    management: bool = False
    """Our endpoint plugin: the routes of :mod:`spm.http`."""
    arguments: tuple[str, ...] = ()
    """More of the command line; the last of each option counts."""


def build_command(spec: ServerSpec, port: int) -> list[str]:
    """The command line; ``vllm serve`` would do the same where vLLM is installed as ``vllm``."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(spec.model), "--served-model-name", SERVED_NAME]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--block-size", str(spec.block_size)]
    command += ["--max-model-len", str(spec.max_model_len)]
    command += ["--num-gpu-blocks-override", str(spec.pool_blocks)]
    command += ["--max-num-seqs", "4", "--seed", "0", "--enforce-eager"]
    command += ["--dtype", "bfloat16" if _computes_bf16() else "float32"]
    if spec.connector is not None:
        command += ["--kv-transfer-config", json.dumps(spec.connector.transfer_config())]
    return [*command, *spec.arguments]


def _computes_bf16() -> bool:
    """Without such instructions bf16 is emulated and several times slower than float32."""
    if not _CPU_INFO.exists():
        return True
    return any(name in _CPU_INFO.read_text().split() for name in _NATIVE_BF16)


@contextlib.asynccontextmanager
async def running_server(spec: ServerSpec) -> AsyncIterator[str]:
    """Start the server, show progress until it is ready, yield its URL, stop it at the end."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with ManagedProcess(build_command(spec, port), spec.log_path, _environment(spec)) as process:
        await _wait_until_healthy(process, url)
        yield url


def _environment(spec: ServerSpec) -> dict[str, str]:
    env = dict(_ENV)
    if spec.dev_endpoints:
        env["VLLM_SERVER_DEV_MODE"] = "1"
    if spec.management:
        env["VLLM_PLUGINS"] = "spm"
    return env


async def _wait_until_healthy(process: ManagedProcess, url: str) -> None:
    started = shown = time.monotonic()
    print("  starting vLLM ", end="", flush=True)
    timeout = aiohttp.ClientTimeout(total=5)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        while process.exit_code is None and time.monotonic() - started < _START_TIMEOUT_S:
            if await is_healthy(http, url):
                print(f" ready after {time.monotonic() - started:.0f} s", flush=True)
                return
            if time.monotonic() - shown >= _PROGRESS_EVERY_S:
                shown = time.monotonic()
                print(".", end="", flush=True)
            await asyncio.sleep(_POLL_S)
    print(flush=True)
    raise ServerStartError(f"vLLM did not start. The end of its log:\n{process.log_tail()}")


async def is_healthy(http: aiohttp.ClientSession, url: str) -> bool:
    """Whether a server answers, and says so."""
    with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
        async with http.get(f"{url}/health") as response:
            return response.status == 200
    return False
