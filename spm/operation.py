"""Operations on sessions: what was asked for, and what has become of it so far.

Belongs to the scheduler thread. An operation reaches a final status exactly once, whatever
happens to the store, the session or the engine's blocks.
"""

from collections.abc import Callable, Iterable
from enum import Enum

from spm.agent_hint import Edit
from tracker.ids import SessionRef


class Status(str, Enum):
    """What became of what was asked for."""

    OK = "ok"
    PARTIAL = "partial"
    ACCEPTED = "accepted"
    """It goes on in the background."""
    DEFERRED = "deferred"
    """It waits for something else to happen first."""
    UNSUPPORTED = "unsupported"
    NOT_FOUND = "not_found"
    REJECTED = "rejected"
    FAILED = "failed"


UNFINISHED = frozenset((Status.ACCEPTED, Status.DEFERRED))


class Operation:
    """Handle of one offload, prefetch, eviction or release."""

    __slots__ = ("_on_end", "blocks", "cut", "detail", "done_blocks", "edit", "id", "ref", "status")

    def __init__(
        self, ref: SessionRef, edit: Edit, blocks: int = 0, operation_id: str = ""
    ) -> None:
        self.ref = ref
        self.edit = edit
        self.id = operation_id
        """Of the management request it is part of; empty: it came with a generation request."""
        self.status = Status.ACCEPTED
        self.blocks = blocks
        """Stored blocks it is about, all groups."""
        self.done_blocks = 0
        """Those it is through with."""
        self.detail = ""
        self.cut = ""
        """Why it is not about all that was asked for: then it is ``partial`` at best."""
        self._on_end: list[Callable[[Operation], None]] = []

    @property
    def done(self) -> bool:
        """Whether the status is final."""
        return self.status not in UNFINISHED

    def end(self, status: Status, detail: str = "") -> "Operation":
        """Reach a final status; nothing happens if there is one already."""
        if not self.done:
            if self.cut and status is Status.OK:
                status, detail = Status.PARTIAL, self.cut
            self.status, self.detail = status, detail
            callbacks, self._on_end = self._on_end, []
            for tell in callbacks:
                tell(self)
        return self

    def when_done(self, tell: Callable[["Operation"], None]) -> None:
        """Call ``tell`` at the end, or now if that has been."""
        if self.done:
            tell(self)
        else:
            self._on_end.append(tell)

    def follow(self, other: "Operation") -> None:
        """Become what another operation becomes."""
        self.blocks = other.blocks
        other.when_done(self._take_over)

    def _take_over(self, other: "Operation") -> None:
        self.done_blocks = other.done_blocks
        self.end(other.status, other.detail)


def ended(ref: SessionRef, edit: Edit, status: Status, detail: str = "") -> Operation:
    """An operation that was over at once."""
    return Operation(ref, edit).end(status, detail)


def overall(statuses: Iterable[Status]) -> Status:
    """One status for several: theirs if they agree; ``accepted`` while some go on and the
    others went well; else ``partial``; of none, ``ok``."""
    different = set(statuses)
    if not different:
        return Status.OK
    if len(different) == 1:
        return different.pop()
    if different & UNFINISHED and different <= UNFINISHED | {Status.OK}:
        return Status.ACCEPTED
    return Status.PARTIAL
