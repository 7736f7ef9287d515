"""The session-aware pooling manager: sessions, their keys, and where those keys are.

Owned by the scheduler thread, synchronous, no I/O. Events go in through one door; the
connector reads ``residency`` to plan and ``tracker`` to answer questions, and takes what
the keep-alive has to know.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from spm.agent_hint import MAX_BLOCK, BlockRange
from spm.announcer import LifecycleAnnouncer
from spm.block_events import note_blocks
from spm.config import SpmConfig
from spm.errors import IntegrityError
from spm.events import (
    BlocksAssociated,
    BlocksLoaded,
    EditAsked,
    EditDone,
    LifecycleEvent,
    RequestEnded,
    RequestStarted,
    SessionEnded,
    SessionEvicted,
    SessionOpened,
    SessionRecalled,
    SessionRefreshed,
)
from spm.holds import Hold, KeyHolds
from spm.lifecycle import ExpiryReason
from spm.lifecycle_bus import LifecycleBus
from spm.metrics import Counters, Metric
from spm.residency import ResidencyIndex
from tracker.ids import BlockKey, GroupId, SessionRef
from tracker.session_key_tracker import SessionKeyTracker, TrackOutcome
from tracker.ttl_wheel import TtlWheel

_ORPHANS_PER_TICK = 4096
"""Orphaned keys let go of in one step, so that a mass expiry cannot stall the scheduler."""
_EXPIRED_PER_TICK = 4096
"""Sessions and their keys that expire in one step, about, for the same reason."""
_SESSIONS_AT_ONCE = 16
_KEYS_PER_TAKE = 4096
"""Keys handed out by one call, for the same reason; of holds, one session's more."""


