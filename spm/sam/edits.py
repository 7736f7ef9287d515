"""Outcomes of management requests, in the words of the project's status table."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from spm.agent_hint import Edit


class Status(str, Enum):
    """What became of what was asked for."""

    OK = "ok"
    PARTIAL = "partial"
    ACCEPTED = "accepted"
    DEFERRED = "deferred"
    UNSUPPORTED = "unsupported"
    NOT_FOUND = "not_found"
    REJECTED = "rejected"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EditResult:
    """One edit's outcome; ``blocks``: blocks of the session it was about."""

    edit: Edit
    status: Status
    blocks: int = 0
    detail: str = ""

    def to_wire(self) -> dict[str, Any]:
        """As applications and API servers see it."""
        span = self.edit.blocks
        wire: dict[str, Any] = {
            "type": self.edit.type.value,
            "status": self.status.value,
            "block_start": span.start if span else None,
            "block_end": span.stop if span else None,
            "blocks": self.blocks,
        }
        return {**wire, "detail": self.detail} if self.detail else wire


def overall(statuses: Iterable[Status]) -> Status:
    """One status for several: theirs if they agree, else ``partial``; of none, ``ok``."""
    different = set(statuses)
    if not different:
        return Status.OK
    return different.pop() if len(different) == 1 else Status.PARTIAL
