"""What the middleware lets through, changes and refuses, seen as an ASGI server sees it."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from spm.config import SamConfig
from spm.hints import DEFAULT_TENANT
from spm.http.engine import EngineOperations
from spm.http.frontend import Frontend, Unavailable, store
from spm.http.middleware import ENDPOINTS, AgentHintMiddleware
from spm.http.tenants import RequestTenants
from spm.tenancy import TenantVerifier, tenant_salt
from tests.spm.http.fake_engine import FakeEngineClient
from tests.spm.http.server_under_test import Server, browsing, run, start
from tracker.ids import TenantId

SECRET = bytes(range(32))
CHAT = "/v1/chat/completions"
HINT = {"session_id": "s"}
DISCONNECT: Message = {"type": "http.disconnect"}


class State:
    """Where an application keeps things."""


class Application:
    """Reads its whole body, then waits for the client's disconnect if told to."""

    def __init__(self, frontend: Frontend | Unavailable | None, *, wait: bool = False) -> None:
        self.state = State()
        if frontend is not None:
            store(frontend, self.state)
        self.wait = wait
        self.body: bytes | None = None
        self.chunks: list[int] = []
        self.headers: list[tuple[bytes, bytes]] = []
        self.left = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left = True
                return
            body += message.get("body", b"")
            self.chunks.append(len(message.get("body", b"")))
            if not message.get("more_body", False):
                break
        self.body, self.headers = bytes(body), list(scope["headers"])
        if self.wait:
            self.left = (await receive())["type"] == "http.disconnect"
        scope["route"] = "found"


def frontend(sam: SamConfig | None = None, secret: bytes | None = SECRET) -> Frontend:
    settings = sam or SamConfig()
    client = FakeEngineClient()
    return Frontend(settings, EngineOperations(client), RequestTenants(settings, secret))


def chunked(body: bytes, sizes: Sequence[int] = ()) -> list[Message]:
    """``body`` in chunks of ``sizes``, then the rest."""
    messages: list[Message] = []
    for size in sizes:
        messages.append({"type": "http.request", "body": body[:size], "more_body": True})
        body = body[size:]
    return [*messages, {"type": "http.request", "body": body}]


def scope_of(app: Application, path: str = CHAT, **fields: Any) -> Scope:  # noqa: ANN401
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"7")],
        "app": app,
        **fields,
    }


def exchange(
    app: Application, scope: Scope, messages: list[Message], limit: int = 1 << 20
) -> list[Message]:
    """Send ``messages`` through the middleware; what came back. More is never received."""
    sent: list[Message] = []
    pending = list(messages)

    async def receive() -> Message:
        return pending.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    async def scenario() -> None:
        await AgentHintMiddleware(app, limit_bytes=limit)(scope, receive, send)

    run(scenario)
    return sent


@given(st.binary(max_size=200), st.lists(st.integers(0, 50), max_size=5), st.integers(1, 200))
def test_bodies_of_no_concern_pass_byte_for_byte(body: bytes, sizes: list[int], limit: int) -> None:
    app = Application(frontend())
    scope = scope_of(app)
    headers = list(scope["headers"])
    assert exchange(app, scope, chunked(body, sizes), limit) == []
    assert app.body == body
    assert app.headers == headers


@given(st.lists(st.integers(0, 50), max_size=5))
def test_a_hint_moves_whatever_the_chunks(sizes: list[int]) -> None:
    app = Application(frontend())
    scope = scope_of(app)
    body = json.dumps({"prompt": "\ud83d\ude00\ud800", "agent_hint": HINT}).encode()
    exchange(app, scope, chunked(body, sizes))
    assert app.body is not None
    assert json.loads(app.body) == {
        "prompt": "\U0001f600\ud800",
        "kv_transfer_params": {"agent_hint": HINT},
    }
    assert app.headers == [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(app.body)).encode()),
    ]
    assert scope["route"] == "found"


