"""Watches a server while a soak runs: alive, healthy, how much memory."""

import asyncio
import contextlib
import time

import aiohttp

from benchmarks.soak_server import SoakServer
from benchmarks.soak_watch import Sample, gone, take_sample
from spm.demo.server import is_healthy

_PERIOD_S = 1.0
_HEALTH_TIMEOUT_S = 30.0


class Watcher:
    """Belongs to one event loop; ``server_is_gone`` tells the others to stop."""

    def __init__(self, http: aiohttp.ClientSession, server: SoakServer) -> None:
        self._http = http
        self._server = server
        self._started_s = time.monotonic()
        self._before = self.sample()
        self.samples: list[Sample] = []
        self.deaths: list[str] = []

    @property
    def server_is_gone(self) -> bool:
        """A process ended, or the server says that it is not healthy."""
        return bool(self.deaths)

    def sample(self) -> Sample:
        """The processes now."""
        return take_sample(self._server.process.pid, time.monotonic() - self._started_s)

    async def run(self) -> None:
        """Until cancelled, or the server is gone."""
        while not self.server_is_gone:
            self.samples.append(self.sample())
            self.deaths += [f"process {name} ended" for name in self._gone()]
            if not self.deaths and not await self._healthy():
                self.deaths.append(f"/health failed after {self.samples[-1].at_s:.0f} s")
            await asyncio.sleep(_PERIOD_S)

    def _gone(self) -> list[str]:
        return gone(self._before, self.sample())

    async def _healthy(self) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                return await is_healthy(self._http, self._server.url)
        return False
