"""What agents tell a server of their sessions: nothing, hints, or hints and prefetches."""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from benchmarks.agents.workload import Shape, Trajectory, Turn
from spm.client import AsyncSession, AsyncSpmClient
from spm.client.session_plan import SessionPlan

TTL_S = 60.0
"""Above the longest pause of the workload."""
_TOOL = "waiting_tool"
_OVER = "finished"

Expect = Callable[[Turn], float | None]
"""Seconds until a turn's tool is thought to be done; None: nobody knows."""


class Guided(Protocol):
    """One trajectory of which a server is told."""

    def fields(self, turn: Turn) -> Mapping[str, Any]:
        """What is added to the turn's request."""
        ...

    def pause(self, turn: Turn) -> AbstractAsyncContextManager[object]:
        """Around what happens between the turn's answer and the next turn."""
        ...


class Guide(Protocol):
    """How the server is told about trajectories."""

    def session(self, trajectory: Trajectory) -> AbstractAsyncContextManager[Guided]:
        """Around the whole trajectory."""
        ...


def expected_gaps(shape: Shape) -> Expect:
    """What an agent's runtime knows: how long each tool takes on the average. Not how long it
    takes this time, and not when sub-agents are done."""
    means_s = {
        tool.name: min(shape.longest_gap_s, tool.mean_s * shape.gap_scale) for tool in shape.tools
    }
    return lambda turn: None if turn.tool is None else means_s.get(turn.tool)


class Silent:
    """Says nothing: requests as any client sends them."""

    def session(self, trajectory: Trajectory) -> AbstractAsyncContextManager[Guided]:
        return contextlib.nullcontext(_SilentSession())


class _SilentSession:
    def fields(self, turn: Turn) -> Mapping[str, Any]:
        return {}

    def pause(self, turn: Turn) -> AbstractAsyncContextManager[object]:
        return contextlib.nullcontext()


class Hinting:
    """An ``agent_hint`` in every request and no other call."""

    def __init__(self, expect: Expect) -> None:
        self._expect = expect

    def session(self, trajectory: Trajectory) -> AbstractAsyncContextManager[Guided]:
        return contextlib.nullcontext(self.guided(trajectory))

    def guided(self, trajectory: Trajectory) -> Guided:
        """One trajectory; nothing has to be done around it."""
        plan = SessionPlan(trajectory.name, trajectory.parent, 0.0, 0.0, strict=True)
        return _HintingSession(plan, self._expect)


class _HintingSession(_SilentSession):
    def __init__(self, plan: SessionPlan, expect: Expect) -> None:
        self._plan = plan
        self._expect = expect

    def fields(self, turn: Turn) -> Mapping[str, Any]:
        return _hint_fields(self._plan, self._expect, turn)


class Prefetching:
    """Hints, and the client library's sessions: they prefetch ahead of the expected return.

    ``failures`` counts management calls that failed; they cost the agent nothing but a miss.
    """

    def __init__(self, spm: AsyncSpmClient, expect: Expect) -> None:
        self._spm = spm
        self._expect = expect
        self.failures = 0

    @contextlib.asynccontextmanager
    async def session(self, trajectory: Trajectory) -> AsyncIterator[Guided]:
        """Around the whole trajectory; at its end the server is told so."""
        async with self._spm.session(trajectory.name, trajectory.parent) as session:
            yield _PrefetchingSession(session, self._expect)
        self.failures += session.failures


class _PrefetchingSession:
    def __init__(self, session: AsyncSession, expect: Expect) -> None:
        self._session = session
        self._expect = expect

    def fields(self, turn: Turn) -> Mapping[str, Any]:
        return _hint_fields(self._session, self._expect, turn)

    def pause(self, turn: Turn) -> AbstractAsyncContextManager[object]:
        return self._session.tool(self._expect(turn), TTL_S)


class _Hints(Protocol):
    def hint(
        self,
        ttl_s: float | None = None,
        state: str | None = None,
        expected_resume_s: float | None = None,
    ) -> dict[str, Any]: ...


def _hint_fields(session: _Hints, expect: Expect, turn: Turn) -> Mapping[str, Any]:
    if turn.tool is None:
        return {"agent_hint": session.hint(state=_OVER)}
    return {"agent_hint": session.hint(TTL_S, _TOOL, expect(turn))}
