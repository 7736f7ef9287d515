"""Sessions, the blocks they are made of, and who else uses the same blocks."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tracker.errors import IntegrityError
from tracker.fair_order import FairOrder
from tracker.ids import BlockKey, GroupId, SessionRef, TenantId
from tracker.key_index import KeyIndex, KeyState
from tracker.session_directory import SessionDirectory
from tracker.session_record import SessionRecord
from tracker.session_tree import SessionTree


class Refusal(enum.Enum):
    """Why a call was not carried out in full."""

    CYCLE = "cycle"
    """The parent is the session itself or one of its descendants, or too many levels deep."""
    OTHER_TENANT = "other_tenant"
    """The parent belongs to another tenant."""
    NEGATIVE_INDEX = "negative_index"
    """The first logical block index is below zero."""


@dataclass(frozen=True, slots=True)
class TrackOutcome:
    """What a call cost besides doing what it says."""

    forgotten: tuple[SessionRef, ...] = ()
    """Idle sessions given up to stay within a bound, in that order."""
    dropped_keys: int = 0
    """Keys dropped, or never taken, to stay within ``max_keys``."""
    orphans: tuple[BlockKey, ...] = ()
    """Those of them that waited to be collected; ``take_orphans`` will not return them."""
    refused: Refusal | None = None


class SessionKeyTracker:
    """Session <-> ordered blocks <-> block keys, with one reference per session and key.

    Bounded by forgetting, never by failing: orphans go first, then the session idle longest
    of the tenant that has the most sessions, or keys, then the tail of the session being
    associated. All methods belong to one thread and raise nothing but what they name; all
    are idempotent.
    """

    __slots__ = (
        "_clock",
        "_directory",
        "_index",
        "_max_keys",
        "_max_sessions",
        "_order",
        "_sessions",
        "_tree",
    )

    def __init__(self, max_sessions: int, max_keys: int, clock: Callable[[], float]) -> None:
        """``clock`` returns monotonic seconds.

        Raises ValueError when a session and its parent, or one key, would not fit.
        """
        if max_sessions < 2 or max_keys < 1:
            raise ValueError(f"bounds too small: {max_sessions} sessions, {max_keys} keys")
        self._max_sessions = max_sessions
        self._max_keys = max_keys
        self._clock = clock
        self._sessions: dict[SessionRef, SessionRecord] = {}
        self._order: FairOrder[SessionRef] = FairOrder()
        self._index = KeyIndex()
        self._tree = SessionTree()
        self._directory = SessionDirectory()

    @property
    def num_sessions(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    @property
    def num_keys(self) -> int:
        """Known keys, orphans included."""
        return len(self._index)

    @property
    def num_references(self) -> int:
        """Distinct pairs of a session and a key it holds."""
        return self._index.num_references

    def open(self, ref: SessionRef, parent: SessionRef | None = None) -> TrackOutcome:
        """Open ``ref`` or refresh its activity, and attach it to ``parent`` if one is given.

        The parent is opened or refreshed too: it waits for this child. A refused parent
        is left alone; the session itself is opened and keeps the parent it had.
        """
        refused = self._link(ref, parent) if parent is not None else None
        forgotten: list[SessionRef] = []
        # A known session first becomes the newest, or its own parent could displace it.
        self.touch(ref)
        if parent is not None and refused is None:
            self._activate(parent, forgotten)
        self._activate(ref, forgotten)
        return TrackOutcome(tuple(forgotten), refused=refused)

    def touch(self, ref: SessionRef) -> bool:
        """Refresh the activity of ``ref``; False when it is not open. O(1)."""
        session = self._sessions.get(ref)
        if session is None:
            return False
        session.last_active_s = self._clock()
        self._order.touch(ref.tenant, session.ref)
        return True

    def associate(
        self, ref: SessionRef, group: GroupId, start_index: int, keys: Sequence[BlockKey]
    ) -> TrackOutcome:
        """Set the logical blocks of ``ref`` from ``start_index`` on, opening it if needed.

        A different key at an index supersedes the old one; blocks after ``keys`` stay.
        Indexes from ``max_keys`` on are not taken: no session could hold them all.
        """
        if start_index < 0:
            return TrackOutcome(refused=Refusal.NEGATIVE_INDEX)
        forgotten: list[SessionRef] = []
        session = self._activate(ref, forgotten)
        fitting = keys[: max(self._max_keys - start_index, 0)]
        dropped = len(keys) - len(fitting)
        if fitting:
            session.place(group, start_index, fitting)
        orphans = self._enforce_max_keys(session, forgotten)
        return TrackOutcome(tuple(forgotten), dropped + len(orphans), tuple(orphans))

    def truncate(self, ref: SessionRef, group: GroupId, length: int) -> int:
        """Drop the blocks of ``group`` from index ``length`` on; returns how many that were.

        Not an activity of the session.
        """
        session = self._sessions.get(ref)
        return 0 if session is None else session.cut(group, length)

    def give_up(self, ref: SessionRef, group: GroupId, start: int, stop: int) -> list[BlockKey]:
        """Let ``ref`` no longer hold its blocks ``[start, stop)`` of ``group``; blocks after them
        keep their indexes. Returns the keys it does not hold any more, the tail first.

        Not an activity of the session.
        """
        session = self._sessions.get(ref)
        return [] if session is None else session.give_up(group, start, stop)

    def free_session(self, ref: SessionRef) -> bool:
        """Close ``ref``; its children become roots. False when it was not open."""
        session = self._sessions.pop(ref, None)
        if session is None:
            return False
        session.clear()
        self._order.remove(ref.tenant, ref)
        self._tree.remove(ref)
        self._directory.remove(ref)
        return True

    def free_session_tree(self, ref: SessionRef) -> list[SessionRef]:
        """Close ``ref`` and its descendants; returns those closed, children first."""
        return [node for node in self._tree.subtree(ref) if self.free_session(node)]

    def take_orphans(self, limit: int) -> list[BlockKey]:
        """Forget and return up to ``limit`` orphans: first come first, a session's tail first."""
        return self._index.take_orphans(limit)

    def is_held(self, key: BlockKey) -> bool:
        """Whether any session holds ``key``. O(1)."""
        return self._index.is_held(key)

    def sessions_of(self, key: BlockKey) -> frozenset[SessionRef]:
        """The sessions that hold ``key``; empty for an orphan or an unknown key."""
        return self._index.sessions_of(key)

    def state_of(self, key: BlockKey) -> KeyState | None:
        """The state of ``key``; None when it is unknown."""
        return self._index.state_of(key)

    def blocks(self, ref: SessionRef, group: GroupId) -> Sequence[BlockKey | None]:
        """A copy of the blocks by logical index, None for one not associated or given up."""
        session = self._sessions.get(ref)
        return () if session is None else tuple(session.blocks(group))

    def num_blocks(self, ref: SessionRef, group: GroupId) -> int:
        """Length of the same list, holes included. O(1)."""
        session = self._sessions.get(ref)
        return 0 if session is None else len(session.blocks(group))

    def is_open(self, ref: SessionRef) -> bool:
        """Whether the session is known. O(1)."""
        return ref in self._sessions

    def keys_of(self, ref: SessionRef, group: GroupId | None = None) -> list[BlockKey]:
        """The distinct keys of one group or all, group by group in logical order."""
        session = self._sessions.get(ref)
        return [] if session is None else session.keys(group)

    def parent_of(self, ref: SessionRef) -> SessionRef | None:
        """The parent, or None for a root or an unknown session."""
        return self._tree.parent_of(ref)

    def children_of(self, ref: SessionRef) -> tuple[SessionRef, ...]:
        """Direct children, oldest link first."""
        return self._tree.children_of(ref)

    def page(self, tenant: TenantId, after: str | None, limit: int) -> list[SessionRef]:
        """Up to ``limit`` open sessions of a tenant with ids above ``after``, ascending."""
        return self._directory.page(tenant, after, limit)

    def subtree(self, ref: SessionRef) -> list[SessionRef]:
        """``ref`` and its descendants, children before their parent."""
        return self._tree.subtree(ref)

    def idle_since_s(self, ref: SessionRef) -> float | None:
        """Clock reading in seconds of the last activity; None when ``ref`` is not open."""
        session = self._sessions.get(ref)
        return None if session is None else session.last_active_s

    def check_integrity(self) -> None:
        """Re-derive the index, states and counts from the sessions. O(references).

        Raises IntegrityError at the first contradiction.
        """
        holders: dict[BlockKey, set[SessionRef]] = {}
        for ref, session in self._sessions.items():
            for key in session.derive_keys():
                holders.setdefault(key, set()).add(ref)
            if session.ref != ref:
                raise IntegrityError("a session's record is another's")
        self._index.check_integrity(holders)
        self._tree.check_integrity()
        self._directory.check_integrity(self._sessions)
        self._order.check_integrity((ref.tenant, ref) for ref in self._sessions)
        for order in self._order.by_tenant():
            active_s = [self._sessions[ref].last_active_s for ref in order]
            if active_s != sorted(active_s):
                raise IntegrityError("the sessions are not in the order of their activity")
        for ref in self._tree.linked():
            parent = self._tree.parent_of(ref)
            if ref not in self._sessions or (parent and parent.tenant != ref.tenant):
                raise IntegrityError("a link leads to a closed session or another tenant")
        if self.num_sessions > self._max_sessions or self.num_keys > self._max_keys:
            raise IntegrityError(f"over a bound: {self.num_sessions=} {self.num_keys=}")

    def _link(self, ref: SessionRef, parent: SessionRef) -> Refusal | None:
        if parent.tenant != ref.tenant:
            return Refusal.OTHER_TENANT
        return None if self._tree.set_parent(ref, parent) else Refusal.CYCLE

    def _activate(self, ref: SessionRef, forgotten: list[SessionRef]) -> SessionRecord:
        if not self.touch(ref):
            if len(self._sessions) >= self._max_sessions:
                self._forget(self._order.first_out(ref.tenant), forgotten)
            self._sessions[ref] = SessionRecord(ref, self._index, self._clock())
            self._order.add(ref.tenant, ref)
            self._directory.add(ref)
        return self._sessions[ref]

    def _forget(self, ref: SessionRef | None, forgotten: list[SessionRef]) -> None:
        if ref is not None:
            self.free_session(ref)
            forgotten.append(ref)

    def _enforce_max_keys(
        self, session: SessionRecord, forgotten: list[SessionRef]
    ) -> list[BlockKey]:
        dropped: list[BlockKey] = []
        while (excess := len(self._index) - self._max_keys) > 0:
            orphans = self._index.take_orphans(excess)
            dropped += orphans
            if orphans:
                continue
            oldest = self._order.oldest(self._index.largest_tenant(session.ref.tenant))
            if oldest != session.ref:
                self._forget(oldest, forgotten)
                continue
            session.cut_last()
        return dropped
