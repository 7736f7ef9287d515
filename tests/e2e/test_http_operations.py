"""Operations over HTTP: the client and the command line, at vLLM's real server and Redis."""

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis as redis_py

from spm.cli import main
from spm.client import Session, SpmClient
from tests.e2e.conversations import tokens
from tests.e2e.http_server import MODEL, HttpServer, HttpServerSpec, running
from tests.redis_server import EXECUTABLE, RedisServer, running_redis

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_BLOCK, _POOL_BLOCKS = 32, 64
_PASSWORD = "very-secret-word"
_PROMPT_TOKENS, _FULL_TOKENS, _FULL_BLOCKS = 300, 288, 9
_PROTECT = {"cache_control": {"type": "ephemeral", "ttl": 300}}
_PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def redis_with_password() -> Iterator[RedisServer]:
    if EXECUTABLE is None:
        pytest.skip("no redis-server on the path")
    with running_redis() as redis:
        with redis.client() as client:
            client.config_set("requirepass", _PASSWORD)
        yield redis


@pytest.fixture(scope="module")
def server(
    redis_with_password: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpServer]:
    url = f"redis://:{_PASSWORD}@127.0.0.1:{redis_with_password.port}"
    extra = {
        "host_bytes": 256 << 20,
        "remote": {"kind": "redis", "url": url},
        "save": "sessions",
        "keep_alive": {"delete_grace_s": 0},
    }
    spec = HttpServerSpec(extra=extra, pool_blocks=_POOL_BLOCKS)
    with running(spec, tmp_path_factory.mktemp("server") / "vllm.log") as server:
        yield server


@pytest.fixture
def spm(server: HttpServer) -> Iterator[SpmClient]:
    with SpmClient(f"{server.url}/v1", server.keys[0]) as client:
        yield client


def _complete(server: HttpServer, prompt: list[int], session: str | None = None) -> dict[str, Any]:
    """What is said of the session in the answer to one request."""
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
    if session is not None:
        body["agent_hint"] = {"session_id": session, **_PROTECT}
    with server.client() as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    outcome: dict[str, Any] = (answer.json()["kv_transfer_params"] or {}).get("spm", {})
    return outcome


def _prompt(seed: int) -> list[int]:
    return tokens(random.Random(seed), _PROMPT_TOKENS)


def _overwrite(server: HttpServer, seed: int) -> None:
    """More new blocks than the pool has."""
    rng = random.Random(seed)
    for _ in range(3):
        _complete(server, tokens(rng, 900))


def _tiers(session: Session) -> tuple[int, int, int]:
    where = session.residency
    assert where is not None
    return where.gpu_blocks, where.host_blocks, where.remote_blocks


def _spm(capsys: pytest.CaptureFixture[str], server: HttpServer, *words: str) -> Any:  # noqa: ANN401
    """What the command line prints as JSON."""
    code = main([*words, "--json", "--url", server.url, "--api-key", server.keys[0]])
    assert code == 0
    return json.loads(capsys.readouterr().out)


def test_offload_and_prefetch_by_the_client(server: HttpServer, spm: SpmClient) -> None:
    _complete(server, _prompt(10), "agent")
    blocks = _FULL_BLOCKS
    answer = spm.offload("agent")
    assert spm.wait(answer.operation_id).status == "ok"
    assert _tiers(spm.get_session("agent")) == (blocks, blocks, blocks)
    _overwrite(server, 1)
    away = spm.get_session("agent")
    assert _tiers(away) == (0, blocks, blocks)
    assert away.residency is not None
    ranges = [(r.block_start, r.block_end, r.tiers) for r in away.residency.ranges]
    assert ranges == [(0, blocks, ("host", "remote"))]

    answer = spm.prefetch("agent")
    done = spm.wait(answer.operation_id)
    assert (done.status, done.edits[0].done_blocks) == ("ok", blocks)
    back = spm.get_session("agent")
    assert _tiers(back) == (blocks, blocks, blocks)
    assert back.residency is not None
    assert [r.tiers for r in back.residency.ranges] == [("gpu", "host", "remote")]
    outcome = _complete(server, _prompt(10), "agent")
    assert (outcome["gpu_tokens"], outcome["host_tokens"], outcome["remote_tokens"]) == (
        _FULL_TOKENS,
        0,
        0,
    )


def test_an_idle_engine_carries_a_prefetch_out_by_itself(
    server: HttpServer, spm: SpmClient
) -> None:
    """Only the API server's metrics are looked at meanwhile: nothing makes the engine step."""
    _complete(server, _prompt(11), "idle")
    assert spm.wait(spm.offload("idle").operation_id).status == "ok"
    _overwrite(server, 2)
    before = server.metric("spm:loaded_blocks_total")
    answer = spm.prefetch("idle")
    assert answer.status == "accepted"
    give_up_s = time.monotonic() + _PATIENCE_S
    while server.metric("spm:loaded_blocks_total") < before + _FULL_BLOCKS:
        assert time.monotonic() < give_up_s, "nothing moves"
        time.sleep(0.05)
    done = spm.operation(answer.operation_id)
    assert (done.done, done.status) == (True, "ok")


def test_the_command_line_and_the_status(
    server: HttpServer,
    spm: SpmClient,
    redis_with_password: RedisServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _complete(server, _prompt(12), "cli")
    blocks = _FULL_BLOCKS
    listed = _spm(capsys, server, "sessions")["data"]
    assert "cli" in {one["id"] for one in listed}
    assert _spm(capsys, server, "offload", "cli", "--wait")["status"] == "ok"
    session = _spm(capsys, server, "session", "cli")
    assert session["residency"]["remote"] == blocks
    assert session["origin"] == "local"
    assert _spm(capsys, server, "prefetch", "cli", "--wait")["edits"][0]["done_blocks"] == blocks

    status = _spm(capsys, server, "status")
    (engine,) = status["engines"]
    tiers, capabilities = engine["tiers"], engine["capabilities"]
    assert tiers["gpu"]["blocks"] == _POOL_BLOCKS - 1
    assert blocks <= tiers["gpu"]["protected_blocks"] <= tiers["gpu"]["blocks"] // 2
    assert tiers["host"]["blocks"] >= blocks
    assert tiers["remote"]["url"] == f"redis://127.0.0.1:{redis_with_password.port}"
    assert (tiers["remote"]["kind"], tiers["remote"]["breaker"]) == ("redis", "closed")
    assert tiers["remote"]["known_blocks"] >= blocks
    assert all(capabilities[name] for name in ("offload", "prefetch", "delete", "manifests"))
    assert engine["keep_alive"]["keys"] >= blocks
    assert engine["operations"] == engine["active_requests"] == 0
    assert _PASSWORD not in json.dumps(status)
    assert spm.status().engines[0].sessions == engine["sessions"] > 0


def test_what_is_evicted_is_gone_from_the_store(
    server: HttpServer, spm: SpmClient, redis_with_password: RedisServer
) -> None:
    _complete(server, _prompt(13), "last")
    for session in spm.iter_sessions():
        assert spm.wait(spm.evict(session.id).operation_id).status in ("ok", "not_found")
    port = redis_with_password.port
    give_up_s = time.monotonic() + _PATIENCE_S
    with redis_py.Redis(port=port, password=_PASSWORD, protocol=2) as client:
        while [name for name in client.scan_iter() if b":manifest:" not in name]:
            assert time.monotonic() < give_up_s
            time.sleep(0.1)
