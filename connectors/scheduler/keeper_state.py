"""What the store keeper's two threads share, behind one lock."""

import math
import threading
from dataclasses import dataclass, field

from connectors.scheduler.keeper_news import Answer, DocumentRead, KeysChecked, NewsDesk
from connectors.scheduler.keeper_queues import KeeperQueues, KeyCheck, Question
from connectors.stores.base import StoreCapacity
from spm.keepalive import KeepAliveRing
from spm.keys import KeyNames
from spm.metrics import Counters, Metric
from spm.pace import Pace


@dataclass(slots=True)
class KeeperState:
    """Every field but the counters is read and written with ``condition`` held."""

    ring: KeepAliveRing
    desk: NewsDesk
    pace: Pace
    counters: Counters
    queues: KeeperQueues = field(default_factory=KeeperQueues)
    condition: threading.Condition = field(default_factory=threading.Condition)
    space: KeyNames | None = None
    """How keys are named; None: nobody knows yet."""
    generation: int = 0
    """Grows with every new key space: what was asked under an older one is void."""
    capacity: StoreCapacity | None = None
    """How full the store last said it is; None: it does not say, or was not asked yet."""
    capacity_due_s: float = math.inf
    """When to ask that next."""
    closed: bool = False
    waiting: bool = False
    """The worker has looked at all this and found nothing that it may do now."""
    looks_again_s: float = math.inf
    """When the worker looks again by itself."""

    def wake(self) -> None:
        """There is something new to look at."""
        self.waiting = False
        self.condition.notify_all()

    def drop_named(self) -> None:
        """What is queued and names keys or documents is not done; questions get their answer."""
        questions, documents, deletes = self.queues.drop_named()
        for question in questions:
            self.desk.answer(no_answer(question))
        self.count_dropped("document", documents)
        self.count_dropped("delete", deletes)

    def count_dropped(self, what: str, count: int = 1) -> None:
        """Work that is not done."""
        self.counters.add(Metric.KEEPER_DROPPED, count, what)


def no_answer(question: Question) -> Answer:
    """What is said when nobody knows."""
    if isinstance(question, KeyCheck):
        return KeysChecked(question.number, None)
    return DocumentRead(question.number, None)
