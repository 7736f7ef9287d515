"""What goes wrong is one tree of exceptions, for both clients."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from spm.client import (
    AuthenticationError,
    HttpStatusError,
    InvalidRequestError,
    NotFoundError,
    ProtocolError,
    RejectedError,
    ServerTimeoutError,
    ServerUnreachableError,
    SpmClientError,
    UnavailableError,
    UnsupportedError,
)
from tests.spm.client.documents import error
from tests.spm.client.driving import DRIVERS, Driver
from tests.spm.client.fake_server import FakeServer

PATH = "/v1/spm/status"


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest, server: FakeServer) -> Driver:
    make: Callable[..., Driver] = request.param
    return make(server, base_url="http://user:hush@server:8000", api_key="hush-hush")


def failure(driver: Driver) -> SpmClientError:
    with pytest.raises(SpmClientError) as caught:
        driver.do("status")
    assert "hush" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("code", "document", "kind", "message", "may_retry"),
    [
        (400, error(400, "ttl: no", "failed", "ttl"), InvalidRequestError, "ttl: no", False),
        (413, error(413, "too long", "rejected"), InvalidRequestError, "too long", False),
        (415, error(415, "JSON", "failed"), InvalidRequestError, "JSON", False),
        (401, {"error": "Unauthorized"}, AuthenticationError, "Unauthorized", False),
        (404, error(404, "no such", "not_found"), NotFoundError, "no such", False),
        (404, {"detail": "Not Found"}, UnsupportedError, "VLLM_PLUGINS=spm", False),
        (404, error(404, "Not Found"), UnsupportedError, "VLLM_PLUGINS=spm", False),
        (429, error(429, "later", "rejected"), RejectedError, "later", True),
        (501, error(501, "switched off", "unsupported"), UnsupportedError, "switched off", False),
        (503, error(503, "not running", "failed"), UnavailableError, "not running", True),
        (504, error(504, "too slow", "failed"), UnavailableError, "too slow", True),
        (500, [], UnavailableError, "HTTP 500 Internal Server Error", True),
        (307, {}, HttpStatusError, "HTTP 307 Temporary Redirect", False),
        (599, {"error": {"message": 5}}, UnavailableError, "HTTP 599", True),
    ],
)
def test_refusals(
    code: int,
    document: Any,  # noqa: ANN401
    kind: type[HttpStatusError],
    message: str,
    may_retry: bool,
    driver: Driver,
    server: FakeServer,
) -> None:
    server.answers("GET", PATH, document, code=code)
    refused = failure(driver)
    assert type(refused) is kind
    assert message in str(refused)
    assert refused.may_retry is may_retry
    assert isinstance(refused, HttpStatusError)
    assert refused.code == code
    assert refused.body == (document if isinstance(document, dict) else {})


def test_a_refusal_keeps_the_servers_words(driver: Driver, server: FakeServer) -> None:
    document = {**error(400, "edits[0]: no", "failed", "edits[0]"), "result": {"edits": []}}
    server.answers("GET", PATH, document, code=400)
    refused = failure(driver)
    assert isinstance(refused, InvalidRequestError)
    assert (refused.message, refused.status, refused.param) == (
        "edits[0]: no",
        "failed",
        "edits[0]",
    )
    assert refused.body["result"] == {"edits": []}


@pytest.mark.parametrize(
    ("header", "retry_after_s"),
    [({"retry-after": "3"}, 3.0), ({"retry-after": "Fri, 31 Dec"}, None), ({}, None)],
)
def test_when_to_try_again(
    header: dict[str, str], retry_after_s: float | None, driver: Driver, server: FakeServer
) -> None:
    server.answers("GET", PATH, error(429, "later", "rejected"), code=429, headers=header)
    refused = failure(driver)
    assert isinstance(refused, RejectedError)
    assert refused.retry_after_s == retry_after_s


def test_a_refusal_that_is_no_json(driver: Driver, server: FakeServer) -> None:
    server.says("GET", PATH, b"<html>Bad Gateway</html>", code=502)
    assert str(failure(driver)) == "the server answered HTTP 502 Bad Gateway"


@pytest.mark.parametrize("content", [b"", b"<html>", b"[]", b"5", b"[" * 100_000, b"\xff"])
def test_answers_that_are_none(content: bytes, driver: Driver, server: FakeServer) -> None:
    server.says("GET", PATH, content)
    assert type(failure(driver)) is ProtocolError


def test_a_long_message_is_cut(driver: Driver, server: FakeServer) -> None:
    server.answers("GET", PATH, error(500, "x" * 10_000, "failed"), code=500)
    assert len(str(failure(driver))) == 500


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (httpx.ConnectError("Connection refused"), ServerUnreachableError),
        (httpx.ReadError(""), ServerUnreachableError),
        (httpx.RemoteProtocolError("disconnected"), ServerUnreachableError),
        (httpx.ConnectTimeout(""), ServerTimeoutError),
        (httpx.ReadTimeout(""), ServerTimeoutError),
        (httpx.PoolTimeout(""), ServerTimeoutError),
        (httpx.DecodingError("not gzip"), ProtocolError),
    ],
)
def test_the_http_librarys_errors_are_ours(
    trouble: Exception, kind: type[SpmClientError], driver: Driver, server: FakeServer
) -> None:
    server.error = trouble
    failed = failure(driver)
    assert type(failed) is kind
    assert failed.__cause__ is trouble
    assert "http://server:8000" in str(failed)