class SessionAwarePoolingManager:
    """One engine's sessions and residency."""

    def __init__(
        self,
        config: SpmConfig,
        world_size: int,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
        on_closed: Callable[[SessionRef], None] = lambda ref: None,
        bus: LifecycleBus | None = None,
    ) -> None:
        """``on_closed`` is told of every session at the moment it is forgotten or ended; the
        subscribers of ``bus``, of all that the outside may know."""
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
        self._holds = KeyHolds(self.tracker, config.max_keys, wanted=config.holds_keys)
        bus = bus if bus is not None else LifecycleBus("", counters)
        self._announcer = LifecycleAnnouncer(bus, self.tracker, self.residency)

    def handle(self, event: LifecycleEvent) -> None:
        """Apply one event; never raises for a session or key it does not know."""
        match event:
            case SessionOpened(ref, parent):
                known = self.tracker.is_open(ref)
                outcome = self._open(ref, parent)
                self._keep(ref)
                if parent is not None and outcome.refused is None:
                    self._keep(parent)
                if known:
                    self._announcer.refreshed(ref)
            case RequestStarted(ref):
                self._active[ref] = self._active.get(ref, 0) + 1
            case RequestEnded(ref, keep_s):
                self._end_request(ref)
                self._open(ref)
                self._keep(ref, keep_s)
            case SessionRefreshed(ref, keep_s):
                if self.tracker.touch(ref):
                    self._keep(ref, keep_s)
                    self._announcer.refreshed(ref)
            case BlocksAssociated(ref, keys):
                self._associate(ref, keys)
            case SessionEnded(ref, tree):
                for one in self.tracker.subtree(ref) if tree else [ref]:
                    self._end(one)
            case SessionRecalled(ref, parent, blocks):
                self._associate(ref, blocks, parent)
            case SessionEvicted(ref, span, scales):
                self._evict(ref, span, scales)
            case BlocksLoaded() | EditAsked() | EditDone():
                self._announcer.notice(event)
            case _:
                note_blocks(self.residency, event)
                self._announcer.moved(event)

    # --- what the keep-alive has to know -------------------------------------------------

    def holding(self, ref: SessionRef) -> float:
        """Monotonic seconds until which the session's keys are worth keeping alive; 0 for an
        unknown one. A running request moves that on before it comes."""
        deadline_s = self._wheel.deadline_s(ref)
        return 0.0 if deadline_s is None else deadline_s

    @property
    def has_key_news(self) -> bool:
        """Whether one of the next three has something."""
        return self._holds.has_news

    def take_holds(self) -> list[Hold]:
        """Keys of sessions whose keys or time to hold them have changed, each session once;
        the rest with the next call if there are very many. Empty without a remote store."""
        return self._holds.take_holds(self.holding, _KEYS_PER_TAKE)

    def take_released(self) -> list[BlockKey]:
        """Keys that no session holds any more, as far as ticks have come; the rest with the
        next call if there are very many. Empty without a remote store."""
        return self._holds.take_released(_KEYS_PER_TAKE)

    def take_deletable(self) -> list[BlockKey]:
        """Keys the application gave up, by ending or evicting a session, that no session has
        held since. They may be here before :meth:`take_released` has them. The rest with
        the next call if there are very many; empty without a remote store."""
        return self._holds.take_deletable(_KEYS_PER_TAKE)

    # --- time ----------------------------------------------------------------------------

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
        in_time = self._expire()
        orphans = self.tracker.take_orphans(_ORPHANS_PER_TICK)
        self._backlog = not in_time or len(orphans) == _ORPHANS_PER_TICK
        self._holds.released(orphans)

    def _expire(self) -> bool:
        """Forget idle sessions; False if some are left for the next step."""
        busy: set[SessionRef] | None = None
        kept: list[SessionRef] = []
        left = _EXPIRED_PER_TICK
        while left > 0 and (due := self._wheel.advance(_SESSIONS_AT_ONCE)):
            busy = self._busy() if busy is None else busy
            before = self.tracker.num_references
            for ref in due:
                if ref in busy:
                    kept.append(ref)
                elif self._close(ref):
                    self._counters.add(Metric.FORGOTTEN, label="expired")
                    self._announcer.forgotten(ref, ExpiryReason.IDLE)
            left -= len(due) + before - self.tracker.num_references
        for ref in kept:  # afterwards: with a TTL of zero they are due again at once
            self._keep(ref)
        return left > 0

    @property
    def num_active_requests(self) -> int:
        """Requests of sessions that have arrived and not ended."""
        return sum(self._active.values())

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
        self._holds.note(ref)

    def _end_request(self, ref: SessionRef) -> None:
        left = self._active.get(ref, 0) - 1
        if left > 0:
            self._active[ref] = left
        else:
            self._active.pop(ref, None)

    def _open(self, ref: SessionRef, parent: SessionRef | None = None) -> TrackOutcome:
        refs = (ref,) if parent is None or parent == ref else (parent, ref)
        new = [one for one in refs if not self.tracker.is_open(one)]
        outcome = self.tracker.open(ref, parent)
        self._note(outcome)
        for one in new:
            if self.tracker.is_open(one):  # a refused parent is not
                self._announcer.opened(one)
        return outcome

    def _associate(
        self,
        ref: SessionRef,
        blocks: Mapping[GroupId, Sequence[BlockKey | None]],
        parent: SessionRef | None = None,
    ) -> None:
        self._open(ref, parent)
        self._keep(ref)
        before = self._announcer.held(ref)
        for group, keys in blocks.items():
            if self._leaves(ref, group, keys):
                self.tracker.truncate(ref, group, len(keys))
            for start, run in _without_holes(keys):
                self._note(self.tracker.associate(ref, group, start, run))
                self._holds.held_again(run)
        self._announcer.associated(ref, before)

    def _leaves(self, ref: SessionRef, group: GroupId, chain: Sequence[BlockKey | None]) -> bool:
        """Whether a chain leaves the session's old one before that ends (rewind, compaction):
        what the old one has behind is of no use to it. A part of the old one leaves nothing."""
        before = self.tracker.blocks(ref, group)
        return len(before) > len(chain) and any(
            old != new
            for old, new in zip(before, chain, strict=False)
            if old is not None and new is not None
        )

    def _end(self, ref: SessionRef) -> None:
        """The application asked for it: what nobody else holds may be deleted."""
        keys = self.tracker.keys_of(ref)
        if self._close(ref):
            self._announcer.freed(ref)
        self._holds.given_up(keys)

    def _evict(self, ref: SessionRef, span: BlockRange | None, scales: Sequence[int]) -> None:
        for index, scale in enumerate(scales):
            start, stop = (span.start, span.stop) if span is not None else (0, MAX_BLOCK)
            group = GroupId(index)
            self._holds.given_up(self.tracker.give_up(ref, group, start * scale, stop * scale))

    def _close(self, ref: SessionRef) -> bool:
        self._wheel.remove(ref)
        closed = self.tracker.free_session(ref)
        if closed:
            self._closed(ref)
        return closed

    def _note(self, outcome: TrackOutcome) -> None:
        """Sessions forgotten for a bound lose their deadline too."""
        for ref in outcome.forgotten:
            self._wheel.remove(ref)
            self._closed(ref)
            self._counters.add(Metric.FORGOTTEN, label="bound")
            self._announcer.forgotten(ref, ExpiryReason.BOUND)
        self._holds.released(outcome.orphans)

    def _closed(self, ref: SessionRef) -> None:
        self._holds.closed(ref)
        self._on_closed(ref)

    def check_integrity(self) -> None:
        """Raise :class:`spm.errors.IntegrityError` if tracker, wheel or residency are off."""
        self.tracker.check_integrity()
        self.residency.check_integrity()
        self._wheel.check_integrity()
        self._holds.check_integrity()
        if len(self._wheel) != self.tracker.num_sessions:
            raise IntegrityError(
                f"{self.tracker.num_sessions} sessions, {len(self._wheel)} deadlines"
            )


def _without_holes(keys: Sequence[BlockKey | None]) -> list[tuple[int, list[BlockKey]]]:
    """Runs of consecutive keys, each with its first index."""
    runs: list[tuple[int, list[BlockKey]]] = []
    for index, key in enumerate(keys):
        if key is None:
            continue
        if runs and runs[-1][0] + len(runs[-1][1]) == index:
            runs[-1][1].append(key)
        else:
            runs.append((index, [key]))
    return runs
