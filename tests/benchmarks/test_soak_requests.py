"""Which answers are lost requests and which are not."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from benchmarks.soak_requests import Answer, Outcome, Sender, completion_body

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
BODY = completion_body([1, 2, 3], 2, {})
STREAM = {**BODY, "stream": True}


def _choice(reason: str | None = "length", count: int = 2) -> dict[str, Any]:
    logprobs = {"token_logprobs": [-1.0] * count}
    return {"token_ids": [7] * count, "logprobs": logprobs, "finish_reason": reason}


def _ask(handler: Handler, what: Callable[[Sender], Awaitable[Answer]]) -> Answer:
    async def run() -> Answer:
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        app.router.add_post("/abort_requests", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        (host, port), *_ = runner.addresses
        try:
            async with aiohttp.ClientSession() as http:
                return await what(Sender(http, f"http://{host}:{port}"))
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def _document(document: object, status: int = 200) -> Handler:
    async def handle(_: web.Request) -> web.StreamResponse:
        return web.json_response(document, status=status)

    return handle


def _stream(*events: object, done: bool = True) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if done:
            await response.write(b"data: [DONE]\n\n")
        return response

    return handle


def test_an_answer_with_all_its_tokens_is_finished() -> None:
    answer = _ask(_document({"choices": [_choice()]}), lambda sender: sender.ask(BODY))
    assert answer.outcome is Outcome.FINISHED
    assert answer.generated is not None
    assert (answer.generated.tokens, answer.generated.logprobs) == ((7, 7), (-1.0, -1.0))


def test_a_stream_with_all_its_tokens_is_finished() -> None:
    pieces = [{"choices": [_choice(None, 1)]}, {"choices": [_choice("length", 1)]}]
    answer = _ask(_stream(*pieces), lambda sender: sender.ask(STREAM))
    assert answer.outcome is Outcome.FINISHED
    assert answer.generated is not None
    assert answer.generated.tokens == (7, 7)


@pytest.mark.parametrize(
    "handler",
    [
        _document({"error": "x"}, 500),
        _document({"error": "x"}, 404),
        _document({"choices": [_choice("error")]}),
        _document({"choices": [_choice("length", 1)]}),
        _document({"choices": [_choice("abort", 2)]}),
        _document({}),
    ],
    ids=["500", "404", "error", "too-few-tokens", "aborted-by-nobody", "nonsense"],
)
def test_anything_else_is_lost(handler: Handler) -> None:
    answer = _ask(handler, lambda sender: sender.ask(BODY))
    assert answer.outcome is Outcome.LOST
    assert answer.generated is None
    assert answer.problem


@pytest.mark.parametrize(
    "handler",
    [
        _stream({"choices": [_choice()]}, done=False),
        _stream({"error": {"code": 500}}),
        _stream({"choices": [_choice(None, 1)]}),
    ],
    ids=["broken-off", "error-inside", "too-few-tokens"],
)
def test_a_stream_that_ends_otherwise_is_lost(handler: Handler) -> None:
    assert _ask(handler, lambda sender: sender.ask(STREAM)).outcome is Outcome.LOST


def test_a_refusal_that_was_deserved_is_none_of_ours() -> None:
    answer = _ask(_document({}, 400), lambda sender: sender.ask(BODY, deserves=400))
    assert answer.outcome is Outcome.REFUSED


@pytest.mark.parametrize("status", [200, 500])
def test_not_to_be_refused_as_deserved_is_a_loss(status: int) -> None:
    answer = _ask(_document({}, status), lambda sender: sender.ask(BODY, deserves=400))
    assert answer.outcome is Outcome.LOST


def test_no_server_is_a_loss() -> None:
    async def run() -> Answer:
        async with aiohttp.ClientSession() as http:
            return await Sender(http, "http://127.0.0.1:1").ask(BODY)

    assert asyncio.run(run()).outcome is Outcome.LOST


def test_a_client_leaves_in_the_middle_of_a_stream() -> None:
    closed = []

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                piece = json.dumps({"choices": [_choice(None, 1)]}).encode()
                await response.write(b"data: " + piece + b"\n\n")
                await asyncio.sleep(0)
        except ConnectionError:
            closed.append(True)
            raise

    answer = _ask(handle, lambda sender: sender.leave(BODY, 30.0, 3))
    assert answer.outcome is Outcome.LEFT
    assert closed


def test_a_client_leaves_before_the_first_token() -> None:
    async def handle(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    answer = _ask(handle, lambda sender: sender.leave(BODY, 0.01, 3))
    assert answer.outcome is Outcome.LEFT


def test_a_request_that_its_client_aborts_is_aborted() -> None:
    named: list[object] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        named.append(body.get("request_id") or body["request_ids"])
        return web.json_response({"choices": [_choice("abort", 0)]})

    answer = _ask(handle, lambda sender: sender.abort(BODY, "mine", 0.0))
    assert answer.outcome is Outcome.ABORTED
    assert sorted(map(str, named)) == ["['cmpl-mine-0']", "mine"]


def test_a_request_that_ends_before_its_abort_is_finished() -> None:
    answer = _ask(_document({"choices": [_choice()]}), lambda sender: sender.abort(BODY, "x", 0.0))
    assert answer.outcome is Outcome.FINISHED
