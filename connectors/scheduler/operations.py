"""Operations on sessions that go on: how many, whose, and when none more is begun.

Scheduler thread only.
"""

from typing import Any

from spm import events
from spm.agent_hint import Edit
from spm.manager import SessionAwarePoolingManager
from spm.operation import Operation, Status, ended
from tracker.ids import SessionRef

_TOO_MANY = "too many operations go on: try again later"


class RunningOperations:
    """Those of one engine."""

    def __init__(self, manager: SessionAwarePoolingManager, limit: int) -> None:
        self._manager = manager
        self._limit = limit
        self._operations: dict[Operation, None] = {}
        self.asleep = False
        """Whether vLLM sleeps just now: its KV memory may be gone."""

    def refusal(self, ref: SessionRef, edit: Edit) -> Operation | None:
        """Why nothing can be begun now; None: it can."""
        if self.asleep:
            return ended(ref, edit, Status.REJECTED, "the engine sleeps or is paused")
        if len(self._operations) >= self._limit:
            return ended(ref, edit, Status.REJECTED, _TOO_MANY)
        return None

    def begun(self, operation: Operation, operation_id: str) -> Operation:
        """Count it until it ends, and say so."""
        operation.id = operation_id
        edit, ref, blocks = operation.edit, operation.ref, operation.blocks
        self._manager.handle(events.EditAsked(ref, edit.type, operation_id, blocks))
        self._operations[operation] = None
        operation.when_done(self._note_end)
        return operation

    def _note_end(self, operation: Operation) -> None:
        self._operations.pop(operation, None)
        done = events.EditDone(
            operation.ref,
            operation.edit.type,
            operation.status,
            operation.id,
            operation.done_blocks,
        )
        self._manager.handle(done)

    def of(self, ref: SessionRef) -> list[dict[str, Any]]:
        """Those of a session, as applications see them."""
        return [
            {"id": one.id, "type": one.edit.type.value, "status": one.status.value}
            for one in self._operations
            if one.ref == ref
        ]

    def __len__(self) -> int:
        return len(self._operations)
