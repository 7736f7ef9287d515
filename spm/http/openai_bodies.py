"""The answer to a management request in the shape of the endpoint it was sent to.

No special case in an `openai` client: no text, no usage, a normal end. What happened is under
``agent_hint``. A stream is short enough to be made at once.
"""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from spm.http.rewriting import ManageRequest

Result = Mapping[str, Any]
Body = dict[str, Any]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"

_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
_RESPONSES_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 0},
    "output_tokens": 0,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 0,
}
_DONE = b"data: [DONE]\n\n"


def management_response(
    endpoint: str, asked: ManageRequest, result: Result, created_s: int
) -> Response:
    """HTTP 200 from ``endpoint``, which is one of the three above; ``result`` has the
    operation's id."""
    if endpoint == RESPONSES:
        body = _response(asked, result, created_s)
        return _stream(_response_events(body)) if asked.stream else _json(body)
    make = _chat if endpoint == CHAT else _completion
    if not asked.stream:
        return _json({**make(asked, result, created_s), "usage": _USAGE})
    chunk = make(asked, result, created_s)
    chunks = [chunk]
    if asked.include_usage:
        end = {key: value for key, value in chunk.items() if key != "agent_hint"}
        chunks.append({**end, "choices": [], "usage": _USAGE})
    return _stream([_event(one) for one in chunks] + [_DONE])


def _chat(asked: ManageRequest, result: Result, created_s: int) -> Body:
    part = "delta" if asked.stream else "message"
    return {
        "id": f"chatcmpl-{result['operation_id']}",
        "object": "chat.completion.chunk" if asked.stream else "chat.completion",
        "created": created_s,
        "model": asked.model,
        "choices": [
            {
                "index": 0,
                part: {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "agent_hint": result,
    }


def _completion(asked: ManageRequest, result: Result, created_s: int) -> Body:
    return {
        "id": f"cmpl-{result['operation_id']}",
        "object": "text_completion",
        "created": created_s,
        "model": asked.model,
        "choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}],
        "agent_hint": result,
    }


def _response(asked: ManageRequest, result: Result, created_s: int) -> Body:
    return {
        "id": f"resp_{result['operation_id']}",
        "object": "response",
        "created_at": created_s,
        "status": "completed",
        "model": asked.model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": False,
        "temperature": None,
        "tool_choice": "none",
        "tools": [],
        "top_p": None,
        "usage": _RESPONSES_USAGE,
        "agent_hint": result,
    }


def _response_events(body: Body) -> list[bytes]:
    begun = {key: value for key, value in body.items() if key != "agent_hint"}
    begun |= {"status": "in_progress", "usage": None}
    steps = (("created", begun), ("in_progress", begun), ("completed", body))
    return [
        _event({"type": f"response.{step}", "sequence_number": number, "response": response})
        for number, (step, response) in enumerate(steps)
    ]


def _event(data: Body) -> bytes:
    """One server-sent event; only those of the Responses API have a name."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n".encode()


def _json(body: Body) -> Response:
    # ASCII, because the model's name is the client's and need not be valid text.
    return Response(json.dumps(body), media_type="application/json")


def _stream(events: list[bytes]) -> Response:
    return Response(b"".join(events), media_type="text/event-stream")
