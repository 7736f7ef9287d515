"""A real ``lmcache server`` for tests, started on free loopback ports."""

import contextlib
import http.client
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spm.demo.lmcache_process import (
    CHUNK_TOKENS,
    LMCACHE_ENV,
    LMCacheSpec,
    build_command,
    lmcache_installed,
)
from spm.demo.process import ManagedProcess, free_port

INSTALLED = lmcache_installed()
"""False: tests that need it skip."""

L1_GIB = 0.25
"""Host memory of a test's server, unless it says otherwise."""

_START_TIMEOUT_S = 120.0
_STOP_GRACE_S = 2.0
_POLL_S = 0.1


class LMCacheServer:
    """A server that can be stopped and started again, empty, on the same ports.

    What it holds in memory is gone then; what it wrote to Redis is not.
    """

    def __init__(self, spec: LMCacheSpec, options: tuple[str, ...], log_path: Path) -> None:
        self._spec = spec
        self._options = options
        self._log_path = log_path
        self._process: ManagedProcess | None = None

    @property
    def url(self) -> str:
        """Its message queue: ``store.url``."""
        return self._spec.url

    @property
    def control_url(self) -> str:
        """Its HTTP control API: ``store.control_url``."""
        return self._spec.control_url

    @property
    def pid(self) -> int:
        """Of the running server."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """All that it wrote so far."""
        return self._log_path.read_text(errors="replace")

    def start(self) -> None:
        """Start and wait until it answers."""
        assert self._process is None
        command = [*build_command(self._spec), *self._options]
        self._process = ManagedProcess(command, self._log_path, LMCACHE_ENV, grace_s=_STOP_GRACE_S)
        self._process.__enter__()
        give_up_s = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if time.monotonic() > give_up_s or self._process.exit_code is not None:
                tail = self._process.log_tail()
                self.stop()
                raise RuntimeError(f"lmcache server did not start:\n{tail}")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End it, also while it hangs. Idempotent."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def restart(self) -> None:
        """Stop it and start it again, empty."""
        self.stop()
        self.start()

    @contextmanager
    def hung(self) -> Iterator[None]:
        """It keeps its connections and answers nothing (``SIGSTOP``)."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", self._spec.control_port, timeout=2)
            with contextlib.closing(connection):
                connection.request("GET", "/healthcheck")
                return connection.getresponse().status == 200
        return False


@contextmanager
def running_lmcache_server(
    redis_port: int | None = None,
    l1_gib: float = L1_GIB,
    chunk_tokens: int = CHUNK_TOKENS,
    options: tuple[str, ...] = (),
    log_path: Path | None = None,
) -> Iterator[LMCacheServer]:
    """``redis_port``: its second tier (None: it has none). Stopped at the end; its log, unless
    ``log_path`` says where, is gone then."""
    with tempfile.TemporaryDirectory(prefix="lmcache-") as directory:
        spec = LMCacheSpec(
            port=free_port(),
            control_port=free_port(),
            l1_gb=l1_gib,
            l2_url=None if redis_port is None else f"redis://127.0.0.1:{redis_port}",
            chunk_tokens=chunk_tokens,
        )
        metrics = ("--prometheus-port", str(free_port()))  # by default one for all servers
        path = log_path or Path(directory) / "lmcache.log"
        server = LMCacheServer(spec, (*metrics, *options), path)
        try:
            server.start()
            yield server
        finally:
            server.stop()
