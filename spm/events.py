"""Lifecycle events: what the engine side tells the manager. Typed, immutable, in-process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spm.keys import Rank
from tracker.ids import BlockKey, GroupId, SessionRef


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A request of this session arrived."""

    ref: SessionRef
    parent: SessionRef | None = None


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """That request is counted until it ends; meanwhile the session is not idle."""

    ref: SessionRef


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request of this session ended; the session is remembered for at least ``keep_s``."""

    ref: SessionRef
    keep_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SessionRefreshed:
    """The application spoke of the session without a request."""

    ref: SessionRef
    keep_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BlocksAssociated:
    """A request of the session ended having computed these blocks, from index 0 on."""

    ref: SessionRef
    keys: Mapping[GroupId, Sequence[BlockKey]]


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The application is done with it; with ``tree`` also with its descendants."""

    ref: SessionRef
    tree: bool = False


@dataclass(frozen=True, slots=True)
class HostChanged:
    """One rank's host tier gained (True) or lost (False) blocks."""

    rank: Rank
    changes: Mapping[BlockKey, bool]


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """One rank's values were acknowledged by the remote store."""

    rank: Rank
    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class BlocksConfirmed:
    """Every rank's values were seen in the remote store just now."""

    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class BlocksMissing:
    """Asked for and not there, on at least one rank."""

    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class BlocksDoubted:
    """Their predecessors were gone from the remote store; they were not asked for."""

    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class CacheReset:
    """Nothing stored before may be used again."""


LifecycleEvent = (
    SessionOpened
    | RequestStarted
    | RequestEnded
    | SessionRefreshed
    | BlocksAssociated
    | SessionEnded
    | HostChanged
    | BlocksStored
    | BlocksConfirmed
    | BlocksMissing
    | BlocksDoubted
    | CacheReset
)
