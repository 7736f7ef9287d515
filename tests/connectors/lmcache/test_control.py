"""The control API's client against servers that misbehave."""

import json
import time
from array import array
from typing import Any

import pytest

from connectors.lmcache.control import (
    DeleteTier,
    LMCacheControl,
    ObjectName,
    ServerStatus,
    WarmRequest,
    WarmResult,
)
from spm.errors import (
    StoreError,
    StoreRefusedError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from tests.connectors.lmcache.http_script import Script, ScriptedHttp, answering, saying

STATUS = {
    "chunk_size": 256,
    "hash_algorithm": "blake3",
    "storage_manager": {"num_l2_adapters": 1, "l1_usage": [10, 100]},
}


def soon() -> float:
    return time.monotonic() + 5.0


def control_of(server: ScriptedHttp) -> LMCacheControl:
    return LMCacheControl(server.url, "some/model", 2)


def status_from(script: Script) -> ServerStatus:
    with ScriptedHttp(script) as server:
        return control_of(server).status(soon())


def changed(**fields: object) -> Script:
    return answering(json.dumps({**STATUS, **fields}).encode())


def body_of(request: bytes) -> Any:  # noqa: ANN401
    return json.loads(request.partition(b"\r\n\r\n")[2])


def test_a_status_is_read() -> None:
    assert status_from(changed()) == ServerStatus(256, "blake3", True, 10, 100)


def test_an_answer_in_chunks_is_read() -> None:
    body = json.dumps(STATUS).encode()
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunked += b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)

    assert status_from(saying(chunked)).chunk_tokens == 256


@pytest.mark.parametrize(
    "script",
    [
        saying(b"not HTTP at all"),
        saying(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}"),
        answering(b"{"),
        answering(b"[" * 100_000),
        answering(b"[1, 2]"),
        answering(b"null"),
        changed(chunk_size=0),
        changed(chunk_size="256"),
        changed(chunk_size=True),
        changed(hash_algorithm=None),
        changed(storage_manager=7),
    ],
)
def test_nonsense_is_a_store_error(script: Script) -> None:
    with pytest.raises(StoreError):
        status_from(script)


def test_unknown_fullness_is_no_error() -> None:
    storage = {"num_l2_adapters": 0, "l1_usage": "?"}

    assert status_from(changed(storage_manager=storage)).kind == (256, "blake3", False)


def test_a_connection_that_is_closed_is_unavailable() -> None:
    with pytest.raises(StoreUnavailableError):
        status_from(saying(b""))


def test_an_answer_without_end_is_cut_off() -> None:
    def endless(client: Any, _request: bytes) -> None:  # noqa: ANN401
        client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            client.sendall(bytes(65_536))

    with pytest.raises(StoreError, match="over 4194304 bytes"):
        status_from(endless)


def test_an_answer_that_drips_ends_at_the_deadline() -> None:
    def dripping(client: Any, _request: bytes) -> None:  # noqa: ANN401
        for at in range(1_000_000):
            client.sendall(b"HTTP/1.1 200 OK\r\nX: "[at : at + 1] or b"x")
            if server.ended.wait(0.01):
                return

    with ScriptedHttp(dripping) as server, pytest.raises(StoreTimeoutError):
        control_of(server).status(time.monotonic() + 0.2)


def test_a_past_deadline_connects_to_nobody() -> None:
    with ScriptedHttp(changed()) as server:
        with pytest.raises(StoreTimeoutError):
            control_of(server).status(time.monotonic() - 1.0)
        assert not server.requests


@pytest.mark.parametrize("status", ["400 Bad Request", "404 Not Found", "503 Unavailable"])
def test_a_refusal_says_why_in_bounded_words(status: str) -> None:
    body = json.dumps({"detail": "because " + "x" * 10_000}).encode()

    with pytest.raises(StoreRefusedError, match="because") as refusal:
        status_from(answering(body, status))

    assert len(str(refusal.value)) < 300


def test_a_prefetch_names_the_first_tokens_whatever_is_behind_them() -> None:
    tokens = array("I", range(10_000))
    with ScriptedHttp(answering(b'{"request_id": "n", "status": "submitted"}')) as server:
        assert control_of(server).submit_warm(WarmRequest(tokens, 9_000, "s"), soon()) == "n"

    assert body_of(server.requests[0]) == {
        "model_name": "some/model",
        "world_size": 2,
        "cache_salt": "s",
        "token_ids": list(range(9_000)),
    }


@pytest.mark.parametrize(
    ("body", "result"),
    [
        (b'{"status": "pending"}', None),
        (b'{"status": "completed", "found_keys": 1, "total_keys": 2}', WarmResult(1, 2)),
    ],
)
def test_a_prefetch_is_polled_under_its_quoted_name(body: bytes, result: WarmResult | None) -> None:
    with ScriptedHttp(answering(body)) as server:
        assert control_of(server).poll_warm("a/../b c", soon()) == result

    assert server.requests[0].startswith(b"GET /cache/prefetches/a%2F..%2Fb%20c HTTP/1.1")


def test_a_delete_that_failed_behind_the_host_tier_is_an_error() -> None:
    body = b'{"deleted": 1, "skipped": 0, "ok": false, "error": "no redis"}'
    name = ObjectName(b"\x01", "some/model", 7, "s")

    with ScriptedHttp(answering(body)) as server, pytest.raises(StoreError, match="no redis"):
        control_of(server).delete([name], DeleteTier.ALL, soon())

    assert body_of(server.requests[0]) == {
        "tier": "all",
        "keys": [
            {
                "chunk_hash_hex": "01",
                "model_name": "some/model",
                "kv_rank": 7,
                "object_group_id": 0,
                "cache_salt": "s",
            }
        ],
    }
