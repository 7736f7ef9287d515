"""One request against a small server that streams as vLLM does."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from spm.demo import client
from spm.demo.client import Answer, RequestError, ask

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MESSAGES = [{"role": "user", "content": "hello"}]
USAGE: dict[str, Any] = {"choices": [], "usage": {"prompt_tokens": 41, "completion_tokens": 3}}
OPENING: dict[str, Any] = {
    "choices": [{"delta": {"role": "assistant", "content": ""}, "logprobs": None}],
    "prompt_token_ids": [1, 2, 3],
}


def chunk(text: str, token_ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    content = [{"token": "t", "logprob": value} for value in logprobs]
    choice = {
        "delta": {"content": text},
        "token_ids": token_ids,
        "logprobs": {"content": content},
    }
    return {"choices": [choice], "usage": None}


def sse(event: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(event)}\n\n".encode()


def streams(*events: dict[str, Any], end: bytes = b"data: [DONE]\n\n") -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(sse(event))
        await response.write(end)
        return response

    return handler


def ask_of(handler: Handler, timeout_s: float = 10.0) -> Answer:
    async def run() -> Answer:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handler)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with TestServer(app) as server, aiohttp.ClientSession(timeout=timeout) as http:
            url = str(server.make_url("")).rstrip("/")
            return await ask(http, url, "worker-build", MESSAGES)

    return asyncio.run(run())


def test_tokens_logprobs_text_and_usage_are_gathered_from_all_events() -> None:
    first, second = chunk("Say ", [11], [-0.5]), chunk("hi.", [12, 13], [-0.25, -1.5])
    answer = ask_of(streams(OPENING, first, second, USAGE))
    assert answer.text == "Say hi."
    assert answer.token_ids == (11, 12, 13)
    assert answer.logprobs == (-0.5, -0.25, -1.5)
    assert answer.prompt_tokens == 41


def test_an_event_that_arrives_in_pieces_is_read_whole() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        data = sse(chunk("é", [11], [-0.5])) + sse(USAGE)
        for start in range(0, len(data), 7):
            await response.write(data[start : start + 7])
        return response

    answer = ask_of(handler)
    assert (answer.text, answer.token_ids, answer.prompt_tokens) == ("é", (11,), 41)


def test_the_session_goes_along_and_the_answer_is_asked_for_greedily() -> None:
    seen: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        return await streams(chunk("x", [1], [0.0]))(request)

    ask_of(handler)
    (body,) = seen
    assert body["session_id"] == "worker-build"
    assert body["messages"] == MESSAGES
    assert (body["temperature"], body["seed"]) == (0, 0)
    assert body["stream"] is body["logprobs"] is body["return_token_ids"] is True
    assert body["stream_options"] == {"include_usage": True}


class Clock:
    """Set by the server; notes when the client looks at it for the second time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.first_token_seen = asyncio.Event()
        self._started = False

    def perf_counter(self) -> float:
        if self._started:
            self.first_token_seen.set()
        self._started = True
        return self.now_s


def test_time_to_first_token_ends_at_the_first_token_not_at_the_role_or_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(client, "time", clock)

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(sse(OPENING))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(clock.first_token_seen.wait(), 0.1)
        clock.now_s = 103.0
        await response.write(sse(chunk("x", [1], [0.0])))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(clock.first_token_seen.wait(), 5.0)
        clock.now_s = 110.0
        await response.write(sse(chunk("y", [2], [0.0])))
        return response

    assert ask_of(handler).ttft_s == 3.0


def test_an_error_in_the_stream_is_raised_with_its_text() -> None:
    error = {"error": {"message": "engine is dead", "code": 500}}
    with pytest.raises(RequestError, match="engine is dead"):
        ask_of(streams(chunk("x", [1], [0.0]), error))


def test_a_refusal_is_raised_with_status_and_text() -> None:
    async def handler(_request: web.Request) -> web.Response:
        return web.Response(status=400, text="prompt too long" + "." * 5000)

    with pytest.raises(RequestError, match=r"HTTP 400: prompt too long") as caught:
        ask_of(handler)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("events", [(), (OPENING,), (OPENING, USAGE)])
def test_a_stream_without_a_token_is_no_answer(events: tuple[dict[str, Any], ...]) -> None:
    with pytest.raises(RequestError, match="without a token"):
        ask_of(streams(*events))


def test_a_connection_that_breaks_in_the_middle_is_a_request_error() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(sse(chunk("x", [1], [0.0])))
        assert request.transport is not None
        request.transport.abort()
        return response

    with pytest.raises(RequestError, match="broken off"):
        ask_of(handler)


def test_a_server_that_falls_silent_is_a_request_error() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(sse(chunk("x", [1], [0.0])))
        await asyncio.sleep(5.0)
        return response

    with pytest.raises(RequestError, match="broken off"):
        ask_of(handler, timeout_s=0.2)


def test_nobody_listening_is_a_request_error() -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as http:
            await ask(http, "http://127.0.0.1:1", "worker-build", MESSAGES)

    with pytest.raises(RequestError, match="broken off"):
        asyncio.run(run())
