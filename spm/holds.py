"""News of session keys for whoever keeps them alive in the remote store.

Queues only: what is to be held and until when, what nobody holds any more, and what of that
may be deleted. Owned by the scheduler thread.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from spm.errors import IntegrityError
from tracker.ids import BlockKey, SessionRef
from tracker.session_key_tracker import SessionKeyTracker

Hold = tuple[Sequence[BlockKey], float]
"""Keys to keep alive, and the monotonic seconds until which they are worth it."""


class KeyHolds:
    """Bounded by the tracker's sessions, and by ``max_keys`` in each queue of keys. Beyond it
    the oldest entries are lost: such a key is kept alive until its hold ends, or left to its
    lifetime in the store.
    """

    def __init__(self, tracker: SessionKeyTracker, max_keys: int, *, wanted: bool) -> None:
        """``wanted`` False: there is no store to keep keys alive in; nothing is queued."""
        self._wanted = wanted
        self._tracker = tracker
        self._max_keys = max_keys
        self._changed: OrderedDict[SessionRef, None] = OrderedDict()
        self._released: OrderedDict[BlockKey, None] = OrderedDict()
        self._deletable: OrderedDict[BlockKey, None] = OrderedDict()

    def note(self, ref: SessionRef) -> None:
        """What an open session holds, or for how long, has changed. O(1)."""
        if self._wanted:
            self._changed[ref] = None

    def closed(self, ref: SessionRef) -> None:
        """The session is over. O(1)."""
        self._changed.pop(ref, None)

    def released(self, keys: Iterable[BlockKey]) -> None:
        """No session holds these any more."""
        if self._wanted:
            self._queue(self._released, keys)

    def given_up(self, keys: Iterable[BlockKey]) -> None:
        """The application gave these up; those that no session holds may be deleted."""
        if self._wanted:
            self._queue(self._deletable, [k for k in keys if not self._tracker.is_held(k)])

    def held_again(self, keys: Iterable[BlockKey]) -> None:
        """A session was associated with these, as far as it could be."""
        if self._released or self._deletable:
            for key in keys:
                if self._tracker.is_held(key):
                    self._released.pop(key, None)
                    self._deletable.pop(key, None)

    @property
    def has_news(self) -> bool:
        """Whether there is anything to take: most steps have nothing."""
        return bool(self._changed or self._released or self._deletable)

    def take_holds(self, until_s: Callable[[SessionRef], float], limit: int) -> list[Hold]:
        """Changed sessions' keys, longest waiting first, until there are ``limit`` keys."""
        taken: list[Hold] = []
        while self._changed and limit > 0:
            ref, _ = self._changed.popitem(last=False)
            keys = self._tracker.keys_of(ref)
            if keys:
                taken.append((keys, until_s(ref)))
            limit -= max(1, len(keys))
        return taken

    def take_released(self, limit: int) -> list[BlockKey]:
        """Up to ``limit`` keys that stopped being held, longest waiting first."""
        return _take(self._released, limit)

    def take_deletable(self, limit: int) -> list[BlockKey]:
        """Up to ``limit`` keys that may be deleted, longest waiting first."""
        return _take(self._deletable, limit)

    def _queue(self, queue: OrderedDict[BlockKey, None], keys: Iterable[BlockKey]) -> None:
        queue.update(dict.fromkeys(keys))
        while len(queue) > self._max_keys:
            queue.popitem(last=False)

    def check_integrity(self) -> None:
        """Raise :class:`IntegrityError` if a queued key is held, or a session is over."""
        for queue in (self._released, self._deletable):
            if any(self._tracker.is_held(key) for key in queue) or len(queue) > self._max_keys:
                raise IntegrityError("a queue is too long, or a session holds a key in it")
        if any(not self._tracker.is_open(ref) for ref in self._changed):
            raise IntegrityError("a session that is over is to have its keys held")


def _take(queue: OrderedDict[BlockKey, None], limit: int) -> list[BlockKey]:
    return [queue.popitem(last=False)[0] for _ in range(min(limit, len(queue)))]
