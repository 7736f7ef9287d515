"""What goes over the wire, and what comes back, for both clients."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from spm.client import (
    AsyncSpmClient,
    ClientClosedError,
    InvalidArgumentError,
    ProtocolError,
    SessionEdit,
    SpmClient,
    WaitTimeoutError,
)
from spm.client.endpoint import DEFAULT_TIMEOUT_S
from tests.spm.client.documents import EDITS, ENDED, SESSION, STATUS, operation, page
from tests.spm.client.driving import DRIVERS, Driver
from tests.spm.client.fake_server import FakeServer

EDITS_PATH = "/v1/sessions/run%2F1/edits"


@pytest.fixture
def server() -> FakeServer:
    server = FakeServer()
    server.answers("GET", "/v1/sessions", page("a", "b"))
    server.answers("GET", "/v1/sessions/run%2F1", SESSION)
    server.answers("POST", EDITS_PATH, EDITS)
    server.answers("DELETE", "/v1/sessions/run%2F1", ENDED)
    server.answers("GET", "/v1/operations/op%2E1", operation())
    server.answers("GET", "/v1/spm/status", STATUS)
    return server


@pytest.fixture(params=DRIVERS)
def make_driver(request: pytest.FixtureRequest) -> Callable[..., Driver]:
    made: Callable[..., Driver] = request.param
    return made


@pytest.fixture
def driver(make_driver: Callable[..., Driver], server: FakeServer) -> Driver:
    return make_driver(server)


def prefetch(**fields: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"edits": [{"type": "prefetch", "target": "gpu", **fields}]}


def ttl(ttl_s: float) -> dict[str, Any]:
    return {"cache_control": {"type": "ephemeral", "ttl": ttl_s}}


@pytest.mark.parametrize(
    ("method", "args", "fields", "request_line", "body"),
    [
        ("status", (), {}, "GET /v1/spm/status?", None),
        ("sessions", (), {}, "GET /v1/sessions?limit=100", None),
        ("sessions", (7, "a/b c"), {}, "GET /v1/sessions?limit=7&after=a%2Fb+c", None),
        ("get_session", ("run/1",), {}, "GET /v1/sessions/run%2F1?", None),
        ("operation", ("op.1",), {}, "GET /v1/operations/op%2E1?", None),
        ("end_session", ("run/1",), {}, "DELETE /v1/sessions/run%2F1?", None),
        ("end_session", ("run/1", True), {}, "DELETE /v1/sessions/run%2F1?tree=true", None),
        ("prefetch", ("run/1",), {}, f"POST {EDITS_PATH}?", prefetch()),
        (
            "prefetch",
            ("run/1", 0, 8, "host"),
            {},
            f"POST {EDITS_PATH}?",
            prefetch(block_start=0, block_end=8, target="host"),
        ),
        ("offload", ("run/1",), {}, f"POST {EDITS_PATH}?", {"edits": [{"type": "offload"}]}),
        (
            "evict",
            ("run/1", 2, 3),
            {},
            f"POST {EDITS_PATH}?",
            {"edits": [{"type": "evict", "block_start": 2, "block_end": 3}]},
        ),
        ("retain", ("run/1", 0), {}, f"POST {EDITS_PATH}?", ttl(0)),
        (
            "retain",
            ("run/1", 60.5, "waiting_tool", 2),
            {},
            f"POST {EDITS_PATH}?",
            {**ttl(60.5), "state": "waiting_tool", "expected_resume_s": 2},
        ),
        (
            "edit",
            ("run/1", [SessionEdit("evict", 0, 1), SessionEdit("offload")]),
            {"state": "finished"},
            f"POST {EDITS_PATH}?",
            {
                "state": "finished",
                "edits": [
                    {"type": "evict", "block_start": 0, "block_end": 1},
                    {"type": "offload"},
                ],
            },
        ),
    ],
)
def test_what_is_sent(
    method: str,
    args: tuple[Any, ...],
    fields: dict[str, Any],
    request_line: str,
    body: object,
    driver: Driver,
    server: FakeServer,
) -> None:
    assert driver.do(method, *args, **fields).raw
    (seen,) = server.requests
    assert f"{seen.method} {seen.path}?{seen.query}" == request_line
    assert seen.body == body
    assert ("x-operation-id" in seen.headers) is (seen.method in ("POST", "DELETE"))


def test_every_change_has_an_operation_id_of_its_own_unless_given(
    driver: Driver, server: FakeServer
) -> None:
    driver.do("evict", "run/1")
    driver.do("evict", "run/1")
    driver.do("edit", "run/1", state="finished", operation_id="mine")
    driver.do("end_session", "run/1", operation_id="mine-too")
    first, second, third, fourth = (seen.headers["x-operation-id"] for seen in server.requests)
    assert first != second
    assert (third, fourth) == ("mine", "mine-too")


@pytest.mark.parametrize(
    "base_url", ["http://server:8000", "http://server:8000/", "http://server:8000/v1/"]
)
def test_the_address_may_be_the_openai_clients(
    base_url: str, make_driver: Callable[..., Driver], server: FakeServer
) -> None:
    make_driver(server, base_url=base_url).do("status")
    assert server.requests[0].path == "/v1/spm/status"


def test_a_server_below_a_path(make_driver: Callable[..., Driver], server: FakeServer) -> None:
    server.answers("GET", "/api/v1/spm/status", STATUS)
    make_driver(server, base_url="http://server/api/v1").do("status")
    assert server.requests[0].path == "/api/v1/spm/status"


def test_key_and_headers_go_with_every_request(
    make_driver: Callable[..., Driver], server: FakeServer
) -> None:
    driver = make_driver(server, api_key="secret", headers={"X-Tenant": "acme inc"})
    driver.do("evict", "run/1")
    seen = server.requests[0].headers
    assert (seen["authorization"], seen["x-tenant"]) == ("Bearer secret", "acme inc")


def test_without_a_key_none_is_sent(driver: Driver, server: FakeServer) -> None:
    driver.do("status")
    assert "authorization" not in server.requests[0].headers


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"base_url": "server:8000"}, "base_url"),
        ({"base_url": "redis://server"}, "base_url"),
        ({"base_url": "http://"}, "base_url"),
        ({"base_url": "http://server/?x=1"}, "base_url"),
        ({"base_url": "http://server:port"}, "base_url"),
        ({"api_key": "hush-hush\n"}, "api_key"),
        ({"api_key": "hush-hushé"}, "api_key"),
        ({"headers": {"X-Tenant": "hush-hush\r\nX: y"}}, "X-Tenant"),
        ({"headers": {"X Tenant": "hush-hush"}}, "X Tenant"),
    ],
)
def test_settings_that_cannot_be_sent(
    options: dict[str, Any], named: str, make_driver: Callable[..., Driver], server: FakeServer
) -> None:
    with pytest.raises(InvalidArgumentError, match=named) as caught:
        make_driver(server, **options).do("status")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "args", "fields"),
    [
        ("get_session", ("",), {}),
        ("get_session", ("a b",), {}),
        ("end_session", ("é",), {}),
        ("evict", ("x" * 257,), {}),
        ("edit", ("run/1",), {}),
        ("edit", ("run/1",), {"state": "finished", "operation_id": "a b"}),
        ("retain", ("run/1", float("nan")), {}),
    ],
)
def test_arguments_that_cannot_be_sent(
    method: str, args: tuple[Any, ...], fields: dict[str, Any], driver: Driver, server: FakeServer
) -> None:
    with pytest.raises(InvalidArgumentError):
        driver.do(method, *args, **fields)
    assert server.requests == []


def test_pages_are_followed(driver: Driver, server: FakeServer) -> None:
    server.answers("GET", "/v1/sessions", page("a", "b", has_more=True), page("c"))
    assert [one.id for one in driver.all_sessions(2)] == ["a", "b", "c"]
    assert [seen.query for seen in server.requests] == ["limit=2", "limit=2&after=b"]


@pytest.mark.parametrize("stuck", [page("a", "b", has_more=True), page(has_more=True)])
def test_pages_that_lead_nowhere_end(
    stuck: dict[str, Any], driver: Driver, server: FakeServer
) -> None:
    server.answers("GET", "/v1/sessions", stuck)
    with pytest.raises(ProtocolError, match="has_more"):
        driver.all_sessions(2)


def test_waiting_looks_ever_less_often(driver: Driver, server: FakeServer) -> None:
    unfinished = [operation("accepted", done=False)] * 20
    server.answers("GET", "/v1/operations/op-1", *unfinished, operation("partial"))
    found = driver.do("wait", "op-1", timeout_s=600)
    assert (found.done, found.status, found.edits[0].done_blocks) == (True, "partial", 41)
    slept_s = driver.clock.slept_s
    assert len(server.requests) == 21
    assert slept_s == sorted(slept_s)
    assert (slept_s[0], slept_s[-1]) == (0.05, 2.0)


def test_waiting_ends_with_the_time(driver: Driver, server: FakeServer) -> None:
    server.answers("GET", "/v1/operations/op-1", operation("accepted", done=False))
    with pytest.raises(WaitTimeoutError):
        driver.do("wait", "op-1", timeout_s=5)
    assert sum(driver.clock.slept_s) == pytest.approx(5)


def test_what_is_done_is_not_waited_for(driver: Driver, server: FakeServer) -> None:
    server.answers("GET", "/v1/operations/op-1", operation())
    assert driver.do("wait", "op-1", timeout_s=0).done
    assert driver.clock.slept_s == []


def test_how_long_an_answer_may_take(
    make_driver: Callable[..., Driver], server: FakeServer
) -> None:
    driver = make_driver(server, timeout_s=7.0)
    driver.do("status")
    driver.do("wait", "op.1", answer_timeout_s=0.5)
    make_driver(server).do("status")
    assert [seen.timeout_s for seen in server.requests] == [7.0, 0.5, DEFAULT_TIMEOUT_S]


def test_a_closed_client_says_so(driver: Driver, server: FakeServer) -> None:
    with pytest.raises(ClientClosedError):
        driver.do_closed("status")
    assert server.requests == []


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        public = inspect.getmembers(kind, inspect.isfunction)
        return {
            name: list(inspect.signature(method).parameters)
            for name, method in public
            if not name.startswith("__") or name == "__init__"
        }

    assert methods(AsyncSpmClient) == methods(SpmClient)


def test_importing_the_client_imports_nothing_heavy() -> None:
    code = (
        "import sys, spm.client\n"
        "heavy = {'vllm', 'torch', 'numpy', 'fastapi', 'redis', 'connectors'}\n"
        "sys.exit(', '.join(heavy & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == ""
