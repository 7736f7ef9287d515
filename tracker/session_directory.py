"""Open sessions of each tenant in the order of their ids, for listing them page by page."""

from collections.abc import Iterable
from itertools import islice

from tracker.errors import IntegrityError
from tracker.ids import SessionId, SessionRef, TenantId
from tracker.sorted_ids import SortedIds


class SessionDirectory:
    """Sorted ids by tenant. Adding and removing cost about the same up to millions.

    All methods belong to one thread and raise nothing but what they name.
    """

    __slots__ = ("_ids",)

    def __init__(self) -> None:
        self._ids: dict[TenantId, SortedIds] = {}

    def add(self, ref: SessionRef) -> None:
        """A session that is not in the directory was opened."""
        ids = self._ids.get(ref.tenant)
        if ids is None:
            ids = self._ids[ref.tenant] = SortedIds()
        ids.add(ref.session_id)

    def remove(self, ref: SessionRef) -> None:
        """A session that is in the directory was closed."""
        ids = self._ids[ref.tenant]
        ids.remove(ref.session_id)
        if not ids:
            del self._ids[ref.tenant]

    def page(self, tenant: TenantId, after: str | None, limit: int) -> list[SessionRef]:
        """Up to ``limit`` sessions of a tenant with ids above ``after``. O(limit + log n)."""
        ids = self._ids.get(tenant)
        found = islice(ids.above(after), limit) if ids is not None else ()
        return [SessionRef(tenant, one) for one in found]

    def check_integrity(self, expected: Iterable[SessionRef]) -> None:
        """Raise IntegrityError unless it holds exactly the ``expected`` sessions, sorted."""
        derived: dict[TenantId, list[SessionId]] = {}
        for ref in expected:
            derived.setdefault(ref.tenant, []).append(ref.session_id)
        for ids in self._ids.values():
            ids.check_integrity()
        held = {tenant: list(ids.above(None)) for tenant, ids in self._ids.items()}
        if held != {tenant: sorted(ids) for tenant, ids in derived.items()}:
            raise IntegrityError("the directory differs from the open sessions")
