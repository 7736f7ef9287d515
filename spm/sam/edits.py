"""Outcomes of edits, in the words of the project's status table."""

from dataclasses import dataclass
from typing import Any

from spm.agent_hint import Edit
from spm.operation import Operation, Status


@dataclass(frozen=True, slots=True)
class EditResult:
    """One edit's outcome; ``blocks``: blocks of the session it was about. With an
    ``operation`` it is that one's, which may still change."""

    edit: Edit
    status: Status
    blocks: int = 0
    detail: str = ""
    operation: Operation | None = None

    @classmethod
    def of(cls, operation: Operation) -> "EditResult":
        """What an operation has come to."""
        return cls(operation.edit, operation.status, operation=operation)

    @property
    def current(self) -> Status:
        """The status now."""
        return self.operation.status if self.operation is not None else self.status

    def to_wire(self) -> dict[str, Any]:
        """As applications and API servers see it, now."""
        span, operation = self.edit.blocks, self.operation
        wire: dict[str, Any] = {
            "type": self.edit.type.value,
            "status": self.current.value,
            "block_start": span.start if span else None,
            "block_end": span.stop if span else None,
            "blocks": operation.blocks if operation else self.blocks,
        }
        if operation is not None:
            wire["done_blocks"] = operation.done_blocks
        detail = operation.detail if operation else self.detail
        return {**wire, "detail": detail} if detail else wire
