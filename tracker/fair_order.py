"""Who has to go when there is no room: the oldest of the tenant that has the most.

A tenant that opens ever more displaces its own, not others'. With one tenant it is plain LRU.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from tracker.errors import IntegrityError
from tracker.ids import TenantId

K = TypeVar("K", bound=Hashable)


class FairOrder(Generic[K]):
    """Keys of each tenant in the order of their last use. Everything is O(1).

    Of tenants that have equally many, the one whose last use is longest ago comes first. All
    methods belong to one thread and raise nothing but what they name.
    """

    __slots__ = ("_by_count", "_keys", "_most")

    def __init__(self) -> None:
        self._keys: dict[TenantId, OrderedDict[K, None]] = {}
        self._by_count: dict[int, OrderedDict[TenantId, None]] = {}
        self._most = 0

    def add(self, tenant: TenantId, key: K) -> None:
        """A key that is not there yet; it is the newest."""
        keys = self._keys.setdefault(tenant, OrderedDict())
        keys[key] = None
        self._recount(tenant, len(keys) - 1, len(keys))

    def touch(self, tenant: TenantId, key: K) -> None:
        """A key that is there was used."""
        keys = self._keys[tenant]
        keys.move_to_end(key)
        self._by_count[len(keys)].move_to_end(tenant)

    def remove(self, tenant: TenantId, key: K) -> None:
        """A key that is there goes."""
        keys = self._keys[tenant]
        del keys[key]
        if not keys:
            del self._keys[tenant]
        self._recount(tenant, len(keys) + 1, len(keys))

    def count(self, tenant: TenantId) -> int:
        """Keys of a tenant."""
        return len(self._keys.get(tenant, ()))

    def oldest(self, tenant: TenantId) -> K | None:
        """The key of a tenant that was used longest ago; None if it has none."""
        return next(iter(self._keys.get(tenant, ())), None)

    def first_out(self, wants: TenantId) -> K | None:
        """Who has to go; None if nobody is there. See :meth:`most_crowded`."""
        return self.oldest(self.most_crowded(wants))

    def most_crowded(self, wants: TenantId) -> TenantId:
        """The tenant that has the most; the one that needs the room, ``wants``, is spared where
        others have as much. ``wants`` if nobody has any."""
        tied = self._by_count.get(self._most)
        if tied is None:
            return wants
        if wants in tied:
            tied.move_to_end(wants)
        return next(iter(tied))

    def _recount(self, tenant: TenantId, before: int, now: int) -> None:
        if before:
            tied = self._by_count[before]
            del tied[tenant]
            if not tied:
                del self._by_count[before]
        if now:
            self._by_count.setdefault(now, OrderedDict())[tenant] = None
        if now > self._most or (before == self._most and before not in self._by_count):
            self._most = now

    def by_tenant(self) -> list[list[K]]:
        """A copy: each tenant's keys, the one used longest ago first."""
        return [list(keys) for keys in self._keys.values()]

    def check_integrity(self, expected: Iterable[tuple[TenantId, K]]) -> None:
        """Raise IntegrityError unless it holds exactly ``expected`` and its counts are right."""
        derived: dict[TenantId, set[K]] = {}
        for tenant, key in expected:
            derived.setdefault(tenant, set()).add(key)
        if {tenant: set(keys) for tenant, keys in self._keys.items()} != derived:
            raise IntegrityError("the fair order differs from what there is")
        counts: dict[int, set[TenantId]] = {}
        for tenant, keys in derived.items():
            counts.setdefault(len(keys), set()).add(tenant)
        if {count: set(tied) for count, tied in self._by_count.items()} != counts:
            raise IntegrityError("tenants are counted wrongly")
        if self._most != max(counts, default=0):
            raise IntegrityError(f"{self._most} is not the most that a tenant has")
