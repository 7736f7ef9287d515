"""Reverse index: which sessions hold a block key, and which keys nobody holds any more."""

import enum
from collections import Counter, OrderedDict
from collections.abc import Mapping

from tracker.errors import IntegrityError
from tracker.ids import BlockKey, SessionRef, TenantId
from tracker.tenant_counts import TenantCounts


class KeyState(enum.Enum):
    """Where a known key stands; an unknown key has no state."""

    TRACKED = "tracked"
    """Exactly one session holds it."""
    SHARED = "shared"
    """Two or more sessions hold it."""
    ORPHANED = "orphaned"
    """No session holds it any more; it waits to be collected."""


class _Holders(set[SessionRef]):
    """Two sessions or more that hold a key. It is counted for one of their tenants."""

    __slots__ = ("payer",)

    def __init__(self, first: SessionRef, second: SessionRef) -> None:
        super().__init__((first, second))
        self.payer = first.tenant


class KeyIndex:
    """At most one reference per session and key, plus the queue of orphans.

    All methods belong to one thread and raise nothing but what they name.
    """

    __slots__ = ("_by_tenant", "_holders", "_num_references", "_orphans")

    def __init__(self) -> None:
        # Most keys have one holder, and a set for each would triple the memory.
        self._holders: dict[BlockKey, SessionRef | _Holders] = {}
        # OrderedDict: taking the oldest stays O(1) when keys leave from the middle as well.
        self._orphans: OrderedDict[BlockKey, None] = OrderedDict()
        self._num_references = 0
        self._by_tenant = TenantCounts()
        """Keys by the tenant each is counted for: that of a session that holds it."""

    def __len__(self) -> int:
        """Known keys, orphans included."""
        return len(self._holders) + len(self._orphans)

    @property
    def num_references(self) -> int:
        """Distinct pairs of a session and a key it holds."""
        return self._num_references

    def hold(self, key: BlockKey, ref: SessionRef) -> bool:
        """Let ``ref`` hold ``key``, reviving an orphan; False when it already did. O(1)."""
        held_by = self._holders.get(key)
        if held_by is None:
            self._orphans.pop(key, None)
            self._holders[key] = ref
            self._by_tenant.add(ref.tenant)
        elif isinstance(held_by, _Holders):
            if ref in held_by:
                return False
            held_by.add(ref)
        elif held_by == ref:
            return False
        else:
            self._holders[key] = _Holders(held_by, ref)
        self._num_references += 1
        return True

    def release(self, key: BlockKey, ref: SessionRef) -> bool:
        """Take back ``ref``'s hold; the last one makes an orphan. False when it had none. O(1)."""
        held_by = self._holders.get(key)
        if isinstance(held_by, _Holders):
            if ref not in held_by:
                return False
            held_by.remove(ref)
            if held_by.payer == ref.tenant and all(r.tenant != ref.tenant for r in held_by):
                held_by.payer = min(other.tenant for other in held_by)
                self._by_tenant.add(ref.tenant, -1)
                self._by_tenant.add(held_by.payer)
            if len(held_by) == 1:
                self._holders[key] = held_by.pop()
        elif held_by == ref:
            del self._holders[key]
            self._orphans[key] = None
            self._by_tenant.add(ref.tenant, -1)
        else:
            return False
        self._num_references -= 1
        return True

    def largest_tenant(self, own: TenantId) -> TenantId:
        """Whose sessions hold the most keys, a shared one counted once; ``own`` only if nobody
        else's hold as many. O(tenants)."""
        largest = self._by_tenant.largest(own)
        return own if largest is None else largest

    def take_orphans(self, limit: int) -> list[BlockKey]:
        """Forget and return up to ``limit`` orphans, the longest waiting first."""
        count = min(limit, len(self._orphans))
        return [self._orphans.popitem(last=False)[0] for _ in range(count)]

    def is_held(self, key: BlockKey) -> bool:
        """Whether any session holds ``key``. O(1)."""
        return key in self._holders

    def sessions_of(self, key: BlockKey) -> frozenset[SessionRef]:
        """The sessions that hold ``key``; empty for an orphan or an unknown key."""
        held_by = self._holders.get(key)
        if held_by is None:
            return frozenset()
        return frozenset(held_by) if isinstance(held_by, _Holders) else frozenset((held_by,))

    def state_of(self, key: BlockKey) -> KeyState | None:
        """The state of ``key``; None when it is unknown."""
        held_by = self._holders.get(key)
        if held_by is None:
            return KeyState.ORPHANED if key in self._orphans else None
        return KeyState.SHARED if isinstance(held_by, _Holders) else KeyState.TRACKED

    def check_integrity(self, expected: Mapping[BlockKey, set[SessionRef]]) -> None:
        """Compare with the holders re-derived from the sessions. O(references).

        Raises IntegrityError when a holder, a state or a count differs.
        """
        if self._holders.keys() != expected.keys():
            raise IntegrityError("held keys differ from the keys of the sessions")
        for key, sessions in expected.items():
            if self.sessions_of(key) != sessions:
                raise IntegrityError("the holders of a key differ from the sessions that list it")
            state = KeyState.SHARED if len(sessions) > 1 else KeyState.TRACKED
            if self.state_of(key) is not state:
                raise IntegrityError(f"key with {len(sessions)} holders is {self.state_of(key)}")
        if not self._holders.keys().isdisjoint(self._orphans):
            raise IntegrityError("a held key waits as an orphan")
        derived = sum(len(sessions) for sessions in expected.values())
        by_tenant: Counter[TenantId] = Counter()
        for key, held_by in self._holders.items():
            payer = held_by.payer if isinstance(held_by, _Holders) else held_by.tenant
            by_tenant[payer] += 1
            if all(ref.tenant != payer for ref in expected[key]):
                raise IntegrityError("a key is counted for a tenant that does not hold it")
        if by_tenant != self._by_tenant:
            raise IntegrityError("the keys of a tenant are miscounted")
        if derived != self._num_references:
            raise IntegrityError(f"{self._num_references} references counted, {derived} exist")
