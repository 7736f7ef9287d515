"""Operations on sessions that go on: how many, whose, and when none more is begun.

Scheduler thread only.
"""

from typing import Any

from connectors.scheduler.transfer_queue import MAX_ASKED_FOR
from spm import events
from spm.agent_hint import Edit
from spm.config import SpmConfig
from spm.manager import SessionAwarePoolingManager
from spm.operation import Operation, Status, ended
from tracker.ids import SessionRef
from tracker.tenant_counts import TenantCounts

_TOO_MANY = "too many operations go on: try again later"
_TOO_MANY_BLOCKS_OF_TENANT = "too many blocks of this tenant wait: try again later"
_TOO_MANY_OF_TENANT = "too many operations of this tenant go on: try again later"


class RunningOperations:
    """Those of one engine."""

    def __init__(self, manager: SessionAwarePoolingManager, config: SpmConfig) -> None:
        self._manager = manager
        self._limit = config.max_operations
        self._tenant_limit = config.sam.tenant_part(config.max_operations)
        self._tenant_blocks: int | None = None
        """Blocks that one tenant's operations may be about; None: tenants are not told apart."""
        if config.sam.tells_tenants:
            self._tenant_blocks = config.sam.tenant_part(MAX_ASKED_FOR)
        self._operations: dict[Operation, None] = {}
        self._of_tenant = TenantCounts()
        self.asleep = False
        """Whether vLLM sleeps just now: its KV memory may be gone."""

    def refusal(self, ref: SessionRef, edit: Edit) -> Operation | None:
        """Why nothing can be begun now; None: it can."""
        if self.asleep:
            return ended(ref, edit, Status.REJECTED, "the engine sleeps or is paused")
        if len(self._operations) >= self._limit:
            return ended(ref, edit, Status.REJECTED, _TOO_MANY)
        if self._of_tenant[ref.tenant] >= self._tenant_limit:
            return ended(ref, edit, Status.REJECTED, _TOO_MANY_OF_TENANT)
        return None

    def no_room(self, ref: SessionRef, edit: Edit, blocks: int) -> Operation | None:
        """Why no operation on so many blocks can be begun now: one tenant's would keep others'
        waiting; None: it can."""
        if self._tenant_blocks is None:
            return None
        waiting = sum(
            one.blocks - one.done_blocks for one in self._operations if one.ref.tenant == ref.tenant
        )
        if waiting + blocks <= self._tenant_blocks:
            return None
        return ended(ref, edit, Status.REJECTED, _TOO_MANY_BLOCKS_OF_TENANT)

    def begun(self, operation: Operation, operation_id: str) -> Operation:
        """Count it until it ends, and say so."""
        operation.id = operation_id
        edit, ref, blocks = operation.edit, operation.ref, operation.blocks
        self._manager.handle(events.EditAsked(ref, edit.type, operation_id, blocks))
        self._operations[operation] = None
        self._of_tenant.add(ref.tenant)
        operation.when_done(self._note_end)
        return operation

    def _note_end(self, operation: Operation) -> None:
        self._operations.pop(operation, None)
        self._of_tenant.add(operation.ref.tenant, -1)
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
