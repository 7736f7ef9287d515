"""Child processes are gone afterwards, whatever they and we do."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spm.demo.process import ManagedProcess, free_port
from tests.processes import (
    DEADLINE_S,
    end_leftovers,
    is_running,
    pids_in,
    wait_until,
    wait_until_gone,
)

FAMILY = 'sleep 300 & echo $! >> "$PIDS"; echo $$ >> "$PIDS"; wait'
"""A shell and the child it starts."""

DEAF = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: open(os.environ["ASKED"], "a").close())
with open(os.environ["PIDS"], "a") as pids:
    print(os.getpid(), file=pids)
while True:
    time.sleep(300)
"""
"""Notes that it was asked to end, and stays."""


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "pids"
    yield path
    end_leftovers(path)


def shell(script: str, tmp_path: Path, grace_s: float = DEADLINE_S) -> ManagedProcess:
    env = {"PIDS": str(tmp_path / "pids")}
    return ManagedProcess(["sh", "-c", script], tmp_path / "log", env, grace_s)


def deaf(tmp_path: Path, grace_s: float) -> ManagedProcess:
    env = {"PIDS": str(tmp_path / "pids"), "ASKED": str(tmp_path / "asked")}
    return ManagedProcess([sys.executable, "-S", "-c", DEAF], tmp_path / "log", env, grace_s)


def test_child_and_grandchild_are_gone_after_stop(tmp_path: Path, pids: Path) -> None:
    with shell(FAMILY, tmp_path) as process:
        family = pids_in(pids, 2)
        assert process.pid in family
        assert all(is_running(pid) for pid in family)
        process.stop()
        wait_until_gone(family)


def test_child_and_grandchild_are_gone_after_the_block(tmp_path: Path, pids: Path) -> None:
    with shell(FAMILY, tmp_path):
        family = pids_in(pids, 2)
    wait_until_gone(family)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_child_and_grandchild_are_gone_after_an_exception(
    kind: type[BaseException], tmp_path: Path, pids: Path
) -> None:
    def fail() -> None:
        with shell(FAMILY, tmp_path):
            pids_in(pids, 2)
            raise kind

    with pytest.raises(kind):
        fail()
    wait_until_gone(pids_in(pids, 2))


def test_a_grandchild_whose_parent_has_ended_by_itself_is_gone(tmp_path: Path, pids: Path) -> None:
    orphaning = 'sleep 300 & echo $! >> "$PIDS"; exit 3'
    with shell(orphaning, tmp_path) as process:
        (grandchild,) = pids_in(pids, 1)
        wait_until(lambda: process.exit_code == 3, "the child's own end")
        assert is_running(grandchild)
    wait_until_gone([grandchild])


def test_a_child_is_asked_first_and_may_clean_up(tmp_path: Path, pids: Path) -> None:
    tidy = (
        "trap 'echo tidied up; kill $!; exit 0' TERM; "
        'sleep 300 & echo $$ >> "$PIDS"; while true; do wait; done'
    )
    with shell(tidy, tmp_path) as process:
        pids_in(pids, 1)
    assert "tidied up" in process.log_tail()


def test_a_child_that_ignores_the_request_is_killed_after_the_grace_period(
    tmp_path: Path, pids: Path
) -> None:
    with deaf(tmp_path, grace_s=0.3) as process:
        child = pids_in(pids, 1)
        started_s = time.monotonic()
        process.stop()
        took_s = time.monotonic() - started_s
    assert (tmp_path / "asked").exists()
    assert 0.3 <= took_s < DEADLINE_S
    assert not is_running(child[0])


def test_an_interrupt_cuts_the_grace_period_short_and_leaves_nothing(
    tmp_path: Path, pids: Path
) -> None:
    def impatient(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    def interrupt_while_it_is_waited_for() -> None:
        wait_until((tmp_path / "asked").exists, "the child being asked to end")
        os.kill(os.getpid(), signal.SIGUSR1)

    interrupter = threading.Thread(target=interrupt_while_it_is_waited_for)
    previous = signal.signal(signal.SIGUSR1, impatient)
    try:
        with deaf(tmp_path, grace_s=2 * DEADLINE_S) as process:
            (child,) = pids_in(pids, 1)
            interrupter.start()
            with pytest.raises(KeyboardInterrupt):
                process.stop()
            assert not is_running(child)
    finally:
        interrupter.join()
        signal.signal(signal.SIGUSR1, previous)


def test_stopping_twice_or_before_the_start_does_nothing(tmp_path: Path, pids: Path) -> None:
    process = shell(FAMILY, tmp_path)
    process.stop()
    with process:
        family = pids_in(pids, 2)
        process.stop()
        process.stop()
    wait_until_gone(family)


def test_it_has_a_group_and_session_of_its_own_out_of_reach_of_the_terminal(
    tmp_path: Path, pids: Path
) -> None:
    with shell(FAMILY, tmp_path) as process:
        assert {os.getpgid(pid) for pid in pids_in(pids, 2)} == {process.pid}
        assert os.getsid(process.pid) == process.pid


def test_the_exit_code_appears_when_it_ends(tmp_path: Path, pids: Path) -> None:
    with shell("exit 7", tmp_path) as process:
        wait_until(lambda: process.exit_code is not None, "an exit code")
        assert process.exit_code == 7
    with shell(FAMILY, tmp_path) as process:
        pids_in(pids, 2)
        assert process.exit_code is None


def test_the_log_has_both_outputs_and_its_tail_is_short(tmp_path: Path) -> None:
    script = "seq 1000; printf 'bad \\377 byte\\n' >&2"
    with shell(script, tmp_path) as process:
        wait_until(lambda: process.exit_code == 0, "its end")
    tail = process.log_tail().splitlines()
    assert tail[-2:] == ["1000", "bad � byte"]
    assert len(tail) < 100


def test_a_free_port_can_be_listened_on() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
        listener.listen()
