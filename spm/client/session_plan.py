"""What an agent's session tells the server, and when. Pure; the sessions of both clients follow it.

A tool pauses the session: its blocks are to be kept meanwhile, and to be back on the GPU when the
tool is done.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spm.agent_hint import MAX_RESUME_S, HintError, SessionState, parse_agent_hint
from spm.client import calls
from spm.client.calls import Call
from spm.client.errors import InvalidArgumentError
from spm.client.operation_results import EditsResult
from spm.config import MAX_TTL_S

DEFAULT_TTL_S = 300.0
PREFETCH_AFTER_S = 1.0
PREFETCH_LEAD_S = 0.5
"""How long before a tool's expected end its session is asked back: loading takes time, too."""
CALL_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """``prefetch_after_s``: a pause shorter than this needs no prefetch. ``timeout_s``: longest
    wait for any answer. ``strict``: failures of management raise instead of being logged.
    """

    session_id: str
    parent: str | None
    prefetch_after_s: float
    timeout_s: float
    strict: bool

    def __post_init__(self) -> None:
        self.hint()

    def hint(
        self,
        ttl_s: float | None = None,
        state: str | None = None,
        expected_resume_s: float | None = None,
    ) -> dict[str, Any]:
        """The ``agent_hint`` of a request; raises :class:`InvalidArgumentError`."""
        hint: dict[str, Any] = {"session_id": self.session_id}
        if self.parent is not None:
            hint["parent_session_id"] = self.parent
        hint |= calls.retention(ttl_s, state, expected_resume_s)
        _check(hint)
        return hint

    def tool(self, expected_s: float | None, ttl_s: float) -> "ToolPlan":
        """For one run of a tool. Both are estimates: beyond a bound they count as the bound."""
        return ToolPlan(
            self.session_id,
            None if expected_s is None else _bounded(expected_s, MAX_RESUME_S),
            _bounded(ttl_s, MAX_TTL_S),
            self.prefetch_after_s,
        )

    def finish(self) -> Call[EditsResult]:
        """The session will not come back."""
        return calls.edit(self.session_id, state=SessionState.FINISHED.value)


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """One run of a tool; times count from its start."""

    session_id: str
    expected_s: float | None
    ttl_s: float
    prefetch_after_s: float

    @property
    def prefetch_at_s(self) -> float | None:
        """When to prefetch while the tool runs; None: not before its end."""
        if self.expected_s is None or self.expected_s < self.prefetch_after_s:
            return None
        return max(0.0, self.expected_s - PREFETCH_LEAD_S)

    def prefetch_at_exit(self, took_s: float, asked_at_s: float | None) -> bool:
        """Whether to prefetch at the tool's end; ``asked_at_s``: when it was done before."""
        if asked_at_s is not None:
            return took_s - asked_at_s > self.ttl_s  # its protection is over by now
        return took_s >= self.prefetch_after_s or self.prefetch_at_s is not None

    def retain(self) -> Call[EditsResult]:
        """The session waits for the tool."""
        return calls.edit(
            self.session_id,
            ttl_s=self.ttl_s,
            state=SessionState.WAITING_TOOL.value,
            expected_resume_s=self.expected_s,
        )

    def prefetch(self) -> Call[EditsResult]:
        """The session comes back."""
        return calls.prefetch(self.session_id)


def resumes(error: type[BaseException] | None) -> bool:
    """Whether the session goes on after a tool that ended with ``error``: not if cancelled."""
    return error is None or issubclass(error, Exception)


def _check(hint: Mapping[str, Any]) -> None:
    try:
        parse_agent_hint(hint, "hint")
    except HintError as error:
        raise InvalidArgumentError(str(error)) from error


def _bounded(estimate_s: float, most_s: float) -> float:
    return min(estimate_s, most_s) if estimate_s >= 0 else 0.0  # 0 also for a NaN
