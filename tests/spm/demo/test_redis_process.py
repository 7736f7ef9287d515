"""The demo's own Redis: a real server that is gone afterwards."""

import asyncio
import socket
import threading
from pathlib import Path

import pytest
import redis

from spm.demo import redis_process
from spm.demo.redis_process import DemoRedis, RedisStartError, redis_installed, running_redis
from tests.processes import wait_until
from tests.redis_server import EXECUTABLE

needs_redis = pytest.mark.skipif(EXECUTABLE is None, reason="redis-server is not installed")


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.e2e
@needs_redis
def test_it_answers_inside_the_block_and_is_gone_afterwards(tmp_path: Path) -> None:
    async def run() -> DemoRedis:
        async with running_redis(tmp_path) as server:
            with redis.Redis.from_url(server.url) as client:
                client.set("key", "value")
                assert client.get("key") == b"value"
                assert is_listening(server.port)
                assert client.config_get("bind")["bind"] == "127.0.0.1"
        return server

    server = asyncio.run(run())
    assert not is_listening(server.port)
    assert [path.name for path in tmp_path.iterdir()] == ["redis.log"], "nothing is saved"


@pytest.mark.e2e
@needs_redis
def test_it_is_gone_after_a_failure_in_the_block(tmp_path: Path) -> None:
    ports: list[int] = []

    async def run() -> None:
        async with running_redis(tmp_path) as server:
            ports.append(server.port)
            raise LookupError

    with pytest.raises(LookupError):
        asyncio.run(run())
    assert not is_listening(ports[0])


@pytest.mark.e2e
@needs_redis
def test_a_server_that_cannot_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(port: int) -> None:
        monkeypatch.setattr(redis_process, "free_port", lambda: port)
        async with running_redis(tmp_path):
            pytest.fail("it started")

    with pytest.raises(RedisStartError, match="port"):
        asyncio.run(run(port=99_999_999))


@pytest.mark.e2e
@needs_redis
def test_waiting_for_quiet_outlasts_writes_and_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_process, "_POLL_S", 0.02)
    monkeypatch.setattr(redis_process, "_QUIET_S", 0.3)
    keys = 8

    async def run() -> int:
        async with running_redis(tmp_path) as server:
            pause = threading.Event()

            def write() -> None:
                with redis.Redis(port=server.port) as client:
                    for number in range(keys):
                        client.set(f"key {number}", "value")
                        pause.wait(0.06)

            writer = threading.Thread(target=write)
            writer.start()
            try:
                with redis.Redis(port=server.port) as client:
                    wait_until(lambda: bool(client.dbsize()), "the first key")
                return await server.wait_quiet()
            finally:
                writer.join()

    assert asyncio.run(run()) == keys


@pytest.mark.e2e
@needs_redis
def test_writes_without_end_are_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_process, "_POLL_S", 0.02)
    monkeypatch.setattr(redis_process, "_QUIET_S", 20.0)
    monkeypatch.setattr(redis_process, "_QUIET_TIMEOUT_S", 0.2)

    async def run() -> int:
        async with running_redis(tmp_path) as server:
            return await asyncio.wait_for(server.wait_quiet(), timeout=10.0)

    assert asyncio.run(run()) == 0


def test_whether_it_is_installed_depends_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not redis_installed()
    (tmp_path / "redis-server").write_text("#!/bin/sh\n")
    (tmp_path / "redis-server").chmod(0o755)
    assert redis_installed()
