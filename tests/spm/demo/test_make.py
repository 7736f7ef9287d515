"""``make demo``: which store, and an unknown one is refused before anything is installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from spm.demo.phases import STORES

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = ["make", "--no-print-directory", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_default_store_is_redis() -> None:
    assert make("--dry-run", "demo").stdout.rstrip().endswith("spm demo --store redis")


@pytest.mark.parametrize("store", STORES)
def test_every_store_can_be_chosen(store: str) -> None:
    assert make("known-store", f"STORE={store}").returncode == 0
    dry = make("--dry-run", "demo", f"STORE={store}")
    assert dry.stdout.rstrip().endswith(f"spm demo --store {store}")


@pytest.mark.parametrize("store", ["ghost", "", "redis lmcache"])
def test_an_unknown_store_is_refused_before_the_installation(store: str) -> None:
    done = make("demo", f"STORE={store}", "VENV=/nonexistent", "PYTHON=false")
    assert done.returncode == 2
    assert f"error: STORE={store}: choose redis or lmcache" in done.stderr
    assert done.stdout == ""
