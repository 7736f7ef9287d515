"""A Redis server of the demo's own: loopback, free port, memory only."""

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from spm.demo.process import ManagedProcess, free_port
from spm.errors import SpmError

_START_TIMEOUT_S = 15.0
_POLL_S = 0.2
_QUIET_S = 1.0
_QUIET_TIMEOUT_S = 30.0


class RedisStartError(SpmError):
    """redis-server is there and does not start."""


def redis_installed() -> bool:
    """Whether a ``redis-server`` is on the path."""
    return shutil.which("redis-server") is not None


@dataclass(frozen=True)
class DemoRedis:
    """A running server."""

    port: int

    @property
    def url(self) -> str:
        """What goes into the connector's configuration."""
        return f"redis://127.0.0.1:{self.port}"

    async def wait_quiet(self) -> int:
        """Wait until no more keys arrive: saves are in the background. Returns the key count."""
        deadline = time.monotonic() + _QUIET_TIMEOUT_S
        count, since = self._count(), time.monotonic()
        while time.monotonic() < min(deadline, since + _QUIET_S):
            await asyncio.sleep(_POLL_S)
            now = self._count()
            if now != count:
                count, since = now, time.monotonic()
        return count

    def _count(self) -> int:
        with _client(self.port) as client:
            return int(client.dbsize())


def _client(port: int) -> redis.Redis:
    """Without retries: by default those sleep for seconds, in which nothing else happens."""
    return redis.Redis(port=port, retry=Retry(NoBackoff(), 0))


@contextlib.asynccontextmanager
async def running_redis(log_dir: Path) -> AsyncIterator[DemoRedis]:
    """Start a server, wait until it answers, and stop it at the end."""
    port = free_port()
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port)]
    command += ["--save", "", "--appendonly", "no", "--dir", str(log_dir)]
    with ManagedProcess(command, log_dir / "redis.log") as process:
        await _wait_until_up(process, port)
        yield DemoRedis(port)


async def _wait_until_up(process: ManagedProcess, port: int) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    with _client(port) as client:
        while time.monotonic() < deadline and process.exit_code is None:
            with contextlib.suppress(redis.ConnectionError):
                client.ping()
                return
            await asyncio.sleep(_POLL_S)
    raise RedisStartError(f"redis-server did not start:\n{process.log_tail()}")
