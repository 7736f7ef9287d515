"""What the control worker's two threads share, behind one lock."""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from connectors.lmcache.control import DeleteTier, ObjectName, ServerStatus, WarmRequest
from connectors.lmcache.control_news import ControlNews
from connectors.lmcache.kept_sessions import KeptSessions
from tracker.ids import BlockKey, SessionRef

MAX_DELETES = 100_000
MAX_WARMS_QUEUED = 1024

ObjectsOf = Callable[[BlockKey], Iterable[ObjectName]]
"""Every rank's object of a chunk."""


@dataclass(frozen=True, slots=True)
class Warm:
    """A warm prefetch that somebody waits for."""

    number: int
    request: WarmRequest
    deadline_s: float


@dataclass(frozen=True, slots=True)
class DeleteOrder:
    """Where a chunk is to be deleted, and how often to try: objects in use are passed over."""

    tier: DeleteTier
    tries: int


@dataclass(slots=True)
class Flight:
    """One that the server is at."""

    name: str
    """The server's."""
    request: WarmRequest
    deadline_s: float
    generation: int
    number: int = 0
    ref: SessionRef | None = None
    """To keep this session; None: for an operation, ``number``."""
    polled_s: float = -math.inf


@dataclass(slots=True)
class ControlState:
    """Every field is read and written with ``condition`` held, but ``flights``: the worker's."""

    kept: KeptSessions
    max_news: int
    condition: threading.Condition = field(default_factory=threading.Condition)
    warms: deque[Warm] = field(default_factory=deque)
    deletes: dict[BlockKey, DeleteOrder] = field(default_factory=dict)
    deleting: set[BlockKey] = field(default_factory=set)
    """In the request under way, and not wanted again since."""
    objects_of: ObjectsOf | None = None
    """How chunks are named; None: nobody knows, so nothing is deleted."""
    news: deque[ControlNews] = field(default_factory=deque)
    flights: list[Flight] = field(default_factory=list)
    status: ServerStatus | None = None
    """As last seen."""
    status_due_s: float = -math.inf
    wanted: set[int] = field(default_factory=set)
    """Numbers of prefetches whose end somebody waits for."""
    generation: int = 0
    """Grows when the cache is reset: what was asked before is void."""
    closed: bool = False
    waiting: bool = False
    """The worker has looked at all this and found nothing that it may do now."""

    def tell(self, news: ControlNews) -> None:
        """Kept until it is taken; over the bound the oldest is forgotten: it is advice, or its
        operation is long gone."""
        self.news.append(news)
        if len(self.news) > self.max_news:
            self.news.popleft()

    def wake(self) -> None:
        """There is something new to look at."""
        self.waiting = False
        self.condition.notify_all()
