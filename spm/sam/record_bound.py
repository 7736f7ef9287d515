"""How many records of blocks the sessions have, and whose go when they are too many."""

from collections import Counter

from spm.errors import IntegrityError
from tracker.fair_order import FairOrder
from tracker.ids import SessionRef, TenantId
from tracker.tenant_counts import TenantCounts


class RecordBound:
    """Counts by tenant; the tenant that has the most gives first, its session idle longest.

    Belongs to the scheduler thread.
    """

    __slots__ = ("_by_tenant", "_limit", "_order", "num_records")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_tenant = TenantCounts()
        self._order: FairOrder[SessionRef] = FairOrder()
        self.num_records = 0

    @property
    def exceeded(self) -> bool:
        return self.num_records > self._limit

    def opened(self, ref: SessionRef) -> None:
        """A session that had nothing holds something."""
        self._order.add(ref.tenant, ref)

    def used(self, ref: SessionRef) -> None:
        self._order.touch(ref.tenant, ref)

    def closed(self, ref: SessionRef) -> None:
        """It holds nothing any more, and has no records."""
        self._order.remove(ref.tenant, ref)

    def count(self, tenant: TenantId, change: int) -> None:
        """So many records more."""
        self.num_records += change
        self._by_tenant.add(tenant, change)

    def first_out(self, current: SessionRef) -> SessionRef | None:
        """Whose records go so that ``current`` has room; it comes last of its tenant. None: no
        other session has any. O(tenants), and asked only when full."""
        largest = self._by_tenant.largest(
            current.tenant, lambda tenant: self._order.oldest(tenant) != current
        )
        return self._order.oldest(largest) if largest is not None else None

    def check_integrity(self, expected: dict[SessionRef, int]) -> None:
        """Raise :class:`IntegrityError` unless these are the records of all sessions."""
        by_tenant: Counter[TenantId] = Counter()
        for ref, records in expected.items():
            by_tenant[ref.tenant] += records
        if sum(by_tenant.values()) != self.num_records or +by_tenant != self._by_tenant:
            raise IntegrityError(f"{self.num_records} records, counted {sum(by_tenant.values())}")
        self._order.check_integrity((ref.tenant, ref) for ref in expected)
