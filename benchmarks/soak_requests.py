"""One completion request over HTTP, and what became of it."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import aiohttp

from spm.demo.server import SERVED_NAME

REQUEST_TIMEOUT_S = 150.0
"""A request that takes longer has been forgotten by somebody."""
_DATA = b"data: "
_DONE = b"[DONE]"


class Outcome(Enum):
    """How a request ended."""

    FINISHED = "finished"
    LEFT = "left"
    """The client went away."""
    ABORTED = "aborted"
    """Its client had it aborted."""
    REFUSED = "refused"
    """By a 4xx that the request deserved."""
    LOST = "lost"
    """Anything else: an error, a broken stream, no answer."""


@dataclass(frozen=True)
class Generated:
    """What a server generated, with the logprob of each token."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Answer:
    """``generated`` is None unless the request finished; ``problem`` says what was wrong."""

    outcome: Outcome
    generated: Generated | None = None
    problem: str = ""
    reason: str | None = None
    """vLLM's ``finish_reason``."""


def completion_body(
    prompt: Sequence[int], max_tokens: int, more: Mapping[str, Any]
) -> dict[str, Any]:
    """Greedy, never ends early, and tells what it generated as token ids."""
    return {
        "model": SERVED_NAME,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **more,
    }


class Sender:
    """Sends completions to one server; belongs to one event loop."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = f"{url}/v1/completions"
        self._abort_url = f"{url}/abort_requests"

    async def ask(self, body: Mapping[str, Any], deserves: int | None = None) -> Answer:
        """Send it and read the answer to its end. ``deserves``: the HTTP status that it is
        refused with; to be served is then as bad as any failure is otherwise."""
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                async with self._http.post(self._url, json=body) as response:
                    return await _read(response, body, deserves)
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
            return Answer(Outcome.LOST, problem=repr(error))

    async def abort(self, body: Mapping[str, Any], name: str, after_s: float) -> Answer:
        """Send it, and have it aborted after so many seconds. ``name``: a request id of its own."""
        asked = asyncio.create_task(self.ask({**body, "request_id": name}))
        await asyncio.sleep(after_s)
        try:
            async with self._http.post(
                self._abort_url, json={"request_ids": [f"cmpl-{name}-0"]}
            ) as response:
                await response.read()
        except aiohttp.ClientError:
            pass  # what becomes of the request tells
        answer = await asked
        if answer.reason == "abort":
            return Answer(Outcome.ABORTED)
        return answer

    async def leave(self, body: Mapping[str, Any], after_s: float, after_events: int) -> Answer:
        """Send a streaming request and close the connection after so many seconds or pieces
        of the answer, whichever is first."""
        seen = 0
        try:
            async with asyncio.timeout(after_s):
                async with self._http.post(self._url, json={**body, "stream": True}) as response:
                    if response.status != 200:
                        text = (await response.text())[:300]
                        return Answer(Outcome.LOST, problem=f"HTTP {response.status}: {text}")
                    async for event in _events(response):
                        if "error" in event:
                            return Answer(Outcome.LOST, problem=f"in the stream: {event}")
                        seen += 1
                        if seen >= after_events:
                            response.close()  # the connection, not only this answer
                            return Answer(Outcome.LEFT)
        except TimeoutError:
            return Answer(Outcome.LEFT)
        except (aiohttp.ClientError, ValueError) as error:
            return Answer(Outcome.LOST, problem=repr(error))
        return Answer(Outcome.LEFT)  # it was over before


async def _read(
    response: aiohttp.ClientResponse, body: Mapping[str, Any], deserves: int | None
) -> Answer:
    if response.status != 200 or deserves is not None:
        text = (await response.text())[:300]
        if response.status == deserves:
            return Answer(Outcome.REFUSED)
        return Answer(Outcome.LOST, problem=f"HTTP {response.status}: {text}")
    if body.get("stream"):
        return await _read_stream(response, body["max_tokens"])
    document = await response.json()
    (choice,) = document["choices"]
    generated = Generated(tuple(choice["token_ids"]), _logprobs(choice))
    return _checked(generated, choice["finish_reason"], body["max_tokens"])


async def _read_stream(response: aiohttp.ClientResponse, wanted: int) -> Answer:
    tokens: list[int] = []
    logprobs: list[float] = []
    reason = None
    async for event in _events(response):
        if "error" in event:
            return Answer(Outcome.LOST, problem=f"in the stream: {event}")
        for choice in event["choices"]:
            tokens += choice.get("token_ids") or []
            logprobs += _logprobs(choice)
            reason = choice.get("finish_reason") or reason
    return _checked(Generated(tuple(tokens), tuple(logprobs)), reason, wanted)


def _logprobs(choice: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple((choice.get("logprobs") or {}).get("token_logprobs") or ())


def _checked(generated: Generated, reason: str | None, wanted: int) -> Answer:
    """Finished only with all the tokens that were asked for."""
    lengths = len(generated.tokens), len(generated.logprobs)
    if reason != "length" or lengths != (wanted, wanted):
        problem = f"finish_reason {reason}, {lengths} tokens and logprobs of {wanted}"
        return Answer(Outcome.LOST, problem=problem, reason=reason)
    return Answer(Outcome.FINISHED, generated, reason=reason)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Those of the stream; raises ``ValueError`` if it ends without saying so."""
    async for line in response.content:
        if line.startswith(_DATA):
            content = line[len(_DATA) :].strip()
            if content == _DONE:
                return
            yield json.loads(content)
    raise ValueError("the stream broke off")