def test_a_chunked_request_gets_a_length() -> None:
    app = Application(frontend())
    headers = [(b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")]
    body = json.dumps({"agent_hint": HINT}).encode()
    exchange(app, scope_of(app, headers=headers), chunked(body, [3]))
    assert app.body is not None
    assert dict(app.headers)[b"content-length"] == str(len(app.body)).encode()
    assert b"transfer-encoding" not in dict(app.headers)


@pytest.mark.parametrize("document", [{"prompt": "x"}, {"agent_hint": HINT}])
def test_the_application_still_sees_the_client_leave(document: dict[str, Any]) -> None:
    app = Application(frontend(), wait=True)
    body = json.dumps(document).encode()
    exchange(app, scope_of(app), [*chunked(body, [2]), DISCONNECT])
    assert app.body is not None
    assert app.left


def test_a_client_that_leaves_within_its_body() -> None:
    app = Application(frontend())
    started = [{"type": "http.request", "body": b'{"agent_hint":', "more_body": True}, DISCONNECT]
    assert exchange(app, scope_of(app), started) == []
    assert app.left
    assert app.body is None


def test_a_body_above_the_bound_passes_without_being_read_to_its_end() -> None:
    app = Application(frontend())
    body = json.dumps({"agent_hint": {"session_id": 5}, "prompt": "x" * 100}).encode()
    assert exchange(app, scope_of(app), chunked(body, [10, 20, 30]), limit=25) == []
    assert app.body == body
    assert app.chunks == [30, 30, len(body) - 60]  # what was read, then what was not


def test_a_tenants_body_above_the_bound_is_refused() -> None:
    """Passed on, it would run as the default tenant."""
    app = Application(frontend(SamConfig(tenant_header="X-Tenant")))
    headers = [(b"content-type", b"application/json"), (b"x-tenant", b"a")]
    sent = exchange(app, scope_of(app, headers=headers), chunked(b"x" * 100, [50, 10]), limit=25)
    assert sent[0]["status"] == 413
    assert app.body is None


@pytest.mark.parametrize("path", ["/v1/chat/completions/batch", "/invocations", "/v1/embeddings"])
@pytest.mark.parametrize("kind", [b"application/json", b"text/plain", b""])
def test_no_other_route_takes_a_tenants_salt(path: str, kind: bytes) -> None:
    bobs = tenant_salt(TenantId("bob"), None)
    body = json.dumps({"requests": [{"cache_salt": bobs, "prompt": "x"}], "cache_salt": bobs})
    app = Application(frontend(SamConfig(tenant_header="X-Tenant")))
    scope = scope_of(app, path, headers=[(b"content-type", kind)])
    assert exchange(app, scope, chunked(body.encode(), [7])) == []
    assert app.body is not None
    assert bobs.encode() not in app.body
    own = tenant_salt(DEFAULT_TENANT, bobs)
    expected = {"requests": [{"cache_salt": own, "prompt": "x"}], "cache_salt": own}
    assert json.loads(app.body) == expected
    assert dict(scope["headers"])[b"content-length"] == b"%d" % len(app.body)


def test_other_routes_pass_byte_for_byte_otherwise() -> None:
    app = Application(frontend(SamConfig(tenant_header="X-Tenant")))
    body = b'{ "input" : "say \\"cache_salt\\"" }'
    for kind in (b"application/json", b"multipart/form-data; boundary=x"):
        scope = scope_of(app, "/v1/embeddings", headers=[(b"content-type", kind)])
        assert exchange(app, scope, chunked(body)) == []
        assert app.body == body


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    ("root_path", "prefix"), [("", ""), ("/api", "/api"), ("/api", ""), ("/a/b", "/a/b")]
)
def test_all_endpoints_under_any_root_path(path: str, root_path: str, prefix: str) -> None:
    app = Application(frontend())
    scope = scope_of(app, prefix + path, root_path=root_path)
    sent = exchange(app, scope, chunked(b'{"agent_hint":5}'))
    assert sent[0]["status"] == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"path": "/v1/embeddings"},
        {"path": "/v1/chat/completions/render"},
        {"path": "/apix/v1/completions", "root_path": "/api"},
        {"method": "PUT"},
        {"type": "websocket"},
        {"headers": [(b"content-type", b"text/plain")]},
        {"headers": []},
    ],
)
def test_requests_that_are_not_looked_at(fields: dict[str, Any]) -> None:
    app = Application(frontend())
    body = b'{"agent_hint":5}'
    assert exchange(app, scope_of(app, **fields), chunked(body)) == []
    assert app.body == body


