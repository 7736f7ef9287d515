"""The plugin as vLLM uses it: its contract, its start, and the API key around it."""

import logging
from argparse import Namespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.datastructures import State
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin
from vllm.utils.argparse_utils import FlexibleArgumentParser

from spm.errors import ConfigError
from spm.http.frontend import Frontend, Unavailable, frontend_of
from spm.http.plugin import SessionEndpointPlugin
from tests.spm.http.fake_engine import FakeEngineClient, connector_config
from tests.spm.http.server_under_test import Server, run, start

MANAGE = {"agent_hint": {"session_id": "s", "context_management": {"manage_request": True}}}


def test_the_contract() -> None:
    plugin = SessionEndpointPlugin()
    assert isinstance(plugin, EndpointPlugin)
    assert (plugin.name, plugin.required_tasks) == ("spm", ("generate",))


def test_vllms_own_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built by vLLM with all its middleware, of which the key check has to lie around ours."""
    monkeypatch.setattr("vllm.plugins.load_endpoint_plugins", lambda _: [SessionEndpointPlugin()])
    server = Server()
    server.engine.cores[0].add_session("default", "s")
    arguments = ["--model", "m", "--api-key", "key"]
    parser = make_arg_parser(FlexibleArgumentParser())  # type: ignore[no-untyped-call]
    args = parser.parse_args(arguments)
    server.app = build_app(args, ("generate",))
    paths = server.app.openapi()["paths"]
    assert set(paths["/v1/sessions/{session_id}"]) == {"get", "delete"}
    key = {"authorization": "Bearer key"}
    for headers, code in (({}, 401), (key, 200)):
        for method, path, body in (
            ("GET", "/v1/sessions/s", None),
            ("POST", "/v1/chat/completions", MANAGE),
        ):
            assert server.request(method, path, json=body, headers=headers).status_code == code
        assert len(server.engine.requests) == (2 if headers else 0)
    unknown = server.request("GET", "/v1/sessions/x", headers=key)
    assert (unknown.status_code, unknown.json()["error"]["status"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "fields"),
    [
        ("GET", "/v1/sessions/s", {}),
        ("DELETE", "/v1/sessions/s", {}),
        ("POST", "/v1/sessions/s/edits", {"json": {"state": "finished"}}),
        ("GET", "/v1/sessions", {}),
        ("GET", "/v1/operations/op", {}),
        ("GET", "/v1/spm/status", {}),
        ("POST", "/v1/chat/completions", {"json": MANAGE}),
    ],
)
def test_the_api_key_protects_everything(method: str, path: str, fields: dict[str, Any]) -> None:
    server = Server()
    server.engine.cores[0].add_session("default", "s")
    server.app.add_middleware(AuthenticationMiddleware, tokens=["key"])
    for headers in ({}, {"authorization": "Bearer wrong"}):
        assert server.request(method, path, headers=headers, **fields).status_code == 401
    assert server.engine.requests == []
    allowed = server.request(method, path, headers={"authorization": "Bearer key"}, **fields)
    assert allowed.status_code in (200, 404)
    assert len(server.engine.requests) == 1


def started(client: FakeEngineClient | None) -> Frontend | Unavailable:
    app = FastAPI()
    run(lambda: start(app, client))
    return frontend_of(app)


@pytest.mark.parametrize(
    "client",
    [None, FakeEngineClient(None), FakeEngineClient(connector_config(sam={"enabled": False}))],
)
def test_nothing_to_do(client: FakeEngineClient | None) -> None:
    frontend = started(client)
    assert isinstance(frontend, Unavailable)
    assert client is None or client.requests == []


def test_without_tenants_nothing_is_registered() -> None:
    client = FakeEngineClient(connector_config())
    assert isinstance(started(client), Frontend)
    assert client.requests == []


@pytest.mark.parametrize("sam", [{"tenant_header": "X-Tenant"}, {"tenant_from_api_key": True}])
def test_each_server_registers_its_own_secret_with_every_engine(sam: dict[str, Any]) -> None:
    client = FakeEngineClient(connector_config(sam=sam), engines=2)
    started(client)
    started(client)
    first, second = client.cores
    assert first.secrets == second.secrets
    assert len(set(first.secrets)) == 2
    assert {len(secret) for secret in first.secrets} == {32}


@pytest.mark.parametrize("how", ["error", "answer", "one of two"])
def test_a_failed_registration_is_said_once(how: str, caplog: pytest.LogCaptureFixture) -> None:
    client = FakeEngineClient(connector_config(sam={"tenant_header": "X-Tenant"}))
    if how == "error":
        client.error = AttributeError("spm_manage")
    else:
        client.answers = [{"status": "unsupported", "detail": "too old"}]
        client.answers[:0] = [{"status": "ok"}] if how == "one of two" else []
    with caplog.at_level(logging.ERROR):
        frontend = started(client)
    assert isinstance(frontend, Frontend)
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "503" in record.getMessage()
    if how != "error":
        assert "too old" in record.getMessage()


def test_settings_the_engine_cannot_have_started_with() -> None:
    client = FakeEngineClient(connector_config(nonsense=1))

    async def scenario() -> None:
        with pytest.raises(ConfigError, match="nonsense"):
            await SessionEndpointPlugin().init_state(client, State(), Namespace())

    run(scenario)
