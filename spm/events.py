"""What the engine side tells the manager. Typed, immutable, in-process.

What the outside is told of it is in :mod:`spm.lifecycle`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spm.agent_hint import BlockRange, EditType
from spm.keys import Rank
from spm.operation import Status
from spm.residency import Tier
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
    """A request of the session ended having computed these blocks, from index 0 on; None where
    there is nothing to come back to."""

    ref: SessionRef
    keys: Mapping[GroupId, Sequence[BlockKey | None]]


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The application is done with it; with ``tree`` also with its descendants."""

    ref: SessionRef
    tree: bool = False


@dataclass(frozen=True, slots=True)
class SessionRecalled:
    """A session of another engine goes on here; ``blocks`` by logical index, None for a hole."""

    ref: SessionRef
    parent: SessionRef | None
    blocks: Mapping[GroupId, Sequence[BlockKey | None]]


@dataclass(frozen=True, slots=True)
class SessionEvicted:
    """The session gives up these logical blocks, or all, and stays open. ``scales``: by KV
    cache group, its blocks in one logical block."""

    ref: SessionRef
    blocks: BlockRange | None
    scales: Sequence[int]


@dataclass(frozen=True, slots=True)
class EditAsked:
    """An edit was accepted; it is about ``blocks`` stored blocks."""

    ref: SessionRef
    edit: EditType
    operation_id: str = ""
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class EditDone:
    """An edit reached a final status, having done ``blocks`` stored blocks."""

    ref: SessionRef
    edit: EditType
    status: Status
    operation_id: str = ""
    blocks: int = 0


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
class KeysSeen:
    """The keep-alive found every rank's value in the remote store, asked at ``asked_s``
    (monotonic seconds)."""

    keys: Sequence[BlockKey]
    asked_s: float


@dataclass(frozen=True, slots=True)
class KeysGone:
    """The keep-alive missed some rank's value in the remote store, asked at ``asked_s``
    (monotonic seconds). They are still kept alive: whoever put them back meanwhile wants that."""

    keys: Sequence[BlockKey]
    asked_s: float


@dataclass(frozen=True, slots=True)
class BlocksLoaded:
    """These arrived in the GPU pool from ``tier``, for ``ref`` if a session wanted them.
    Changes nothing that is known."""

    tier: Tier
    keys: Sequence[BlockKey]
    ref: SessionRef | None = None


@dataclass(frozen=True, slots=True)
class BlocksDoubted:
    """Their predecessors were gone from the remote store; they were not asked for."""

    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class CacheReset:
    """Nothing stored before may be used again."""


SessionEvent = (
    SessionOpened
    | RequestStarted
    | RequestEnded
    | SessionRefreshed
    | BlocksAssociated
    | SessionEnded
    | SessionRecalled
    | SessionEvicted
)
BlockEvent = (
    HostChanged
    | BlocksStored
    | BlocksConfirmed
    | BlocksMissing
    | BlocksDoubted
    | KeysSeen
    | KeysGone
    | CacheReset
)
Notice = EditAsked | EditDone | BlocksLoaded
"""Only passed on to whoever listens."""
LifecycleEvent = SessionEvent | BlockEvent | Notice
