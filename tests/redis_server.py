"""A real redis-server for tests: found on PATH, started on a free loopback port."""

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

EXECUTABLE = shutil.which("redis-server")
"""``None``: not installed, and tests that need it skip."""


@dataclass
class RedisServer:
    """A running server without persistence; values are gone when it stops."""

    port: int
    directory: Path
    options: tuple[str, ...] = ()
    configuration: Path | None = None
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def tcp_url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def cluster_url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.port}"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.directory}/redis.sock"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, protocol=2)

    def start(self) -> None:
        """Start (again, on the same port) and wait until it answers."""
        assert EXECUTABLE is not None
        command = [EXECUTABLE, *([str(self.configuration)] if self.configuration else [])]
        command += ["--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self.directory)]
        command += ["--unixsocket", f"{self.directory}/redis.sock", *self.options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        give_up_s = time.monotonic() + 10.0
        while not self._answers():
            if time.monotonic() > give_up_s or self.process.poll() is not None:
                self.stop()
                raise RuntimeError(f"redis-server did not start on port {self.port}")
            time.sleep(0.01)

    def stop(self) -> None:
        """Kill it; clients see a closed connection. Idempotent."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.AuthenticationError:
            return True
        except (redis.ConnectionError, redis.TimeoutError):
            return False


def free_port() -> int:
    """A port nobody listens on now, and whose cluster bus port (10000 above) exists."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port <= 55_535:
            return port


@contextmanager
def running_redis(*options: str) -> Iterator[RedisServer]:
    """A server with extra command-line ``options``, stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="redis-") as directory:
        server = RedisServer(free_port(), Path(directory), options)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def running_cluster(*options: str) -> Iterator[RedisServer]:
    """A cluster of one node that serves every slot."""
    with running_redis("--cluster-enabled", "yes", *options) as server:
        with server.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            give_up_s = time.monotonic() + 10.0
            while client.cluster("INFO")["cluster_state"] != "ok":
                assert time.monotonic() < give_up_s
                time.sleep(0.02)
        yield server
