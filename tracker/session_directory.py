"""Open sessions of each tenant in the order of their ids, for listing them page by page."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

from tracker.errors import IntegrityError
from tracker.ids import SessionId, SessionRef, TenantId


class SessionDirectory:
    """Sorted ids by tenant. Adding and removing move pointers only: fast up to a million.

    All methods belong to one thread and raise nothing but what they name.
    """

    __slots__ = ("_ids",)

    def __init__(self) -> None:
        self._ids: dict[TenantId, list[SessionId]] = {}

    def add(self, ref: SessionRef) -> None:
        """A session that is not in the directory was opened."""
        insort(self._ids.setdefault(ref.tenant, []), ref.session_id)

    def remove(self, ref: SessionRef) -> None:
        """A session that is in the directory was closed."""
        ids = self._ids[ref.tenant]
        del ids[bisect_left(ids, ref.session_id)]
        if not ids:
            del self._ids[ref.tenant]

    def page(self, tenant: TenantId, after: str | None, limit: int) -> list[SessionRef]:
        """Up to ``limit`` sessions of a tenant with ids above ``after``. O(limit + log n)."""
        ids = self._ids.get(tenant, [])
        start = bisect_right(ids, after) if after is not None else 0
        return [SessionRef(tenant, one) for one in ids[start : start + limit]]

    def check_integrity(self, expected: Iterable[SessionRef]) -> None:
        """Raise IntegrityError unless it holds exactly the ``expected`` sessions, sorted."""
        derived: dict[TenantId, list[SessionId]] = {}
        for ref in expected:
            derived.setdefault(ref.tenant, []).append(ref.session_id)
        if self._ids != {tenant: sorted(ids) for tenant, ids in derived.items()}:
            raise IntegrityError("the directory differs from the open sessions")
