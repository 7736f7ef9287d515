"""How many each tenant has of something that is bounded."""

from collections import Counter
from collections.abc import Callable

from tracker.ids import TenantId


class TenantCounts(Counter[TenantId]):
    """Only tenants that have any are in it. Belongs to one thread."""

    def add(self, tenant: TenantId, change: int = 1) -> None:
        """So many more, or fewer."""
        self[tenant] += change
        if not self[tenant]:
            del self[tenant]

    def largest(
        self, own: TenantId, among: Callable[[TenantId], bool] = lambda tenant: True
    ) -> TenantId | None:
        """Who has the most, of those that may be taken; ``own`` only if nobody else has as many.
        None: nobody has any. O(tenants)."""
        return max(
            filter(among, self),
            key=lambda tenant: (self[tenant], tenant != own, tenant),
            default=None,
        )
