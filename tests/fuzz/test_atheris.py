"""A short coverage-guided run of every target, always from the same seed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parent.parent.parent
RUNS = 10_000


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_found_in_a_short_run(target: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.atheris_targets", target, f"-runs={RUNS}"]
    command += ["-seed=1", f"-artifact_prefix={tmp_path}/", "-rss_limit_mb=0", "-timeout=60"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # an empty corpus each time
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"Done {RUNS} runs" in ended.stderr
