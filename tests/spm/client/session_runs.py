"""An agent's session on both clients: tools that take their time, and what the server is told."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from spm.client import AsyncSpmClient, SpmClient
from tests.clock import FakeClock
from tests.spm.client.documents import EDITS, operation
from tests.spm.client.driving import URL
from tests.spm.client.fake_server import FakeServer

PATH = "/v1/sessions/s/edits"
_TURNS = 50
"""Turns of the event loop that are enough for a prepared answer to arrive."""


@dataclass
class Tool:
    """One run of a tool; ``options`` are those of ``session.tool``.

    An agent that catches a tool's error goes on with its session.
    """

    took_s: float
    error: BaseException | None
    caught: bool
    options: dict[str, Any]

    def handled(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.suppress(BaseException) if self.caught else contextlib.nullcontext()


def tool(
    took_s: float = 0.0,
    error: BaseException | None = None,
    caught: bool = False,
    **options: Any,  # noqa: ANN401
) -> Tool:
    return Tool(took_s, error, caught, options)


class SessionRun:
    """Runs sessions against ``server``; times count from the start of the run."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self._start_s = self.clock.now_s
        self.server = FakeServer(self.clock)
        self.server.answers("POST", PATH, {**EDITS, "session_id": "s"})
        self.server.answers("GET", "/v1/operations/op-1", operation())
        self.failures = 0

    def run(
        self,
        tools: Sequence[Tool] = (),
        *,
        error: BaseException | None = None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """A session with these tools, one after the other, that ends with ``error``."""
        raise NotImplementedError

    def said(self) -> list[tuple[str, float]]:
        """What the server was told, and when."""
        return [(_short(s.body), round(s.at_s - self._start_s, 3)) for s in self.server.requests]


class SyncRun(SessionRun):
    """:class:`SpmClient`."""

    def run(
        self,
        tools: Sequence[Tool] = (),
        *,
        error: BaseException | None = None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        transport = self.server.transport
        with SpmClient(URL, transport=transport, clock=self.clock) as client:
            session = client.session("s", **options)
            try:
                with session:
                    for one in tools:
                        with one.handled(), session.tool(**one.options):
                            self.clock.now_s += one.took_s
                            _raise(one.error)
                    _raise(error)
            finally:
                self.failures = session.failures


class AsyncRun(SessionRun):
    """:class:`AsyncSpmClient`. Time passes in steps of 0.1 s, so that what waits for it wakes."""

    def run(
        self,
        tools: Sequence[Tool] = (),
        *,
        error: BaseException | None = None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        async def scenario() -> None:
            transport = self.server.transport
            async with AsyncSpmClient(
                URL, transport=transport, clock=self.clock, sleep=self._sleep
            ) as client:
                session = client.session("s", **options)
                try:
                    async with session:
                        for one in tools:
                            with one.handled():
                                async with session.tool(**one.options):
                                    await self._pass(one.took_s)
                                    _raise(one.error)
                            await _settle()
                        _raise(error)
                finally:
                    self.failures = session.failures

        asyncio.run(asyncio.wait_for(scenario(), timeout=30))

    async def _sleep(self, delay_s: float) -> None:
        until_s = self.clock.now_s + delay_s
        while self.clock.now_s < until_s - 1e-9:
            await asyncio.sleep(0)

    async def _pass(self, seconds: float) -> None:
        await _settle()
        start_s = self.clock.now_s
        for step in range(1, round(seconds * 10) + 1):
            self.clock.now_s = start_s + step / 10
            await _settle()


RUNS: list[Callable[[], SessionRun]] = [SyncRun, AsyncRun]


def refuse(server: FakeServer, *bodies: str) -> None:
    """Let the connection break on requests that say one of ``bodies``, or on all."""
    answer = server.handle

    def handle(request: httpx.Request) -> httpx.Response:
        answered = answer(request)
        if not bodies or _short(server.requests[-1].body) in bodies:
            raise httpx.ConnectError("Connection refused")
        return answered

    server.handle = handle  # type: ignore[method-assign]


async def _settle() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _short(body: Any) -> str:  # noqa: ANN401
    if body is None:
        return "look"
    with contextlib.suppress(KeyError):
        return str(body["edits"][0]["type"])
    if body["state"] == "finished":
        return "finished"
    ttl_s, expected_s = body["cache_control"]["ttl"], body.get("expected_resume_s")
    expected = "" if expected_s is None else f" for {expected_s:g}"
    return f"{body['state']}{expected} ttl {ttl_s:g}"
