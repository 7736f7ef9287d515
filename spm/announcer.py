"""Lifecycle records of what the manager does.

Owned by the scheduler thread. While nobody listens, nothing is gathered and nothing built.
"""

from collections.abc import Iterable, Mapping

from spm.events import (
    BlockEvent,
    BlocksLoaded,
    BlocksMissing,
    BlocksStored,
    EditAsked,
    EditDone,
    HostChanged,
    KeysGone,
    Notice,
)
from spm.lifecycle import ExpiryReason, LifecycleKind
from spm.lifecycle_bus import LifecycleBus
from spm.residency import ResidencyIndex, Tier
from tracker.ids import BlockKey, SessionRef
from tracker.session_key_tracker import SessionKeyTracker

_SAVING = (HostChanged, BlocksStored)
"""Events by which values come into a tier; others only tell that they are there."""
_LOSING = (HostChanged, BlocksMissing, KeysGone)
"""Events by which they are found gone; others doubt it, or make room in the index."""


class LifecycleAnnouncer:
    """Between one manager and its bus."""

    def __init__(
        self, bus: LifecycleBus, tracker: SessionKeyTracker, residency: ResidencyIndex
    ) -> None:
        self._bus = bus
        self._tracker = tracker
        self._came: dict[Tier, list[BlockKey]] = {tier: [] for tier in Tier}
        self._went: dict[Tier, list[BlockKey]] = {tier: [] for tier in Tier}
        residency.listen(self)

    # --- sessions ----------------------------------------------------------------------

    def opened(self, ref: SessionRef) -> None:
        """It was not known before."""
        self._tell_of(LifecycleKind.SESSION_OPENED, ref)

    def refreshed(self, ref: SessionRef) -> None:
        """A request of it came, or the application spoke of it."""
        self._tell_of(LifecycleKind.SESSION_REFRESHED, ref)

    def forgotten(self, ref: SessionRef, reason: ExpiryReason) -> None:
        """It was not heard of for too long, or others needed its place."""
        self._bus.publish(LifecycleKind.SESSION_EXPIRED, ref, reason=reason)

    def freed(self, ref: SessionRef) -> None:
        """The application ended it."""
        self._bus.publish(LifecycleKind.SESSION_FREED, ref)

    def held(self, ref: SessionRef) -> frozenset[BlockKey]:
        """What the session holds, to be given to :meth:`associated` afterwards."""
        return frozenset(self._tracker.keys_of(ref) if self._bus.active else ())

    def associated(self, ref: SessionRef, before: frozenset[BlockKey]) -> None:
        """It was associated with blocks, having held ``before``."""
        if self._bus.active:
            keys = [key for key in self._tracker.keys_of(ref) if key not in before]
            if keys:
                self._tell_of(LifecycleKind.BLOCKS_ASSOCIATED, ref, keys)

    def _tell_of(
        self, kind: LifecycleKind, ref: SessionRef, keys: list[BlockKey] | None = None
    ) -> None:
        if self._bus.active:
            parent = self._tracker.parent_of(ref)
            parent_id = parent.session_id if parent is not None else None
            self._bus.publish(kind, ref, keys or (), parent=parent_id)

    # --- blocks ------------------------------------------------------------------------

    def changed(self, key: BlockKey, tier: Tier, present: bool) -> None:
        """The residency index tells of one change; :meth:`moved` says why."""
        if self._bus.active:
            (self._came if present else self._went)[tier].append(key)

    def cleared(self, held: Mapping[Tier, Iterable[BlockKey]]) -> None:
        """The residency index was emptied: what is stored will not be used again."""
        for tier in Tier:
            self._bus.publish(LifecycleKind.BLOCKS_EVICTED, tier=tier)

    def moved(self, event: BlockEvent) -> None:
        """``event`` caused all changes told of since the last call."""
        for moves, causes, kind in (
            (self._went, _LOSING, LifecycleKind.BLOCKS_EVICTED),
            (self._came, _SAVING, LifecycleKind.BLOCKS_SAVED),
        ):
            for tier, keys in moves.items():
                if keys:
                    moves[tier] = []
                    if isinstance(event, causes):
                        self._bus.publish(kind, keys=keys, tier=tier)

    def notice(self, event: Notice) -> None:
        """Something that changes nothing the manager knows."""
        match event:
            case BlocksLoaded(tier, keys, ref):
                if keys:
                    self._bus.publish(LifecycleKind.BLOCKS_LOADED, ref, keys, tier=tier)
            case EditAsked(ref, edit, operation_id, blocks):
                self._bus.publish(
                    LifecycleKind.EDIT_ASKED,
                    ref,
                    edit=edit,
                    operation_id=operation_id or None,
                    blocks=blocks,
                )
            case EditDone(ref, edit, status, operation_id, blocks):
                self._bus.publish(
                    LifecycleKind.EDIT_DONE,
                    ref,
                    edit=edit,
                    status=status,
                    operation_id=operation_id or None,
                    blocks=blocks,
                )
