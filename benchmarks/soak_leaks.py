"""What is left of a soak once every session was ended: it should be nothing."""

import asyncio
import time
from collections.abc import Mapping

import aiohttp

from benchmarks.prefetch_storm import left_over
from benchmarks.served import Server
from benchmarks.soak_requests import completion_body
from benchmarks.soak_watch import Sample
from spm.client import AsyncSpmClient

GAUGES = (
    "spm:sessions",
    "spm:session_keys",
    "spm:sam_records",
    "spm:sam_protected_blocks",
    "spm:keep_alive_held",
    "spm:loads_in_flight",
    "spm:operations",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)
"""All 0 when nothing goes on and no session is left."""
ERRORS = "spm:internal_errors_total"
_MORE_THREADS = 2
_MORE_FILES = 8
"""Pools of threads and connections may still grow a little after the warm-up."""
_SETTLE_TIMEOUT_S = 30.0
_POLL_S = 0.5


class Leaks:
    """Looks at an idle server; belongs to one event loop."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url
        self._server = Server(http, url)

    async def find(self) -> list[str]:
        """End every session, wait until nothing goes on, and say what is left."""
        async with AsyncSpmClient(self._url, timeout_s=30) as spm:
            give_up_s = time.monotonic() + _SETTLE_TIMEOUT_S
            while left := await self._left(spm):
                if time.monotonic() > give_up_s:
                    break
                await asyncio.sleep(_POLL_S)
        return [f"{name}: {value:g}" for name, value in left.items()] + await self._worker()

    async def _left(self, spm: AsyncSpmClient) -> Mapping[str, float]:
        names = [session.id async for session in spm.iter_sessions()]
        for name in names:
            path = f"/v1/sessions/{name}?tree=true"
            async with self._http.delete(self._url + path) as response:
                await response.read()  # 404: it went with its parent
        await self._one_more_request()
        left = {name: await self._server.metric(name) for name in (*GAUGES, ERRORS)}
        for engine in (await spm.status()).engines:
            left[f"engine {engine.engine}, going on"] = left_over(engine)
        return {name: value for name, value in left.items() if value}

    async def _one_more_request(self) -> None:
        """vLLM's page of metrics is as of the last step."""
        body = completion_body([5, 6, 7], 2, {})
        async with self._http.post(f"{self._url}/v1/completions", json=body) as response:
            await response.read()

    async def _worker(self) -> list[str]:
        """The worker's own books."""
        body = {"method": "spm_check_integrity"}
        async with self._http.post(f"{self._url}/collective_rpc", json=body) as response:
            if response.status != 200:
                return [f"the worker's books: HTTP {response.status}"]
            found = (await response.json())["results"]
        return [f"worker: {problem}" for problem in found if problem]


def process_leaks(before: Sample, after: Sample) -> list[str]:
    """Threads and open files of the processes, idle before and idle after."""
    leaks = []
    for pid, was in before.held.items():
        now = after.held.get(pid)
        if now is None:
            continue  # that is a death, not a leak
        if now.threads > was.threads + _MORE_THREADS:
            leaks.append(f"{was.name}: {now.threads} threads, {was.threads} before")
        if now.files > was.files + _MORE_FILES:
            leaks.append(f"{was.name}: {now.files} open files, {was.files} before")
    return leaks
