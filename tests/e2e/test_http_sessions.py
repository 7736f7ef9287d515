"""Sessions over HTTP: vLLM's real server, its API keys, the official ``openai`` client."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.http_server import MODEL, HttpServer, HttpServerSpec, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_CHAT = "/v1/chat/completions"
_MESSAGES: list[Any] = [{"role": "user", "content": "Name three rivers. " * 30}]
_PROTECT = {"cache_control": {"type": "ephemeral", "ttl": 300}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    spec = HttpServerSpec(extra={"host_bytes": 0, "sam": {"tenant_from_api_key": True}})
    with running(spec, tmp_path_factory.mktemp("server") / "vllm.log") as server:
        yield server


@pytest.fixture
def api(server: HttpServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.keys[0]) as client:
        yield client


def _chat(client: httpx.Client, hint: Any, **more: Any) -> httpx.Response:  # noqa: ANN401
    body = {"model": MODEL, "messages": _MESSAGES, "max_tokens": 4, "agent_hint": hint, **more}
    return client.post(_CHAT, json=body)


def test_each_endpoint_takes_a_hint(server: HttpServer, api: openai.OpenAI) -> None:
    hint = {"session_id": "endpoints/chat", **_PROTECT}
    chat = api.chat.completions.create(
        model=MODEL, messages=_MESSAGES, max_tokens=4, extra_body={"agent_hint": hint}
    )
    assert chat.model_extra is not None
    outcome = chat.model_extra["kv_transfer_params"]["spm"]
    assert (outcome["session_id"], outcome["class"]) == ("endpoints/chat", "soon")

    hint = {"session_id": "endpoints/text", "state": "waiting_user"}
    text = api.completions.create(
        model=MODEL, prompt="river " * 80, max_tokens=4, extra_body={"agent_hint": hint}
    )
    assert text.model_extra is not None
    assert text.model_extra["kv_transfer_params"]["spm"]["class"] == "later"

    hint = {"session_id": "endpoints/responses", **_PROTECT}
    api.responses.create(
        model=MODEL, input="river " * 80, max_output_tokens=4, extra_body={"agent_hint": hint}
    )
    stream = api.chat.completions.create(
        model=MODEL,
        messages=_MESSAGES,
        max_tokens=4,
        stream=True,
        extra_body={"agent_hint": {"session_id": "endpoints/stream", **_PROTECT}},
    )
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    with server.client() as client:
        listed = client.get("/v1/sessions", params={"after": "endpoints/"}).json()["data"]
    classes = {one["id"]: one["class"] for one in listed if one["id"].startswith("endpoints/")}
    assert classes == {
        "endpoints/chat": "soon",
        "endpoints/text": "later",
        "endpoints/responses": "soon",
        "endpoints/stream": "soon",
    }


def test_a_bad_hint_is_refused_by_name_or_ignored(server: HttpServer) -> None:
    with server.client() as client:
        refused = _chat(client, {"session_id": "bad", "cache_control": {"ttl": 3601}})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "agent_hint.cache_control.ttl"
        before = server.metric("spm:hints_total", outcome="malformed")
        params = {"agent_hint": {"session_id": "bad", "cache_control": {"ttl": 3601}}}
        body = {"model": MODEL, "messages": _MESSAGES, "max_tokens": 4}
        answered = client.post(_CHAT, json={**body, "kv_transfer_params": params})
        assert answered.status_code == 200
        assert server.metric("spm:hints_total", outcome="malformed") == before + 1


def test_a_manage_request_parses_like_any_answer(api: openai.OpenAI, server: HttpServer) -> None:
    with server.client() as client:
        _chat(client, {"session_id": "managed"})
    prompts = server.metric("vllm:prompt_tokens_total")
    manage = {"manage_request": True, "edits": [{"type": "evict"}, {"type": "offload"}]}
    hint = {"session_id": "managed", "context_management": manage}
    chat = api.chat.completions.create(
        model=MODEL, messages=_MESSAGES, extra_body={"agent_hint": hint}
    )
    assert chat.choices[0].message.role == "assistant"
    assert chat.usage is not None
    assert chat.usage.total_tokens == 0
    assert chat.model_extra is not None
    result = chat.model_extra["agent_hint"]
    assert result["status"] == "partial"
    assert [edit["status"] for edit in result["edits"]] == ["ok", "unsupported"]
    chunks = list(
        api.chat.completions.create(
            model=MODEL, messages=_MESSAGES, stream=True, extra_body={"agent_hint": hint}
        )
    )
    assert chunks[-1].choices[0].finish_reason == "stop"
    response = api.responses.create(model=MODEL, input="x", extra_body={"agent_hint": hint})
    assert response.output_text == ""
    assert server.metric("vllm:prompt_tokens_total") == prompts, "the model never ran"


def test_routes_manage_a_tree_of_sessions(server: HttpServer) -> None:
    with server.client() as client:
        _chat(client, {"session_id": "run/1", **_PROTECT})
        _chat(client, {"session_id": "run/1/a", "parent_session_id": "run/1", **_PROTECT})
        session = client.get("/v1/sessions/run/1").json()
        assert session["class"] == "soon"
        assert 0 < session["ttl_left_s"] <= 300
        assert session["children"] == 1
        assert session["residency"]["gpu"] == session["blocks"] > 0
        assert client.get("/v1/sessions/run/1/a").json()["parent_session_id"] == "run/1"
        edits = {"edits": [{"type": "evict", "block_start": 1, "block_end": 2}]}
        edits["operation_id"] = "op-1"  # type: ignore[assignment]
        done = client.post("/v1/sessions/run/1/edits", json=edits).json()
        assert (done["status"], done["edits"][0]["blocks"]) == ("ok", 1)
        assert client.post("/v1/sessions/run/1/edits", json=edits).json()["duplicate"]
        assert client.get("/v1/operations/op-1").json()["edits"] == done["edits"]
        ended = client.delete("/v1/sessions/run/1", params={"tree": "true"}).json()
        assert ended["ended"] == ["run/1/a", "run/1"]
        assert client.get("/v1/sessions/run/1").status_code == 404


def test_tenants_and_strangers_are_kept_out(server: HttpServer) -> None:
    assert httpx.get(f"{server.url}/v1/sessions").status_code == 401
    with server.client(0) as mine, server.client(1) as theirs:
        _chat(mine, {"session_id": "secret"})
        assert mine.get("/v1/sessions/secret").status_code == 200
        for answer in (
            theirs.get("/v1/sessions/secret"),
            theirs.delete("/v1/sessions/secret"),
            theirs.post("/v1/sessions/secret/edits", json={"edits": [{"type": "evict"}]}),
        ):
            assert answer.status_code == 404
        listed = theirs.get("/v1/sessions").json()["data"]
        assert "secret" not in {one["id"] for one in listed}
        forged = {"spm_tenant": {"id": "default", "proof": "0" * 64}}
        _chat(theirs, {"session_id": "secret"}, kv_transfer_params=forged)
        assert mine.get("/v1/sessions/secret").json()["active_requests"] == 0
        assert theirs.get("/v1/sessions/secret").status_code == 200, "their own, same name"
        theirs.delete("/v1/sessions/secret")
        assert mine.get("/v1/sessions/secret").status_code == 200


def test_a_tenant_finds_none_of_anothers_kv(server: HttpServer) -> None:
    def from_pool(client: httpx.Client) -> int:
        messages = [{"role": "user", "content": "A recipe that is nobody else's. " * 30}]
        before = server.metric("vllm:prefix_cache_hits_total")
        assert _chat(client, {"session_id": "cook"}, messages=messages).status_code == 200
        return int(server.metric("vllm:prefix_cache_hits_total") - before)

    with server.client(0) as mine, server.client(1) as theirs:
        assert [from_pool(mine), from_pool(theirs)] == [0, 0]
        assert from_pool(mine) == from_pool(theirs) > 0


def test_no_session_id_reaches_the_log(server: HttpServer) -> None:
    with server.client() as client:
        _chat(client, {"session_id": "very-secret-name", **_PROTECT})
        client.post("/v1/sessions/very-secret-name/edits", json={"edits": [{"type": "evict"}]})
    log = server.log_path.read_text()
    lines = [line for line in log.splitlines() if "very-secret-name" in line]
    assert all("POST /v1/sessions/" in line for line in lines), "but for vLLM's access log"


def test_two_api_servers_and_two_engines_are_one(tmp_path: Path) -> None:
    """Whichever server is asked, and whichever engines a session was on."""
    spec = HttpServerSpec(
        extra={"host_bytes": 0, "sam": {"tenant_from_api_key": True}},
        arguments=("--api-server-count", "2", "--data-parallel-size", "2"),
        engines=2,
    )
    with running(spec, tmp_path / "vllm.log") as server:
        for _ in range(6):
            with server.client() as client:  # a new connection, so perhaps the other server
                _chat(client, {"session_id": "x", **_PROTECT})
        for _ in range(6):
            with server.client() as client:
                session = client.get("/v1/sessions/x").json()
                assert session["class"] == "soon"
                assert session["residency"]["gpu"] == session["blocks"] > 0
            with server.client(1) as stranger:
                assert stranger.get("/v1/sessions/x").status_code == 404
        with server.client() as client:
            both = {"edits": [{"type": "evict"}], "operation_id": "once"}
            done = client.post("/v1/sessions/x/edits", json=both).json()
        assert (done["status"], done["edits"][0]["blocks"]) == ("ok", session["blocks"])
        for _ in range(4):
            with server.client() as client:
                assert client.post("/v1/sessions/x/edits", json=both).json()["duplicate"]
                assert client.get("/v1/operations/once").json()["edits"] == done["edits"]
        with server.client() as client:
            assert client.delete("/v1/sessions/x").json()["ended"] == ["x"]
        with server.client() as client:
            assert client.get("/v1/sessions").json()["data"] == []


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    return tmp_path / "vllm.log"


def test_switched_off_is_the_stock_server(temporary: Path) -> None:
    extra = {"host_bytes": 1 << 26, "sam": {"enabled": False}}
    with running(HttpServerSpec(extra), temporary) as server, server.client() as client:
        answer = _chat(client, {"session_id": "x", "cache_control": {"ttl": -1}})
        assert answer.status_code == 200, "vLLM takes unknown fields and drops them"
        assert answer.json()["kv_transfer_params"] is None
        assert client.get("/v1/sessions").status_code == 501
        assert server.metric("spm:sam_active") == 0
