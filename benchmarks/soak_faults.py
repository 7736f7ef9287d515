"""Carries the schedule of a soak out."""

import asyncio
import time
from collections.abc import Sequence

import aiohttp

from benchmarks.soak_redis import SoakRedis
from benchmarks.soak_schedule import Fault, FaultKind

_RESET_PAUSE_S = 0.4
_RESETS = 4


class Faults:
    """Belongs to one event loop; Redis is dealt with on other threads, one at a time."""

    def __init__(self, redis: SoakRedis, http: aiohttp.ClientSession, url: str) -> None:
        self._redis = redis
        self._http = http
        self._url = url
        self.done: list[Fault] = []

    async def run(self, schedule: Sequence[Fault], started_s: float) -> None:
        """``started_s``: when the load began, on the monotonic clock."""
        for fault in schedule:
            await asyncio.sleep(max(0.0, started_s + fault.at_s - time.monotonic()))
            print(f"  {time.monotonic() - started_s:6.1f} s  {fault.kind.word}", flush=True)
            if fault.kind is FaultKind.CACHE_RESET:
                await self._reset_cache()
            else:
                await asyncio.to_thread(self._redis.begin, fault.kind)
            if fault.kind.lasts:
                try:
                    await asyncio.sleep(fault.for_s)
                finally:  # also when the run is broken off
                    await asyncio.shield(asyncio.to_thread(self._redis.end, fault.kind))
            self.done.append(fault)

    async def _reset_cache(self) -> None:
        """Where a load is in flight vLLM refuses, with an error; requests were preempted anyway."""
        for _ in range(_RESETS):
            how = {"reset_running_requests": "true"}
            async with self._http.post(f"{self._url}/reset_prefix_cache", params=how) as response:
                await response.read()
            await asyncio.sleep(_RESET_PAUSE_S)
