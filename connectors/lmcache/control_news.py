"""What the control worker found out, waiting for the scheduler to ask."""

from dataclasses import dataclass

from connectors.lmcache.control import ServerStatus, WarmResult
from tracker.ids import SessionRef


@dataclass(frozen=True, slots=True)
class WarmEnded:
    """A warm prefetch that was asked for is over. Without a ``result``, ``detail`` says why."""

    number: int
    result: WarmResult | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SessionWarmed:
    """A session's chunks were brought, or found, in the host tier, to keep them there."""

    ref: SessionRef
    num_tokens: int
    result: WarmResult


@dataclass(frozen=True, slots=True)
class KeepOver:
    """The time for which a session was to be kept has passed: it is kept no longer."""

    ref: SessionRef


@dataclass(frozen=True, slots=True)
class StatusSeen:
    """What the server is: told when it is asked for the first time, and when it changed in more
    than how full it is."""

    status: ServerStatus


ControlNews = WarmEnded | SessionWarmed | KeepOver | StatusSeen
