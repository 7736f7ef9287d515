"""A copy of the project in which something may be broken."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.broken_builds.catalogue import Break

ROOT = Path(__file__).resolve().parents[2]
_LEFT_OUT = (
    ".git",
    ".venv",
    "build",
    "dist",
    "*.egg-info",
    "__pycache__",
    ".*_cache",
    ".hypothesis",
)
_CAUGHT, _PASSED = 1, 0
"""pytest's exit codes; others mean that it did not get that far."""


class CopiedTree:
    """The interpreter and what is installed are those of the original; the project's own
    packages are imported from the copy, which is verified."""

    def __init__(self, path: Path) -> None:
        self._path = path / "project"
        shutil.copytree(ROOT, self._path, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        found = self._run([sys.executable, "-m", "tests.broken_builds.origin"]).stdout.split()
        if found != [str(self._path.resolve())]:
            raise RuntimeError(f"the packages would be imported from {found}")

    def failures(self, nodes: Sequence[str], timeout_s: int) -> list[str]:
        """Run these tests. Raises RuntimeError with pytest's words if they could not be run."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        done = self._run([*command, f"--timeout={timeout_s}", *nodes])
        if done.returncode not in (_CAUGHT, _PASSED):
            raise RuntimeError(f"{nodes}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        lines = done.stdout.splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return failed or [""] * (done.returncode != _PASSED)

    @contextmanager
    def broken(self, one: Break) -> Iterator[None]:
        """With one thing broken, and whole again."""
        file = self._path / one.file
        whole = file.read_text()
        if whole.count(one.old) != 1:
            raise RuntimeError(f"{one.file}: {whole.count(one.old)} times {one.old!r}")
        file.write_text(whole.replace(one.old, one.new))
        try:
            yield
        finally:
            file.write_text(whole)

    def _run(self, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        # Bytecode is told apart by whole seconds and size: too coarse for edits in a row.
        env = {**os.environ, "PYTHONPATH": str(self._path), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(command, cwd=self._path, env=env, capture_output=True, text=True)
