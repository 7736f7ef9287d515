"""The ``spm`` command: exit codes, and which stream says what."""

import re
from pathlib import Path

import pytest

from spm import cli
from spm.cli import main
from spm.demo.runner import DemoOptions
from spm.errors import SpmError


@pytest.fixture
def demo_runs(monkeypatch: pytest.MonkeyPatch) -> list[DemoOptions]:
    """What the demo was asked for, in place of running it."""
    runs: list[DemoOptions] = []

    def run_demo(options: DemoOptions) -> int:
        runs.append(options)
        return 0

    monkeypatch.setattr(cli, "run_demo", run_demo)
    return runs


def let_demo(monkeypatch: pytest.MonkeyPatch, outcome: BaseException | int) -> None:
    def run_demo(_options: DemoOptions) -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(cli, "run_demo", run_demo)


def usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("phases", ["nonsense", "host,nonsense", "reference", "host,", ""])
def test_an_unknown_phase_is_refused_with_the_known_names(
    phases: str, demo_runs: list[DemoOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    message = usage_error(["demo", "--phases", phases], capsys)
    assert "choose from recompute, host, redis, restart" in message
    assert demo_runs == []


def test_the_refusal_quotes_what_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    message = usage_error(["demo", "--phases", "host,ghost"], capsys)
    assert "--phases ghost:" in message


def test_phases_and_model_reach_the_demo(demo_runs: list[DemoOptions]) -> None:
    assert main(["demo", "--phases", "host,restart", "--model", "/models/m"]) == 0
    assert demo_runs == [DemoOptions(phases=["host", "restart"], model=Path("/models/m"))]


@pytest.mark.parametrize("store", ["redis", "lmcache"])
def test_the_store_reaches_the_demo(store: str, demo_runs: list[DemoOptions]) -> None:
    assert main(["demo", "--store", store]) == 0
    assert demo_runs == [DemoOptions(store=store)]


def test_an_unknown_store_is_refused_with_the_known_names(
    demo_runs: list[DemoOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    message = usage_error(["demo", "--store", "ghost"], capsys)
    assert "--store" in message
    assert "'ghost' (choose from 'redis', 'lmcache')" in message
    assert demo_runs == []


def test_phases_are_those_of_the_store(
    demo_runs: list[DemoOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--store", "lmcache", "--phases", "lmcache"]) == 0
    assert demo_runs == [DemoOptions(store="lmcache", phases=["lmcache"])]
    message = usage_error(["demo", "--phases", "lmcache"], capsys)
    assert "choose from recompute, host, redis, restart" in message
    message = usage_error(["demo", "--store", "lmcache", "--phases", "host"], capsys)
    assert "choose from recompute, lmcache, restart" in message


def test_by_default_all_phases_run_on_the_models_own_build(demo_runs: list[DemoOptions]) -> None:
    assert main(["demo"]) == 0
    assert demo_runs == [DemoOptions(phases=None, model=None)]


@pytest.mark.parametrize("code", [0, 1])
def test_the_demos_verdict_is_the_exit_code(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    let_demo(monkeypatch, code)
    assert main(["demo"]) == code


def test_a_foreseen_error_is_one_message_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    let_demo(monkeypatch, SpmError("vLLM did not start"))
    assert main(["demo"]) == 1
    assert capsys.readouterr() == ("", "error: vLLM did not start\n")


def test_a_defect_is_not_dressed_up_as_a_foreseen_error(monkeypatch: pytest.MonkeyPatch) -> None:
    let_demo(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["demo"])


def test_an_interrupt_is_exit_code_130_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    let_demo(monkeypatch, KeyboardInterrupt())
    assert main(["demo"]) == 130
    captured = capsys.readouterr()
    assert captured.err.strip() == "interrupted"
    assert captured.out == ""


def test_version_names_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert re.fullmatch(r"vllm-spm \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


@pytest.mark.parametrize("argv", [[], ["demonstrate"], ["version", "--phases", "host"]])
def test_anything_else_is_a_usage_error(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert usage_error(argv, capsys).startswith("usage: spm")
