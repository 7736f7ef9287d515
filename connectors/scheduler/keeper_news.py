"""What the store keeper found out, waiting for the scheduler to ask."""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spm.events import KeysGone, KeysSeen
from tracker.ids import BlockKey

MAX_SEEN_BATCHES = 32
MAX_POLLED_KEYS = 8192


@dataclass(frozen=True, slots=True)
class KeysChecked:
    """The answer to a check: ``present[i]`` belongs to its key ``i``; None: nobody knows."""

    number: int
    present: tuple[bool, ...] | None


@dataclass(frozen=True, slots=True)
class DocumentRead:
    """The answer to a read: None if the document is absent, too long, or nobody knows."""

    number: int
    content: bytes | None


Answer = KeysChecked | DocumentRead
News = KeysSeen | KeysGone | KeysChecked | DocumentRead


class NewsDesk:
    """Bounded while nobody asks: seen keys are forgotten, oldest batch first; a gone key is
    reported once, with the instant it was last missed, and not at all if it was seen since.
    Answers are bounded by the questions. Whoever owns it holds a lock.
    """

    def __init__(self, max_gone: int) -> None:
        self._max_gone = max_gone
        self._seen: deque[KeysSeen] = deque(maxlen=MAX_SEEN_BATCHES)
        self._gone: dict[BlockKey, float] = {}
        self._answers: deque[Answer] = deque()

    @property
    def unread_answers(self) -> int:
        """Answers that nobody has taken."""
        return len(self._answers)

    def answer(self, answer: Answer) -> None:
        """Keep an answer until it is taken."""
        self._answers.append(answer)

    def seen(self, keys: Sequence[BlockKey], asked_s: float) -> None:
        """Keys that are there."""
        if keys:
            self.found(keys)
            self._seen.append(KeysSeen(tuple(keys), asked_s))

    def found(self, keys: Iterable[BlockKey]) -> None:
        """Keys that are not gone after all."""
        if self._gone:
            for key in keys:
                self._gone.pop(key, None)

    def gone(self, keys: Iterable[BlockKey], asked_s: float) -> None:
        """Keys that are not there. Over the bound they are left out: the ring still has them,
        so they are found missing again."""
        for key in keys:
            if key in self._gone or len(self._gone) < self._max_gone:
                self._gone[key] = asked_s

    def take(self) -> list[News]:
        """Seen keys, then answers, then up to 8192 gone keys: what was missed last is last."""
        news: list[News] = [*self._seen, *self._answers]
        self._seen.clear()
        self._answers.clear()
        by_instant: dict[float, list[BlockKey]] = defaultdict(list)
        for _ in range(min(MAX_POLLED_KEYS, len(self._gone))):
            key, asked_s = self._gone.popitem()
            by_instant[asked_s].append(key)
        news += [KeysGone(tuple(keys), asked_s) for asked_s, keys in sorted(by_instant.items())]
        return news

    def forget_keys(self) -> None:
        """Their names mean something else now. Answers stay."""
        self._seen.clear()
        self._gone.clear()

    def __bool__(self) -> bool:
        return bool(self._answers or self._seen or self._gone)
