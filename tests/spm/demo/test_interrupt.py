"""Interrupting the real command: it exits with 130, and everything it started is gone.

The server is a fake ``vllm`` package that starts a child of its own and never becomes healthy.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes import (
    DEADLINE_S,
    end_leftovers,
    is_running,
    pids_in,
    wait_until,
    wait_until_gone,
)
from tests.redis_server import EXECUTABLE

ROOT = Path(__file__).parents[3]
SLEEPING_SERVER = """
import os, signal, subprocess, time
if "DEAF" in os.environ:
    signal.signal(signal.SIGTERM, lambda *_: open(os.environ["DEAF"], "a").close())
child = subprocess.Popen(["sleep", "300"])
with open(os.environ["PIDS"], "a") as pids:
    print(os.getpid(), child.pid, sep="\\n", file=pids)
while True:
    time.sleep(300)
"""
LAUNCHER = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    ignored = str(int(number)) == sys.argv[1]
    signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Whatever the tests themselves were started with."""

SLEEPING_BUILDER = """#!/bin/sh
echo $$ >> "$PIDS"
exec sleep 300
"""


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "pids"
    yield path
    end_leftovers(path)


@pytest.fixture
def environment(tmp_path: Path, pids: Path) -> dict[str, str]:
    package = tmp_path / "path" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for directory in (package, package.parent, package.parent.parent):
        (directory / "__init__.py").touch()
    (package / "api_server.py").write_text(SLEEPING_SERVER)
    path = f"{tmp_path / 'path'}:{ROOT}"
    return {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path), "PIDS": str(pids)}


@contextmanager
def running_demo(
    tmp_path: Path, env: dict[str, str], ignoring: int = 0, phases: str = "host"
) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "spm.cli", "demo", "--phases", phases]
    command += ["--model", str(tmp_path)]
    with started(command, tmp_path, env, ignoring) as demo:
        yield demo


@contextmanager
def started(
    command: list[str], tmp_path: Path, env: dict[str, str], ignoring: int = 0
) -> Iterator["subprocess.Popen[str]"]:
    """A command that may have one signal ignored from the beginning."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", LAUNCHER, str(int(ignoring)), *command],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        try:
            yield demo
        finally:
            demo.kill()


def outcome(demo: "subprocess.Popen[str]") -> tuple[int, str]:
    """Exit code and standard error."""
    _, err = demo.communicate(timeout=DEADLINE_S)
    return demo.returncode, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_server_and_its_children(
    number: signal.Signals, tmp_path: Path, pids: Path, environment: dict[str, str]
) -> None:
    with running_demo(tmp_path, environment) as demo:
        children = pids_in(pids, 2)
        assert all(is_running(pid) for pid in children)
        demo.send_signal(number)
        code, err = outcome(demo)
    wait_until_gone(children)
    assert code == 130
    assert err.strip() == "interrupted"


@pytest.mark.e2e
@pytest.mark.skipif(EXECUTABLE is None, reason="redis-server is not installed")
def test_redis_is_stopped_too(tmp_path: Path, pids: Path, environment: dict[str, str]) -> None:
    binaries = tmp_path / "bin"
    binaries.mkdir()
    recording = binaries / "redis-server"
    real = '"$(PATH=${PATH#*:} command -v redis-server)"'
    recording.write_text(f'#!/bin/sh\necho $$ > "$REDIS_PID"\nexec {real} "$@"\n')
    recording.chmod(0o755)
    redis_pid = tmp_path / "redis.pid"
    environment |= {
        "PATH": f"{binaries}:{environment['PATH']}",
        "REDIS_PID": str(redis_pid),
    }
    with running_demo(tmp_path, environment, phases="redis") as demo:
        children = pids_in(pids, 2) + pids_in(redis_pid, 1)
        assert all(is_running(pid) for pid in children)
        demo.send_signal(signal.SIGTERM)
        code, _ = outcome(demo)
    wait_until_gone(children)
    assert code == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_wait_for_a_server_that_will_not_end(
    number: signal.Signals, tmp_path: Path, pids: Path, environment: dict[str, str]
) -> None:
    asked = tmp_path / "asked"
    environment["DEAF"] = str(asked)
    with running_demo(tmp_path, environment) as demo:
        children = pids_in(pids, 2)
        demo.send_signal(number)
        wait_until(asked.exists, "the server being asked to end")
        assert demo.poll() is None
        demo.send_signal(number)
        _, err = demo.communicate(timeout=10.0)  # half of what the server would be given
    wait_until_gone(children)
    assert demo.returncode == 130
    assert "Traceback" not in err


def test_sigterm_also_ends_a_background_job_that_ignores_ctrl_c(
    tmp_path: Path, pids: Path, environment: dict[str, str]
) -> None:
    """A script's shell lets what it starts with ``&`` ignore SIGINT."""
    with running_demo(tmp_path, environment, ignoring=signal.SIGINT) as demo:
        children = pids_in(pids, 2)
        demo.send_signal(signal.SIGTERM)
        code, _ = outcome(demo)
    wait_until_gone(children)
    assert code == 130


def ignored_signals(pid: int) -> set[int]:
    (line,) = re.findall(r"^SigIgn:\t(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    mask = int(line, base=16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


@pytest.mark.parametrize("ignored", [True, False])
def test_a_hangup_stays_ignored_for_what_was_started_with_nohup(
    ignored: bool, tmp_path: Path, pids: Path, environment: dict[str, str]
) -> None:
    ignoring = signal.SIGHUP if ignored else 0
    with running_demo(tmp_path, environment, ignoring) as demo:
        children = pids_in(pids, 2)
        assert (signal.SIGHUP in ignored_signals(demo.pid)) is ignored
        demo.send_signal(signal.SIGTERM)
        assert outcome(demo)[0] == 130
    wait_until_gone(children)


def test_sigterm_while_the_model_is_built_stops_the_builder_and_leaves_no_model(
    tmp_path: Path, pids: Path, environment: dict[str, str]
) -> None:
    """A first run: ``sys.executable`` is a builder that never gets done."""
    builder = tmp_path / "python"
    builder.write_text(SLEEPING_BUILDER)
    builder.chmod(0o755)
    environment["SPM_CACHE_DIR"] = str(tmp_path / "cache")
    code = (
        f"import sys; sys.executable = {str(builder)!r}\n"
        "from spm.cli import main; sys.exit(main(['demo']))"
    )
    with started([sys.executable, "-c", code], tmp_path, environment) as demo:
        (child,) = pids_in(pids, 1)
        demo.send_signal(signal.SIGTERM)
        exit_code, err = outcome(demo)
    wait_until_gone([child])
    assert exit_code == 130
    assert "Traceback" not in err
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]
