"""An agent's session for asyncio: ``async with client.session("agent-1") as session``."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Protocol, TypeVar

from spm.client.calls import Call
from spm.client.errors import NotFoundError, WaitTimeoutError
from spm.client.failures import Failures
from spm.client.operation_results import Operation
from spm.client.session_plan import DEFAULT_TTL_S, SessionPlan, ToolPlan, resumes

T = TypeVar("T")


class AsyncCarrier(Protocol):
    """What a session needs of its client."""

    sleep: Callable[[float], Awaitable[None]]
    clock: Callable[[], float]

    async def call(self, call: Call[T], timeout_s: float | None = None) -> T:
        """Carry a call out."""
        ...

    async def wait(
        self, operation_id: str, timeout_s: float, answer_timeout_s: float | None = None
    ) -> Operation:
        """Look until an operation is done."""
        ...


class AsyncSession:
    """Tells the server what the agent does. Entering sends nothing; leaving says ``finished``.

    By default no failure of management reaches the agent: it is logged (the first one as a
    warning) and counted in ``failures``. With ``strict`` it raises, but never in place of an
    error of the ``with`` body. Belongs to one event loop; tools may run side by side.
    """

    def __init__(self, client: AsyncCarrier, plan: SessionPlan) -> None:
        self._client = client
        self._plan = plan
        self._failures = Failures(plan.strict)
        self._background: set[asyncio.Task[None]] = set()

    @property
    def failures(self) -> int:
        """Management calls that failed."""
        return self._failures.count

    def hint(
        self,
        ttl_s: float | None = None,
        state: str | None = None,
        expected_resume_s: float | None = None,
    ) -> dict[str, Any]:
        """For a request of this session: ``extra_body={"agent_hint": session.hint()}``.

        Raises :class:`spm.client.InvalidArgumentError` for what the server would refuse.
        """
        return self._plan.hint(ttl_s, state, expected_resume_s)

    def tool(
        self, expected_s: float | None = None, ttl_s: float = DEFAULT_TTL_S, wait_s: float = 0.0
    ) -> "AsyncTool":
        """``async with`` it while a tool runs that is expected to take ``expected_s``.

        The session is kept for ``ttl_s`` and prefetched, in the background, shortly before the
        expected end, at the latest when the block is left. ``wait_s``: how long to wait then
        until the prefetch is done; 0: it goes on while the agent does.
        """
        return AsyncTool(
            self._client, self._plan, self._failures, self._spawn, expected_s, ttl_s, wait_s
        )

    async def __aenter__(self) -> "AsyncSession":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        background = list(self._background)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        with (
            self._failures.attempt("the end", body_failed=error is not None),
            contextlib.suppress(NotFoundError),  # it made no request, or is forgotten already
        ):
            await self._client.call(self._plan.finish(), self._plan.timeout_s)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._settled)
        return task

    def _settled(self, task: "asyncio.Task[None]") -> None:
        self._background.discard(task)
        if not task.cancelled():
            task.exception()  # counts as retrieved, also when nobody awaits the task


class AsyncTool:
    """One run of a tool. Use it once."""

    def __init__(
        self,
        client: AsyncCarrier,
        session: SessionPlan,
        failures: Failures,
        spawn: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
        expected_s: float | None,
        ttl_s: float,
        wait_s: float,
    ) -> None:
        self._client = client
        self._session = session
        self._failures = failures
        self._spawn = spawn
        self._plan: ToolPlan = session.tool(expected_s, ttl_s)
        self._wait_s = wait_s
        self._started_s = 0.0
        self._asked_at_s: float | None = None
        self._operation_id: str | None = None
        self._prefetching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "AsyncTool":
        with self._failures.attempt("retention"):
            await self._client.call(self._plan.retain(), self._session.timeout_s)
        self._started_s = self._client.clock()
        if self._plan.prefetch_at_s is not None:
            self._prefetching = self._spawn(self._prefetch_in(self._plan.prefetch_at_s))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._prefetching is not None and self._asked_at_s is None:
            self._prefetching.cancel()  # it still sleeps
            self._prefetching = None
        if not resumes(kind):
            return
        took_s = self._client.clock() - self._started_s
        if self._plan.prefetch_at_exit(took_s, self._asked_at_s):
            self._prefetching = self._spawn(self._prefetch())
        if self._prefetching is not None and (self._wait_s > 0 or self._session.strict):
            with self._failures.attempt("prefetch", body_failed=error is not None):
                await self._prefetching
                await self._wait()

    async def _prefetch_in(self, delay_s: float) -> None:
        await self._client.sleep(delay_s)
        self._asked_at_s = self._client.clock() - self._started_s
        await self._prefetch()

    async def _prefetch(self) -> None:
        with self._failures.attempt("prefetch"):
            answer = await self._client.call(self._plan.prefetch(), self._session.timeout_s)
            self._operation_id = None if answer.done else answer.operation_id

    async def _wait(self) -> None:
        if self._operation_id is not None and self._wait_s > 0:
            with contextlib.suppress(WaitTimeoutError):  # what is missing then is computed
                await self._client.wait(self._operation_id, self._wait_s, self._session.timeout_s)
