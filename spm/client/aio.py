"""The client for asyncio."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TypeVar

import httpx

from spm.client import calls
from spm.client.aio_session import AsyncSession
from spm.client.answers import LIMITS, read_answer, translated
from spm.client.calls import DEFAULT_PAGE, Call, SessionEdit
from spm.client.endpoint import DEFAULT_TIMEOUT_S, Endpoint
from spm.client.errors import ClientClosedError
from spm.client.operation_results import EditsResult, EndResult, Operation
from spm.client.session_plan import CALL_TIMEOUT_S, PREFETCH_AFTER_S, SessionPlan
from spm.client.session_results import Session, SessionPage
from spm.client.status_results import ServerStatus
from spm.client.waiting import DEFAULT_WAIT_S, Pauses

T = TypeVar("T")


class AsyncSpmClient:
    """Sessions of one server. Belongs to one event loop; many tasks may use it at once.

    ``base_url`` may be the `openai` client's, with ``/v1``. ``headers`` go with every request
    (a tenant header, say). ``timeout_s`` is the longest wait for a connection, and for an
    answer; it is above the server's own deadline, whose words are better. ``sleep`` and
    ``clock`` are for :meth:`wait` and the tools of a session.

    Every method raises :class:`spm.client.SpmClientError`; its subclasses say what to do.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoint = Endpoint(base_url, api_key, headers)
        self._http = httpx.AsyncClient(
            base_url=self._endpoint.url,
            headers=self._endpoint.headers,
            timeout=timeout_s,
            limits=LIMITS,
            transport=transport,
        )
        self._timeout_s = timeout_s
        self.sleep = sleep
        self.clock = clock

    async def __aenter__(self) -> "AsyncSpmClient":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; harmless when repeated."""
        await self._http.aclose()

    async def call(self, call: Call[T], timeout_s: float | None = None) -> T:
        """Carry one of :mod:`spm.client.calls` out, with a timeout of its own if given."""
        if self._http.is_closed:
            raise ClientClosedError("the client is closed")
        with translated(self._endpoint.shown_url):
            response = await self._http.request(
                call.method,
                call.path,
                params=call.params,
                headers=call.headers,
                content=call.body,
                timeout=self._timeout_s if timeout_s is None else timeout_s,
            )
        return call.parse(read_answer(response))

    async def status(self) -> ServerStatus:
        """Engines, tiers, queues."""
        return await self.call(calls.status())

    async def sessions(self, limit: int = DEFAULT_PAGE, after: str | None = None) -> SessionPage:
        """One page of the tenant's sessions: up to ``limit`` (at most 1,000) above ``after``."""
        return await self.call(calls.sessions(limit, after))

    async def iter_sessions(self, page_size: int = DEFAULT_PAGE) -> AsyncIterator[Session]:
        """All sessions by id, a request a page."""
        after: str | None = None
        while True:
            page = await self.sessions(page_size, after)
            for session in page.sessions:
                yield session
            after = page.next_after
            if after is None:
                return

    async def get_session(self, session_id: str) -> Session:
        """One session and where its blocks are."""
        return await self.call(calls.get_session(session_id))

    async def edit(
        self,
        session_id: str,
        edits: Sequence[SessionEdit] = (),
        *,
        ttl_s: float | None = None,
        state: str | None = None,
        expected_resume_s: float | None = None,
        operation_id: str | None = None,
    ) -> EditsResult:
        """Edits and retention in one request.

        An ``operation_id`` of your own (1 to 64 letters, digits or ``_.-``) makes a repeat
        harmless. What goes on in the background is ``accepted``; see :meth:`wait`.
        """
        return await self.call(
            calls.edit(
                session_id,
                edits,
                ttl_s=ttl_s,
                state=state,
                expected_resume_s=expected_resume_s,
                operation_id=operation_id,
            )
        )

    async def prefetch(
        self,
        session_id: str,
        block_start: int | None = None,
        block_end: int | None = None,
        target: str = "gpu",
    ) -> EditsResult:
        """Load what is missing of a session (or of its blocks) to ``gpu`` or ``host``."""
        return await self.call(calls.prefetch(session_id, block_start, block_end, target))

    async def offload(
        self, session_id: str, block_start: int | None = None, block_end: int | None = None
    ) -> EditsResult:
        """Store a session, then release what the GPU pool keeps for it."""
        return await self.call(calls.offload(session_id, block_start, block_end))

    async def evict(
        self, session_id: str, block_start: int | None = None, block_end: int | None = None
    ) -> EditsResult:
        """Give a session's blocks up."""
        return await self.call(calls.evict(session_id, block_start, block_end))

    async def retain(
        self,
        session_id: str,
        ttl_s: float | None = None,
        state: str | None = None,
        expected_resume_s: float | None = None,
    ) -> EditsResult:
        """Say how long to keep a session and what it waits for."""
        return await self.call(
            calls.edit(session_id, ttl_s=ttl_s, state=state, expected_resume_s=expected_resume_s)
        )

    async def end_session(
        self, session_id: str, tree: bool = False, operation_id: str | None = None
    ) -> EndResult:
        """End a session, with ``tree`` its descendants too."""
        return await self.call(calls.end_session(session_id, tree, operation_id))

    async def operation(self, operation_id: str) -> Operation:
        """What has become of an operation so far."""
        return await self.call(calls.operation(operation_id))

    async def wait(
        self,
        operation_id: str,
        timeout_s: float = DEFAULT_WAIT_S,
        answer_timeout_s: float | None = None,
    ) -> Operation:
        """Look, with growing pauses, until an operation is done.

        Raises :class:`spm.client.WaitTimeoutError` when it is not in time. ``answer_timeout_s``
        replaces the client's own timeout of each look.
        """
        look, pauses = calls.operation(operation_id), Pauses(timeout_s, self.clock)
        while not (found := await self.call(look, answer_timeout_s)).done:
            await self.sleep(pauses.next_s())
        return found

    def session(
        self,
        session_id: str,
        parent: str | None = None,
        *,
        prefetch_after_s: float = PREFETCH_AFTER_S,
        timeout_s: float = CALL_TIMEOUT_S,
        strict: bool = False,
    ) -> AsyncSession:
        """``async with`` it: an agent's session, told to the server as it goes on.

        See :class:`AsyncSession`; the options are :class:`SessionPlan`'s.
        """
        return AsyncSession(
            self, SessionPlan(session_id, parent, prefetch_after_s, timeout_s, strict)
        )
