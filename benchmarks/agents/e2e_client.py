"""One streamed completion: when its tokens came, which they were, how much was cached."""

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from spm.demo.server import SERVED_NAME

_DATA = b"data: "
_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Answered:
    """``token_times_s`` from sending the request, one for each piece of the stream, the first
    piece first. ``cached_tokens``: of the prompt, that were not computed, from any tier."""

    tokens: tuple[int, ...]
    token_times_s: tuple[float, ...]
    cached_tokens: int

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return self.token_times_s[0]

    @property
    def total_s(self) -> float:
        """Until the last token."""
        return self.token_times_s[-1]


class Completions:
    """Asks one server; belongs to one event loop."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._http = http
        self._url = f"{url}/v1/completions"
        self._clock = clock

    async def ask(
        self, prompt: Sequence[int], answer_tokens: int, fields: Mapping[str, Any]
    ) -> Answered:
        """Greedy, exactly ``answer_tokens``; ``fields`` are added to the request.

        Raises ``aiohttp.ClientError``, and ``ValueError`` for an answer that is not whole.
        """
        body = {**_body(prompt, answer_tokens), **fields}
        tokens: list[int] = []
        times_s: list[float] = []
        cached = 0
        sent_s = self._clock()
        async with self._http.post(self._url, json=body) as response:
            response.raise_for_status()
            async for event in _events(response):
                for choice in event["choices"]:
                    if choice.get("token_ids"):
                        tokens += choice["token_ids"]
                        times_s.append(self._clock() - sent_s)
                cached = _cached_tokens(event, cached)
        if len(tokens) != answer_tokens:
            raise ValueError(f"{len(tokens)} tokens of {answer_tokens}")
        return Answered(tuple(tokens), tuple(times_s), cached)


def _body(prompt: Sequence[int], answer_tokens: int) -> dict[str, Any]:
    return {
        "model": SERVED_NAME,
        "prompt": list(prompt),
        "max_tokens": answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _cached_tokens(event: Mapping[str, Any], before: int) -> int:
    """What the last event says, with vLLM's ``--enable-prompt-tokens-details``."""
    details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
    said: int = details.get("cached_tokens") or before
    return said


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Those of the stream; raises ``ValueError`` if it tells an error or breaks off."""
    async for line in response.content:
        if not line.startswith(_DATA):
            continue
        content = line[len(_DATA) :].strip()
        if content == _DONE:
            return
        event = json.loads(content)
        if "error" in event:
            raise ValueError(f"in the stream: {event}")
        yield event
    raise ValueError("the stream broke off")
