"""What became of management requests, for those who ask later or ask twice."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from tracker.ids import TenantId

MAX_OPERATIONS = 4096
"""Answers remembered; then the oldest is forgotten."""

Render = Callable[[], dict[str, Any]]
"""The answer as it is now: what goes on in the background changes it."""


class OperationLog:
    """Answers by tenant and operation id. Belongs to the scheduler thread."""

    def __init__(self) -> None:
        self._answers: OrderedDict[tuple[TenantId, str], Render] = OrderedDict()

    def get(self, tenant: TenantId, operation_id: str) -> dict[str, Any] | None:
        """The answer, or None if there was none or it is forgotten."""
        render = self._answers.get((tenant, operation_id))
        return render() if render is not None else None

    def put(self, tenant: TenantId, operation_id: str, render: Render) -> None:
        """Remember an answer."""
        self._answers[tenant, operation_id] = render
        if len(self._answers) > MAX_OPERATIONS:
            self._answers.popitem(last=False)

    def __len__(self) -> int:
        return len(self._answers)
