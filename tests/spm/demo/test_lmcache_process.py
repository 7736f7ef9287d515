"""The demo's own LMCache server: how it is started, and a real one that is gone afterwards."""

import asyncio
import json
import socket
import sys
from pathlib import Path

import aiohttp
import pytest

from spm.config import SpmConfig
from spm.demo import lmcache_process
from spm.demo.lmcache_process import (
    LMCacheSpec,
    LMCacheStartError,
    build_command,
    free_ports_spec,
    lmcache_installed,
    running_lmcache,
)

SPEC = LMCacheSpec(port=15555, control_port=18080, l2_url="redis://127.0.0.1:16379")


def option(command: list[str], name: str) -> str:
    assert command.count(name) == 1
    return command[command.index(name) + 1]


def test_the_command_says_what_was_asked_for_and_stays_on_loopback() -> None:
    command = build_command(SPEC)
    assert command[1] == "server"
    assert option(command, "--port") == "15555"
    assert option(command, "--http-port") == "18080"
    assert option(command, "--host") == option(command, "--http-host") == "127.0.0.1"
    assert option(command, "--l1-size-gb") == "1"
    adapter = json.loads(option(command, "--l2-adapter"))
    assert adapter == {"type": "resp", "host": "127.0.0.1", "port": 16379}


def test_without_a_redis_there_is_no_second_tier() -> None:
    spec = LMCacheSpec(port=1, control_port=2)
    assert "--l2-adapter" not in build_command(spec)
    assert "l2_url" not in spec.store_settings()


@pytest.mark.parametrize("l2_url", [None, "redis://127.0.0.1:16379"])
def test_its_settings_are_valid(l2_url: str | None) -> None:
    settings = LMCacheSpec(1, 2, l2_url=l2_url).store_settings()
    config = SpmConfig.from_extra_config({"store": settings})
    assert config.store is not None
    assert config.store.l2_url == (l2_url or "")


def test_every_server_has_ports_of_its_own() -> None:
    specs = [free_ports_spec() for _ in range(4)]
    ports = {port for spec in specs for port in (spec.port, spec.control_port)}
    assert len(ports) == 8


def test_the_command_beside_this_python_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lmcache").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert build_command(SPEC)[0] == str(tmp_path / "lmcache")


def test_a_server_that_ends_at_once_is_an_error_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "lmcache"
    command.write_text("#!/bin/sh\necho 'no such policy'\nexit 1\n")
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(lmcache_process, "_POLL_S", 0.02)

    async def run() -> None:
        async with running_lmcache(SPEC, tmp_path / "log"):
            pytest.fail("it does not answer")

    with pytest.raises(LMCacheStartError, match="no such policy"):
        asyncio.run(run())


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.e2e
@pytest.mark.skipif(not lmcache_installed(), reason="LMCache is not installed")
def test_it_answers_inside_the_block_and_is_gone_afterwards(tmp_path: Path) -> None:
    spec = free_ports_spec()

    async def run() -> None:
        async with running_lmcache(spec, tmp_path / "log"), aiohttp.ClientSession() as http:
            async with http.get(f"{spec.control_url}/status") as response:
                assert (await response.json())["chunk_size"] == spec.chunk_tokens
            assert is_listening(spec.port)

    asyncio.run(run())
    assert not is_listening(spec.port)
    assert not is_listening(spec.control_port)
