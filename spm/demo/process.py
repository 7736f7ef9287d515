"""A child process that is sure to be gone afterwards, with everything it started."""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

_STOP_GRACE_S = 20.0
_LOG_TAIL_LINES = 25


class ManagedProcess:
    """Runs a command in a process group of its own, output to a file, as a context manager.

    Its own group keeps a terminal's Ctrl-C from reaching the child directly, so that we decide
    the order of things, and lets us end grandchildren that the child leaves behind.
    """

    def __init__(
        self,
        command: Sequence[str],
        log_path: Path,
        env: Mapping[str, str] | None = None,
        grace_s: float = _STOP_GRACE_S,
    ) -> None:
        self._command = list(command)
        self._log_path = log_path
        self._env = {**os.environ, **(env or {})}
        self._grace_s = grace_s
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "ManagedProcess":
        with self._log_path.open("ab") as log:
            self._child = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The child's process id, which is also its group's."""
        if self._child is None:
            raise RuntimeError("the process was not started")
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._child is None else self._child.poll()

    def log_tail(self) -> str:
        """The last lines it wrote, for an error message."""
        lines = self._log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def stop(self) -> None:
        """Ask it to end, wait a little, then end whatever is left of its group."""
        child = self._child
        if child is None:
            return
        try:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(self._grace_s)
        finally:  # also when a second Ctrl-C cuts the wait short
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            self._child = None


def free_port() -> int:
    """A loopback TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
