"""An ``lmcache server`` as a child process: loopback, free ports, host memory, perhaps a Redis."""

import asyncio
import contextlib
import json
import shutil
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from spm.demo.process import ManagedProcess, free_port
from spm.errors import SpmError

CHUNK_TOKENS = 256
"""LMCache's default: what it stores and looks up as one."""

LMCACHE_ENV = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
"""For every process that loads LMCache: no usage reports, no banner."""

_START_TIMEOUT_S = 120.0
_POLL_S = 0.2
_REQUEST_TIMEOUT_S = 5.0


class LMCacheStartError(SpmError):
    """``lmcache server`` is not installed or does not start."""


def lmcache_installed() -> bool:
    """Whether ``lmcache`` can be run by this Python; its import takes seconds, so none is done."""
    return find_spec("lmcache") is not None


@dataclass(frozen=True)
class LMCacheSpec:
    """One server: its ports, how much host memory, and the Redis behind it, if any."""

    port: int
    control_port: int
    l1_gb: float = 1.0
    l2_url: str | None = None
    """``redis://HOST:PORT`` without a password."""
    chunk_tokens: int = CHUNK_TOKENS

    @property
    def url(self) -> str:
        """What goes into ``store.url``."""
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def control_url(self) -> str:
        """What goes into ``store.control_url``."""
        return f"http://127.0.0.1:{self.control_port}"

    def store_settings(self) -> dict[str, Any]:
        """The connector's setting ``store``."""
        settings = {"kind": "lmcache", "url": self.url, "control_url": self.control_url}
        return settings if self.l2_url is None else {**settings, "l2_url": self.l2_url}


def free_ports_spec(l2_url: str | None = None, l1_gb: float = 1.0) -> LMCacheSpec:
    """A server on ports that were free a moment ago."""
    return LMCacheSpec(free_port(), free_port(), l1_gb=l1_gb, l2_url=l2_url)


def build_command(spec: LMCacheSpec) -> list[str]:
    """The command line. On CPUs the engine moves the KV itself (``engine_driven``)."""
    beside = Path(sys.executable).with_name("lmcache")
    executable = str(beside) if beside.exists() else shutil.which("lmcache") or "lmcache"
    command = [executable, "server", "--host", "127.0.0.1", "--port", str(spec.port)]
    command += ["--http-host", "127.0.0.1", "--http-port", str(spec.control_port)]
    command += ["--chunk-size", str(spec.chunk_tokens)]
    command += ["--l1-size-gb", f"{spec.l1_gb:g}", "--eviction-policy", "LRU"]
    command += ["--max-workers", "2", "--supported-transfer-mode", "engine_driven"]
    if spec.l2_url is not None:
        place = urlsplit(spec.l2_url)
        adapter = {"type": "resp", "host": place.hostname, "port": place.port or 6379}
        command += ["--l2-adapter", json.dumps(adapter)]
    return command


def lmcache_process(spec: LMCacheSpec, log_path: Path) -> ManagedProcess:
    """The process, not started: a context manager (see :class:`ManagedProcess`)."""
    return ManagedProcess(build_command(spec), log_path, LMCACHE_ENV)


@contextlib.asynccontextmanager
async def running_lmcache(spec: LMCacheSpec, log_path: Path) -> AsyncIterator[None]:
    """Start a server, wait until its control API answers, and stop it at the end."""
    with lmcache_process(spec, log_path) as process:
        await _wait_until_up(process, spec.control_url)
        yield


async def _wait_until_up(process: ManagedProcess, url: str) -> None:
    started = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        while process.exit_code is None and time.monotonic() - started < _START_TIMEOUT_S:
            with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
                async with http.get(f"{url}/status") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(_POLL_S)
    raise LMCacheStartError(f"lmcache server did not start:\n{process.log_tail()}")
