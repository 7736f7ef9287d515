"""One streamed chat completion: tokens, logprobs, text and time to first token."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from spm.demo.conversation import Message
from spm.demo.server import SERVED_NAME
from spm.errors import SpmError

ANSWER_TOKENS = 32
_DATA_PREFIX = "data: "
_DONE = "[DONE]"


class RequestError(SpmError):
    """The server refused or broke off a request."""


@dataclass(frozen=True)
class Answer:
    """What came back, token by token, and when the first of it came."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    ttft_s: float


@dataclass
class _Partial:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_tokens: int = 0

    def add(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise RequestError(f"the server answered: {event['error']}")
        if event.get("usage"):
            self.prompt_tokens = event["usage"]["prompt_tokens"]
        for choice in event["choices"]:
            self.text += choice["delta"].get("content") or ""
            self.token_ids += choice.get("token_ids") or []
            logprobs = (choice.get("logprobs") or {}).get("content") or []
            self.logprobs += [entry["logprob"] for entry in logprobs]


def build_request(session: str, messages: Sequence[Message]) -> dict[str, Any]:
    """The request body: plain OpenAI, plus vLLM's own ``session_id`` field."""
    return {
        "model": SERVED_NAME,
        "messages": list(messages),
        "session_id": session,
        "temperature": 0,
        "seed": 0,
        "max_tokens": ANSWER_TOKENS,
        "logprobs": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def ask(
    http: aiohttp.ClientSession, url: str, session: str, messages: Sequence[Message]
) -> Answer:
    """Send one turn of a session and read the answer to its end."""
    partial = _Partial()
    ttft: float | None = None
    started = time.perf_counter()
    body = build_request(session, messages)
    try:
        async with http.post(f"{url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise RequestError(f"HTTP {response.status}: {(await response.text())[:500]}")
            async for event in _events(response):
                partial.add(event)
                if ttft is None and partial.token_ids:
                    ttft = time.perf_counter() - started
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        raise RequestError(f"the request was broken off: {error!r}") from error
    if ttft is None:
        raise RequestError("the stream ended without a token")
    return Answer(
        partial.text,
        tuple(partial.token_ids),
        tuple(partial.logprobs),
        partial.prompt_tokens,
        ttft,
    )


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for raw in response.content:
        line = raw.decode().strip()
        if line.startswith(_DATA_PREFIX) and line != _DATA_PREFIX + _DONE:
            yield json.loads(line[len(_DATA_PREFIX) :])