@pytest.mark.parametrize("media_type", [b"Application/JSON", b"application/json; charset=utf-8"])
def test_spellings_of_json(media_type: bytes) -> None:
    app = Application(frontend())
    scope = scope_of(app, headers=[(b"content-type", media_type)])
    assert exchange(app, scope, chunked(b'{"agent_hint":5}'))[0]["status"] == 400


@pytest.mark.parametrize("off", [None, Unavailable("set this")])
def test_switched_off_nothing_is_looked_at(off: Unavailable | None) -> None:
    app = Application(off)
    body = b'{"agent_hint":5,"kv_transfer_params":{"spm_tenant":1}}'
    assert exchange(app, scope_of(app), chunked(body, [4])) == []
    assert app.body == body


def test_an_application_without_state_is_left_alone() -> None:
    app = Application(frontend())
    scope = scope_of(app)
    del scope["app"]
    assert exchange(app, scope, chunked(b'{"agent_hint":5}')) == []


def test_the_error_has_vllms_shape() -> None:
    server = Server()
    hint = {"session_id": "s", "cache_control": {"ttl": -1}}
    response = server.request("POST", CHAT, json={"agent_hint": hint})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error.pop("message").startswith("agent_hint.cache_control.ttl=-1: ")
    assert error == {
        "type": "BadRequestError",
        "param": "agent_hint.cache_control.ttl",
        "code": 400,
    }
    assert server.seen.bodies == []


def test_the_tenant_is_proven_to_the_engine() -> None:
    server = Server(tenant_header="X-Tenant")
    response = server.request("POST", CHAT, json={"prompt": "x"}, headers={"x-tenant": "acme"})
    assert response.json()["generated"]
    params = json.loads(server.seen.bodies[0])["kv_transfer_params"]
    verifier = TenantVerifier()
    verifier.add_secret(server.engine.cores[0].secrets[0])
    assert verifier.tenant_of(params) == "acme"


def test_a_tenant_without_registration() -> None:
    server = Server(tenant_from_api_key=True)
    server.engine.error = Exception("no")
    for headers, code in (({"authorization": "Bearer k"}, 503), ({}, 200)):
        response = server.request("POST", CHAT, json={"prompt": "x"}, headers=headers)
        assert response.status_code == code
    assert server.seen.bodies == [b'{"prompt":"x"}']


def test_many_at_once_do_not_mix() -> None:
    server = Server(tenant_header="X-Tenant", engines=2)

    async def scenario() -> None:
        await start(server.app, server.engine)
        async with browsing(server.app) as http:

            async def one(n: int) -> None:
                manage = n % 2 == 0
                hint: dict[str, Any] = {"session_id": f"s{n}"}
                hint["context_management"] = {"manage_request": manage}
                response = await http.post(
                    CHAT,
                    json={"n": n, "agent_hint": hint},
                    headers={"x-tenant": f"t{n}", "x-operation-id": f"op{n}"},
                )
                if manage:
                    said = response.json()["agent_hint"]
                    assert (said["session_id"], said["operation_id"]) == (f"s{n}", f"op{n}")
                else:
                    assert response.json()["generated"]

            await asyncio.gather(*(one(n) for n in range(50)))

    run(scenario)
    asked = {(r["tenant"], r["hint"]["session_id"]) for r in server.engine.asked("apply")}
    assert asked == {(f"t{n}", f"s{n}") for n in range(0, 50, 2)}
    for body in map(json.loads, server.seen.bodies):
        params = body["kv_transfer_params"]
        assert params["spm_tenant"]["id"] == f"t{body['n']}"
        assert params["agent_hint"]["session_id"] == f"s{body['n']}"
    assert len(server.seen.bodies) == 25
