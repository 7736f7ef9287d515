"""Asking a running server: time to first token, its metrics, an empty GPU cache."""

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import aiohttp
import httpx

from spm.client.answers import read_answer
from spm.client.calls import Call
from spm.demo.metrics_client import TokenSources, read_sources, settled_sources
from spm.demo.server import SERVED_NAME

_VOCABULARY = 40_000
_SETTLE_TIMEOUT_S = 30.0
_POLL_S = 0.1
T = TypeVar("T")


class Server:
    """One running server and how to ask it. Belongs to one event loop."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self.url = url

    async def ttft(self, prompt: Sequence[int], extra: Mapping[str, Any] | None = None) -> float:
        """Seconds from sending the request to the first token. ``extra``: more of its fields."""
        body = {"model": SERVED_NAME, "prompt": list(prompt), "max_tokens": 2, "temperature": 0}
        body |= {"stream": True, **(extra or {})}
        first: float | None = None
        started = time.perf_counter()
        async with self._http.post(f"{self.url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if first is None and line.startswith(b"data: {"):
                    assert "choices" in json.loads(line[6:])
                    first = time.perf_counter() - started
        assert first is not None
        return first

    async def send(self, call: Call[T]) -> T:
        """Carry a management call out, as the clients do, at a fraction of their time."""
        async with self._http.request(
            call.method,
            f"{self.url}{call.path}",
            params=call.params,
            headers=call.headers,
            data=call.body,
        ) as response:
            content = await response.read()
        return call.parse(read_answer(httpx.Response(response.status, content=content)))

    async def drop_gpu_cache(self, *, with_tiers: bool = False) -> None:
        """Empty the GPU pool's prefix cache, once no block is in use. ``with_tiers``: our other
        tiers forget what they have, too."""
        reset = f"{self.url}/reset_prefix_cache"
        params = {"reset_external": "true"} if with_tiers else {}
        give_up_s = time.monotonic() + _SETTLE_TIMEOUT_S
        while time.monotonic() < give_up_s:
            async with self._http.post(reset, params=params) as response:
                if (await response.json())["success"]:
                    return
            await asyncio.sleep(_POLL_S)
        raise TimeoutError("the prefix cache could not be reset")

    async def metric(self, name: str, label: str = "") -> float:
        """Sum of the samples of ``name`` that carry ``label``."""
        async with self._http.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        wanted = [line for line in lines if line.startswith(name + "{") and label in line]
        return sum(float(line.rpartition(" ")[2]) for line in wanted)

    async def sources(self) -> TokenSources:
        """Where all prompt tokens so far came from."""
        return await read_sources(self._http, self.url)

    async def settled_sources(self, before: TokenSources, prompt_tokens: int) -> TokenSources:
        """The same of the one request since ``before``, which has just been answered."""
        return await settled_sources(self._http, self.url, before, prompt_tokens)

    async def wait_for_metric(self, name: str, value: float, label: str = "") -> None:
        """Until a metric has come up to ``value``."""
        give_up_s = time.monotonic() + _SETTLE_TIMEOUT_S
        while await self.metric(name, label) < value:
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"{name} did not come up to {value}")
            await asyncio.sleep(_POLL_S)


def random_prompt(rng: random.Random, count: int) -> list[int]:
    """Tokens that no other prompt shares."""
    return [rng.randrange(100, _VOCABULARY) for _ in range(count)]
