"""How vLLM is started: its command line, and what happens when it does not come up."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from spm.config import SpmConfig
from spm.demo import server
from spm.demo.phases import HOST, REDIS, RESTART, Phase
from spm.demo.server import (
    ConnectorSettings,
    ServerSpec,
    ServerStartError,
    build_command,
    running_server,
)

URL = "redis://127.0.0.1:6390"
PORT = 8123


def spec(connector: ConnectorSettings | None = None) -> ServerSpec:
    return ServerSpec(Path("/models/m"), 148, Path("log"), connector, block_size=16)


def option(command: list[str], name: str) -> str:
    assert command.count(name) == 1
    return command[command.index(name) + 1]


def transfer_config(phase: Phase) -> dict[str, object]:
    command = build_command(spec(phase.connector(URL)), PORT)
    config: dict[str, object] = json.loads(option(command, "--kv-transfer-config"))
    return config


@pytest.mark.parametrize("phase", [HOST, REDIS, RESTART], ids=lambda phase: phase.name)
def test_the_connectors_settings_are_valid(phase: Phase) -> None:
    extra = transfer_config(phase)["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    config = SpmConfig.from_extra_config(extra)
    assert config.host_bytes == phase.host_bytes
    assert (config.remote.url if config.remote else None) == (URL if phase.uses_redis else None)


def test_the_connector_is_loaded_from_this_package_and_may_fail_softly() -> None:
    config = transfer_config(HOST)
    assert config["kv_connector"] == "SessionAwareConnector"
    assert config["kv_connector_module_path"] == "connectors.session_aware"
    assert config["kv_load_failure_policy"] == "recompute"


def test_without_a_connector_nothing_mentions_one() -> None:
    assert "--kv-transfer-config" not in build_command(spec(), PORT)


def test_the_connector_is_the_only_difference_between_two_servers() -> None:
    plain = build_command(spec(), PORT)
    assert build_command(spec(HOST.connector(None)), PORT)[:-2] == plain


def test_the_command_runs_this_python_and_says_what_was_asked_for() -> None:
    command = build_command(spec(), PORT)
    assert command[:2] == [sys.executable, "-m"]
    assert option(command, "--model") == "/models/m"
    assert option(command, "--port") == str(PORT)
    assert option(command, "--host") == "127.0.0.1"
    assert option(command, "--num-gpu-blocks-override") == "148"
    assert option(command, "--block-size") == "16"
    assert option(command, "--seed") == "0"


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("fpu avx2 avx512f avx512_bf16 sse", "bfloat16"),
        ("fpu amx_tile amx_bf16", "bfloat16"),
        ("fp asimd bf16 i8mm", "bfloat16"),
        ("fpu avx2 avx512f", "float32"),
        ("fpu no_avx512_bf16_here", "float32"),
        ("", "float32"),
    ],
)
def test_bf16_is_used_where_the_processor_computes_it(
    flags: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(server, "_CPU_INFO", info)
    assert option(build_command(spec(), PORT), "--dtype") == dtype


def test_a_machine_that_does_not_describe_its_processor_uses_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_CPU_INFO", tmp_path / "absent")
    assert option(build_command(spec(), PORT), "--dtype") == "bfloat16"


def test_a_server_that_ends_at_once_is_an_error_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no such model'\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(server, "_POLL_S", 0.05)

    async def run() -> None:
        async with running_server(ServerSpec(Path("m"), 148, tmp_path / "log")):
            pytest.fail("it is not healthy")

    with pytest.raises(ServerStartError, match="no such model"):
        asyncio.run(run())
