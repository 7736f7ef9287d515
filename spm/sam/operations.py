"""What became of management requests, for those who ask later or ask twice."""

from collections import OrderedDict
from typing import Any

from tracker.ids import TenantId

MAX_OPERATIONS = 4096
"""Answers remembered; then the oldest is forgotten."""


class OperationLog:
    """Answers by tenant and operation id. Belongs to the scheduler thread."""

    def __init__(self) -> None:
        self._answers: OrderedDict[tuple[TenantId, str], dict[str, Any]] = OrderedDict()

    def get(self, tenant: TenantId, operation_id: str) -> dict[str, Any] | None:
        """The first answer, or None if there was none or it is forgotten."""
        return self._answers.get((tenant, operation_id))

    def put(self, tenant: TenantId, operation_id: str, answer: dict[str, Any]) -> None:
        """Remember an answer."""
        self._answers[tenant, operation_id] = answer
        if len(self._answers) > MAX_OPERATIONS:
            self._answers.popitem(last=False)

    def __len__(self) -> int:
        return len(self._answers)
