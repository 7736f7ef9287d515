"""Are processes that a test did not start itself still there?"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 20.0
_POLL_S = 0.02


def wait_until(condition: Callable[[], bool], what: str, patience_s: float = DEADLINE_S) -> None:
    """Poll up to a deadline, then fail naming ``what`` was waited for."""
    give_up_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < give_up_s, f"not within {patience_s:.0f} s: {what}"
        time.sleep(_POLL_S)


def is_running(pid: int) -> bool:
    """Whether it exists and is no zombie: who reaps orphans, and when, is the machine's affair."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def pids_in(path: Path, count: int) -> list[int]:
    """Wait until ``count`` process ids, one a line, have been written to ``path``."""

    def lines() -> list[str]:
        return path.read_text().splitlines(keepends=True) if path.exists() else []

    wait_until(lambda: sum(line.endswith("\n") for line in lines()) == count, f"pids in {path}")
    return [int(line) for line in lines()]


def wait_until_gone(pids: list[int]) -> None:
    """A killed process may take a moment to go."""
    wait_until(lambda: not any(is_running(pid) for pid in pids), f"the end of {pids}")


def end_leftovers(path: Path) -> None:
    """After a failed test: kill those of the processes in ``path`` that are still there."""
    for line in path.read_text().splitlines() if path.exists() else []:
        if is_running(int(line)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line), signal.SIGKILL)
