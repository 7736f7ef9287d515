"""Management requests through the official `openai` client, which must need no special case."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.spm.http.server_under_test import Server, browsing, run, serving, start

HINT = {
    "session_id": "s",
    "context_management": {"manage_request": True, "edits": [{"type": "evict"}]},
}
EXTRA = {"agent_hint": HINT}
HEADERS = {"X-Operation-Id": "op-1"}
MESSAGES: Any = [{"role": "user", "content": "x"}]


class Managed(Server):
    """A started server that knows session "s"."""

    def __init__(self, **sam: Any) -> None:  # noqa: ANN401
        super().__init__(**sam)
        self.engine.cores[0].add_session("default", "s")
        run(lambda: start(self.app, self.engine))


@pytest.fixture
def server() -> Managed:
    return Managed()


@pytest.fixture
def client(server: Managed) -> Iterator[openai.OpenAI]:
    with (
        serving(server.app) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0) as synchronous,
    ):
        yield synchronous


def check(server: Managed, result: Any, times: int = 1) -> None:  # noqa: ANN401
    """The structured result, and that the model never heard of it."""
    assert (result["status"], result["operation_id"]) == ("ok", "op-1")
    assert result["session_id"] == "s"
    assert [(e["type"], e["status"], e["blocks"]) for e in result["edits"]] == [("evict", "ok", 4)]
    assert result.get("duplicate", False) == (times > 1)
    assert server.seen.bodies == []
    (*_, asked) = server.engine.asked("apply")
    assert asked["hint"] == HINT
    assert asked["tenant"] == "default"
    assert len(server.engine.asked("apply")) == times


def test_chat(server: Managed, client: openai.OpenAI) -> None:
    for times in (1, 2):
        answer = client.chat.completions.create(
            model="m", messages=MESSAGES, extra_body=EXTRA, extra_headers=HEADERS
        )
        assert answer.object == "chat.completion"
        assert answer.model == "m"
        assert answer.choices[0].message.content == ""
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.total_tokens == 0
        check(server, answer.agent_hint, times)  # type: ignore[attr-defined]


@pytest.mark.parametrize("include_usage", [False, True])
def test_chat_stream(server: Managed, client: openai.OpenAI, include_usage: bool) -> None:
    chunks = list(
        client.chat.completions.create(
            model="m",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": include_usage},
            extra_body=EXTRA,
            extra_headers=HEADERS,
        )
    )
    assert chunks[0].choices[0].finish_reason == "stop"
    assert chunks[0].choices[0].delta.content == ""
    assert len(chunks) == 1 + include_usage
    if include_usage:
        assert chunks[1].choices == []
        assert chunks[1].usage is not None
        assert chunks[1].usage.total_tokens == 0
    check(server, chunks[0].agent_hint)  # type: ignore[attr-defined]


def test_chat_stream_helper(server: Managed, client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="m", messages=MESSAGES, extra_body=EXTRA, extra_headers=HEADERS
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop"
    assert server.seen.bodies == []


def test_completions(server: Managed, client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="m", prompt="x", extra_body=EXTRA, extra_headers=HEADERS
    )
    assert (answer.object, answer.choices[0].text) == ("text_completion", "")
    assert answer.usage is not None
    assert answer.usage.total_tokens == 0
    check(server, answer.agent_hint)  # type: ignore[attr-defined]


def test_completions_stream(server: Managed, client: openai.OpenAI) -> None:
    (chunk,) = client.completions.create(
        model="m", prompt="x", stream=True, extra_body=EXTRA, extra_headers=HEADERS
    )
    assert chunk.choices[0].finish_reason == "stop"
    check(server, chunk.agent_hint)  # type: ignore[attr-defined]


def test_responses(server: Managed, client: openai.OpenAI) -> None:
    answer = client.responses.create(model="m", input="x", extra_body=EXTRA, extra_headers=HEADERS)
    assert (answer.object, answer.status, answer.output) == ("response", "completed", [])
    assert answer.output_text == ""
    assert answer.usage is not None
    assert answer.usage.total_tokens == 0
    check(server, answer.agent_hint)  # type: ignore[attr-defined]


def test_responses_stream(server: Managed, client: openai.OpenAI) -> None:
    events = list(
        client.responses.create(
            model="m", input="x", stream=True, extra_body=EXTRA, extra_headers=HEADERS
        )
    )
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == [0, 1, 2]
    last = events[-1]
    assert last.type == "response.completed"
    assert (last.response.status, last.response.output) == ("completed", [])
    check(server, last.response.agent_hint)  # type: ignore[attr-defined]


def test_responses_stream_helper(server: Managed, client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="m", input="x", extra_body=EXTRA, extra_headers=HEADERS
    ) as stream:
        final = stream.get_final_response()
    assert final.output_text == ""
    assert server.seen.bodies == []


def test_async_client(server: Managed) -> None:
    async def scenario() -> tuple[Any, Any, list[Any], list[Any]]:
        async with openai.AsyncOpenAI(base_url=address, api_key="k", max_retries=0) as client:
            chat = await client.chat.completions.create(
                model="m", messages=MESSAGES, extra_body=EXTRA
            )
            completion = await client.completions.create(model="m", prompt="x", extra_body=EXTRA)
            chunks = await client.chat.completions.create(
                model="m", messages=MESSAGES, stream=True, extra_body=EXTRA
            )
            events = await client.responses.create(
                model="m", input="x", stream=True, extra_body=EXTRA
            )
            return chat, completion, [c async for c in chunks], [e async for e in events]

    with serving(server.app) as url:
        address = f"{url}/v1"
        chat, completion, chunks, events = run(scenario)
    results = [chat.agent_hint, completion.agent_hint, chunks[0].agent_hint]
    results.append(events[-1].response.agent_hint)
    assert [r["status"] for r in results] == ["ok"] * 4
    assert len({r["operation_id"] for r in results}) == 4


def test_a_stream_ends_as_the_protocol_says(server: Managed) -> None:
    body = {"model": "m", "stream": True, **EXTRA}
    for path, done in (("chat/completions", True), ("completions", True), ("responses", False)):
        response = server.request("POST", f"/v1/{path}", json=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.text.endswith("\n\n")
        assert response.text.endswith("data: [DONE]\n\n") == done


def test_the_outcome_is_in_the_result_not_in_the_code(server: Managed) -> None:
    hint = {**HINT, "session_id": "unknown"}
    response = server.request("POST", "/v1/completions", json={"agent_hint": hint})
    assert response.status_code == 200
    assert response.json()["agent_hint"]["status"] == "not_found"


PREFETCH = {
    "session_id": "s",
    "context_management": {
        "manage_request": True,
        "edits": [{"type": "prefetch", "target": "host"}],
    },
}


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_what_goes_on_in_the_background_is_still_a_completion(server: Managed, path: str) -> None:
    server.engine.cores[0].background = True
    response = server.request("POST", f"/v1/{path}", json={"model": "m", "agent_hint": PREFETCH})
    assert response.status_code == 200
    result = response.json()["agent_hint"]
    assert result["status"] == "accepted"
    assert [(e["status"], e["done_blocks"]) for e in result["edits"]] == [("accepted", 0)]
    assert server.engine.asked("apply")[0]["hint"] == PREFETCH
    operation = server.request("GET", f"/v1/operations/{result['operation_id']}").json()
    assert (operation["status"], operation["done"]) == ("accepted", False)


def test_the_routes_through_the_client(server: Managed, client: openai.OpenAI) -> None:
    """Its generic calls take a 202 for the success it is."""
    server.engine.cores[0].background = True
    body = {"edits": [{"type": "prefetch"}], "operation_id": "op-1"}
    begun: Any = client.post("/sessions/s/edits", body=body, cast_to=object)
    assert (begun["object"], begun["status"]) == ("session.edits", "accepted")
    server.engine.cores[0].finish("default", "op-1")
    ended: Any = client.get("/operations/op-1", cast_to=object)
    assert (ended["status"], ended["done"]) == ("ok", True)


def test_without_a_session(server: Managed, client: openai.OpenAI) -> None:
    hint = {"context_management": {"manage_request": True}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="m", messages=MESSAGES, extra_body={"agent_hint": hint}
        )
    assert caught.value.param == "agent_hint.session_id"
    assert server.engine.requests == []


@pytest.mark.parametrize("given", ["", "a b", "x" * 65, "a/b"])
def test_a_bad_operation_id(server: Managed, given: str) -> None:
    response = server.request(
        "POST", "/v1/completions", json=EXTRA, headers={"X-Operation-Id": given}
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Operation-Id"
    assert server.engine.requests == []


def test_messages_point_to_the_route(server: Managed) -> None:
    response = server.request("POST", "/v1/messages", json=EXTRA)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == "agent_hint.context_management.manage_request"
    assert "POST /v1/sessions/{session_id}/edits" in error["message"]
    assert (server.engine.requests, server.seen.bodies) == ([], [])


def test_a_model_name_that_is_no_text(server: Managed) -> None:
    body = b'{"model":"\\ud800","agent_hint":{"session_id":"s","context_management":'
    body += b'{"manage_request":true}}}'
    headers = {"content-type": "application/json"}
    for path in ("chat/completions", "completions", "responses"):
        response = server.request("POST", f"/v1/{path}", content=body, headers=headers)
        assert response.status_code == 200
        assert response.json()["model"] == "\ud800"


def test_a_dead_engine(server: Managed) -> None:
    server.engine.error = type("EngineDeadError", (Exception,), {})()
    response = server.request("POST", "/v1/completions", json=EXTRA)
    assert response.status_code == 503
    assert response.json()["error"]["status"] == "failed"


def test_a_client_that_leaves_while_the_engine_works(server: Managed) -> None:
    """The handler ends at once, and the call is forgotten when it is answered."""

    async def scenario() -> None:
        server.engine.gate = asyncio.Event()
        async with browsing(server.app) as http:
            asking = asyncio.create_task(http.post("/v1/completions", json=EXTRA))
            while not server.engine.requests:
                await asyncio.sleep(0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        engine = server.app.state.spm_frontend.engine
        assert engine.unanswered == 1
        server.engine.gate.set()
        while engine.unanswered:
            await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) <= 2  # this one, and the one that waits for it

    run(scenario)
