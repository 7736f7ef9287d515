"""The session-aware pooling manager: sessions, their keys, and where those keys are.

Owned by the scheduler thread, synchronous, no I/O. Events go in through one door; the
connector reads ``residency`` to plan and ``tracker`` to answer questions.
"""

import logging
import time
from collections.abc import Callable

from spm.config import SpmConfig
from spm.errors import IntegrityError
from spm.events import (
    BlocksAssociated,
    BlocksConfirmed,
    BlocksDoubted,
    BlocksMissing,
    BlocksStored,
    CacheReset,
    HostChanged,
    LifecycleEvent,
    RequestEnded,
    RequestStarted,
    SessionEnded,
    SessionOpened,
    SessionRefreshed,
)
from spm.metrics import Counters, Metric
from spm.residency import ResidencyIndex
from tracker.ids import SessionRef
from tracker.session_key_tracker import SessionKeyTracker, TrackOutcome
from tracker.ttl_wheel import TtlWheel

logger = logging.getLogger(__name__)

_ORPHANS_PER_TICK = 4096
"""Orphaned keys let go of in one step, so that a mass expiry cannot stall the scheduler."""


class SessionAwarePoolingManager:
    """One engine's sessions and residency."""

    def __init__(
        self,
        config: SpmConfig,
        world_size: int,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
        on_closed: Callable[[SessionRef], None] = lambda ref: None,
    ) -> None:
        """``on_closed`` is told of every session at the moment it is forgotten or ended."""
        self._session_ttl_s = config.session_ttl_s
        self._counters = counters
        self._clock = clock
        self._active: dict[SessionRef, int] = {}
        """Requests by session, from arrival to end."""
        self._on_closed = on_closed
        self._backlog = False
        self.tracker = SessionKeyTracker(config.max_sessions, config.max_keys, clock)
        self.residency = ResidencyIndex(world_size, config.max_keys, config.residency_ttl_s, clock)
        self._wheel: TtlWheel[SessionRef] = TtlWheel(clock)

    def handle(self, event: LifecycleEvent) -> None:
        """Apply one event; never raises for a session or key it does not know."""
        match event:
            case SessionOpened(ref, parent):
                outcome = self.tracker.open(ref, parent)
                self._note(outcome)
                self._keep(ref)
                if parent is not None and outcome.refused is None:
                    self._keep(parent)
            case RequestStarted(ref):
                self._active[ref] = self._active.get(ref, 0) + 1
            case RequestEnded(ref, keep_s):
                self._end_request(ref)
                self._note(self.tracker.open(ref))
                self._keep(ref, keep_s)
            case SessionRefreshed(ref, keep_s):
                if self.tracker.touch(ref):
                    self._keep(ref, keep_s)
            case BlocksAssociated(ref, keys):
                self._note(self.tracker.open(ref))
                self._keep(ref)
                for group, blocks in keys.items():
                    self._note(self.tracker.associate(ref, group, 0, blocks))
            case SessionEnded(ref, tree):
                for one in self.tracker.subtree(ref) if tree else [ref]:
                    self._close(one)
            case HostChanged(rank, changes):
                self.residency.note_host(rank, changes)
            case BlocksStored(rank, stored):
                self.residency.note_remote_stored(rank, stored)
            case BlocksConfirmed(confirmed):
                self.residency.confirm_remote(confirmed)
            case BlocksMissing(missing):
                self.residency.forget(missing)
            case BlocksDoubted(doubted):
                self.residency.doubt_remote(doubted)
            case CacheReset():
                self.residency.clear()

    @property
    def has_backlog(self) -> bool:
        """Whether a tick left work for the next step."""
        return self._backlog

    def tick(self) -> None:
        """Once a second, or a step while there is a backlog: expire sessions, let go of keys
        nobody has any more.

        A session is not idle while a request of its own or of a descendant runs, however
        long that takes.
        """
        due = self._wheel.advance()
        busy = self._busy() if due else set()
        for ref in due:
            if ref in busy:
                self._wheel.register(ref, self._session_ttl_s)
            elif self._close(ref):
                self._counters.add(Metric.FORGOTTEN, label="expired")
        self._backlog = len(self.tracker.take_orphans(_ORPHANS_PER_TICK)) == _ORPHANS_PER_TICK

    def active_requests(self, ref: SessionRef) -> int:
        """Requests of the session that have arrived and not ended."""
        return self._active.get(ref, 0)

    def idle_s(self, ref: SessionRef) -> float:
        """Seconds since the session was last heard of; 0 for an unknown one."""
        since_s = self.tracker.idle_since_s(ref)
        return 0.0 if since_s is None else self._clock() - since_s

    def _busy(self) -> set[SessionRef]:
        """Sessions with a request of their own or of a descendant."""
        busy: set[SessionRef] = set()
        for active in self._active:
            ref: SessionRef | None = active
            while ref is not None and ref not in busy:
                busy.add(ref)
                ref = self.tracker.parent_of(ref)
        return busy

    def _keep(self, ref: SessionRef, keep_s: float = 0.0) -> None:
        """Remember it at least so long; what was promised before stands."""
        deadline_s = self._wheel.deadline_s(ref)
        left_s = deadline_s - self._clock() if deadline_s is not None else 0.0
        self._wheel.register(ref, max(self._session_ttl_s, keep_s, left_s))

    def _end_request(self, ref: SessionRef) -> None:
        left = self._active.get(ref, 0) - 1
        if left > 0:
            self._active[ref] = left
        else:
            self._active.pop(ref, None)

    def _close(self, ref: SessionRef) -> bool:
        self._wheel.remove(ref)
        closed = self.tracker.free_session(ref)
        if closed:
            self._on_closed(ref)
        return closed

    def _note(self, outcome: TrackOutcome) -> None:
        """Sessions forgotten for a bound lose their deadline too."""
        for ref in outcome.forgotten:
            self._wheel.remove(ref)
            self._on_closed(ref)
            self._counters.add(Metric.FORGOTTEN, label="bound")

    def check_integrity(self) -> None:
        """Raise :class:`spm.errors.IntegrityError` if tracker, wheel or residency are off."""
        self.tracker.check_integrity()
        self.residency.check_integrity()
        self._wheel.check_integrity()
        if len(self._wheel) != self.tracker.num_sessions:
            raise IntegrityError(
                f"{self.tracker.num_sessions} sessions, {len(self._wheel)} deadlines"
            )
