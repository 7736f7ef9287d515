"""What became of management requests, for those who ask later or ask twice."""

from collections.abc import Callable
from typing import Any

from tracker.fair_order import FairOrder
from tracker.ids import TenantId

MAX_OPERATIONS = 4096
"""Answers remembered; then the oldest of the tenant that has the most is forgotten."""

Render = Callable[[], dict[str, Any]]
"""The answer as it is now: what goes on in the background changes it."""


class OperationLog:
    """Answers by tenant and operation id. Belongs to the scheduler thread."""

    def __init__(self, limit: int = MAX_OPERATIONS) -> None:
        self._limit = limit
        self._answers: dict[tuple[TenantId, str], Render] = {}
        self._order: FairOrder[str] = FairOrder()

    def get(self, tenant: TenantId, operation_id: str) -> dict[str, Any] | None:
        """The answer, or None if there was none or it is forgotten."""
        render = self._answers.get((tenant, operation_id))
        return render() if render is not None else None

    def put(self, tenant: TenantId, operation_id: str, render: Render) -> None:
        """Remember an answer."""
        if (tenant, operation_id) not in self._answers:
            self._order.add(tenant, operation_id)
        self._answers[tenant, operation_id] = render
        if len(self._answers) > self._limit:
            self._forget_one(tenant)

    def _forget_one(self, newest: TenantId) -> None:
        crowded = self._order.most_crowded(newest)
        gone = self._order.oldest(crowded)
        assert gone is not None
        self._order.remove(crowded, gone)
        del self._answers[crowded, gone]

    def __len__(self) -> int:
        return len(self._answers)
