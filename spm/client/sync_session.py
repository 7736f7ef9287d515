"""An agent's session without an event loop: ``with client.session("agent-1") as session``."""

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

from spm.client.calls import Call
from spm.client.errors import NotFoundError, WaitTimeoutError
from spm.client.failures import Failures
from spm.client.operation_results import Operation
from spm.client.session_plan import DEFAULT_TTL_S, SessionPlan, ToolPlan, resumes

T = TypeVar("T")


class Carrier(Protocol):
    """What a session needs of its client."""

    clock: Callable[[], float]

    def call(self, call: Call[T], timeout_s: float | None = None) -> T:
        """Carry a call out."""
        ...

    def wait(
        self, operation_id: str, timeout_s: float, answer_timeout_s: float | None = None
    ) -> Operation:
        """Look until an operation is done."""
        ...


class SyncSession:
    """Tells the server what the agent does. Entering sends nothing; leaving says ``finished``.

    As :class:`spm.client.AsyncSession`, but without background work: a tool's prefetch is
    asked for when the tool is done. Belongs to one thread.
    """

    def __init__(self, client: Carrier, plan: SessionPlan) -> None:
        self._client = client
        self._plan = plan
        self._failures = Failures(plan.strict)

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
    ) -> "SyncTool":
        """``with`` it while a tool runs that is expected to take ``expected_s``.

        The session is kept for ``ttl_s`` and prefetched when the block is left. ``wait_s``: how
        long to wait until that is done; 0: it goes on while the agent does.
        """
        return SyncTool(self._client, self._plan, self._failures, expected_s, ttl_s, wait_s)

    def __enter__(self) -> "SyncSession":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with (
            self._failures.attempt("the end", body_failed=error is not None),
            contextlib.suppress(NotFoundError),  # it made no request, or is forgotten already
        ):
            self._client.call(self._plan.finish(), self._plan.timeout_s)


class SyncTool:
    """One run of a tool. Use it once."""

    def __init__(
        self,
        client: Carrier,
        session: SessionPlan,
        failures: Failures,
        expected_s: float | None,
        ttl_s: float,
        wait_s: float,
    ) -> None:
        self._client = client
        self._session = session
        self._failures = failures
        self._plan: ToolPlan = session.tool(expected_s, ttl_s)
        self._wait_s = wait_s
        self._started_s = 0.0

    def __enter__(self) -> "SyncTool":
        with self._failures.attempt("retention"):
            self._client.call(self._plan.retain(), self._session.timeout_s)
        self._started_s = self._client.clock()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        took_s = self._client.clock() - self._started_s
        if not resumes(kind) or not self._plan.prefetch_at_exit(took_s, None):
            return
        with self._failures.attempt("prefetch", body_failed=error is not None):
            answer = self._client.call(self._plan.prefetch(), self._session.timeout_s)
            if self._wait_s > 0 and not answer.done:
                with contextlib.suppress(WaitTimeoutError):  # what is missing then is computed
                    self._client.wait(answer.operation_id, self._wait_s, self._session.timeout_s)
