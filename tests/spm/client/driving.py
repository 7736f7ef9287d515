"""Both clients behind one face, so that every case is a case of both."""

import asyncio
from collections.abc import Callable
from typing import Any

from spm.client import AsyncSpmClient, Session, SpmClient
from tests.clock import FakeClock
from tests.spm.client.fake_server import FakeServer

URL = "http://server:8000"


class SleepingClock(FakeClock):
    """Sleeping lets the time pass at once."""

    def __init__(self) -> None:
        super().__init__()
        self.slept_s: list[float] = []

    def sleep(self, delay_s: float) -> None:
        self.slept_s.append(delay_s)
        self.now_s += delay_s

    async def sleep_async(self, delay_s: float) -> None:
        self.sleep(delay_s)


class SyncDriver:
    """Calls methods of :class:`SpmClient` by name."""

    def __init__(self, server: FakeServer, **options: Any) -> None:  # noqa: ANN401
        self.clock = SleepingClock()
        self._server, self._options = server, options

    def do(self, method: str, *args: Any, **fields: Any) -> Any:  # noqa: ANN401
        with self._client() as client:
            return getattr(client, method)(*args, **fields)

    def all_sessions(self, page_size: int) -> list[Session]:
        with self._client() as client:
            return list(client.iter_sessions(page_size))

    def do_closed(self, method: str) -> Any:  # noqa: ANN401
        client = self._client()
        client.close()
        client.close()
        return getattr(client, method)()

    def _client(self) -> SpmClient:
        return SpmClient(
            **{"base_url": URL, **self._options},
            transport=self._server.transport,
            sleep=self.clock.sleep,
            clock=self.clock,
        )


class AsyncDriver:
    """The same for :class:`AsyncSpmClient`."""

    def __init__(self, server: FakeServer, **options: Any) -> None:  # noqa: ANN401
        self.clock = SleepingClock()
        self._server, self._options = server, options

    def do(self, method: str, *args: Any, **fields: Any) -> Any:  # noqa: ANN401
        async def scenario() -> Any:  # noqa: ANN401
            async with self._client() as client:
                return await getattr(client, method)(*args, **fields)

        return asyncio.run(scenario())

    def all_sessions(self, page_size: int) -> list[Session]:
        async def scenario() -> list[Session]:
            async with self._client() as client:
                return [one async for one in client.iter_sessions(page_size)]

        return asyncio.run(scenario())

    def do_closed(self, method: str) -> Any:  # noqa: ANN401
        async def scenario() -> Any:  # noqa: ANN401
            client = self._client()
            await client.close()
            await client.close()
            return await getattr(client, method)()

        return asyncio.run(scenario())

    def _client(self) -> AsyncSpmClient:
        return AsyncSpmClient(
            **{"base_url": URL, **self._options},
            transport=self._server.transport,
            sleep=self.clock.sleep_async,
            clock=self.clock,
        )


Driver = SyncDriver | AsyncDriver
DRIVERS: list[Callable[..., Driver]] = [SyncDriver, AsyncDriver]
