"""How much of a session's chunks Redis has, asked while LMCache may still be writing them there.

Scheduler thread only; the store keeper's thread does the asking.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from connectors.scheduler.store_keeper import StoreKeeper
from spm.events import KeysGone, KeysSeen
from spm.manager import SessionAwarePoolingManager
from tracker.ids import BlockKey

_PAUSE_S = 0.1


@dataclass(slots=True, eq=False)
class _Question:
    keys: Sequence[BlockKey]
    tell: Callable[[int | None], None]
    deadline_s: float
    asked_s: float
    found: int = -1
    """As last answered."""
    again_s: float | None = None
    """When to ask next; None: a question is open."""


class ChunkQuestions:
    """Those that go on. LMCache serves prefixes, so only chunks without a hole before them
    count. As long as there are more each time it is asked again."""

    def __init__(
        self,
        keeper: StoreKeeper,
        manager: SessionAwarePoolingManager,
        patience_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._keeper = keeper
        self._manager = manager
        self._patience_s = patience_s
        self._clock = clock
        self._questions: dict[int, _Question] = {}
        self._numbers = count(1)

    def ask(
        self, keys: Sequence[BlockKey], tell: Callable[[int | None], None]
    ) -> Callable[[], None]:
        """How many of these, from the first on, are there: ``tell`` hears it once; None: nobody
        could say. Returns a function that withdraws the question."""
        now_s = self._clock()
        number = next(self._numbers)
        self._questions[number] = question = _Question(keys, tell, now_s + self._patience_s, now_s)
        self._check(number, question)
        return lambda: self._withdraw(number)

    def _withdraw(self, number: int) -> None:
        self._questions.pop(number, None)

    def _check(self, number: int, question: _Question) -> None:
        question.again_s, question.asked_s = None, self._clock()
        if not self._keeper.check(number, question.keys, question.deadline_s):
            self._answer(number, question, None)

    def checked(self, number: int, present: Sequence[bool] | None) -> None:
        """The keeper's answer."""
        question = self._questions.get(number)
        if question is None:
            return
        if present is None:
            self._answer(number, question, None)
            return
        keys, asked_s = question.keys, question.asked_s
        there = [key for key, one in zip(keys, present, strict=True) if one]
        gone = [key for key, one in zip(keys, present, strict=True) if not one]
        self._manager.handle(KeysSeen(there, asked_s))
        self._manager.handle(KeysGone(gone, asked_s))
        now_s = self._clock()
        if gone and len(there) > question.found and now_s + _PAUSE_S < question.deadline_s:
            question.found, question.again_s = len(there), now_s + _PAUSE_S
        else:
            lead = present.index(False) if gone else len(keys)
            self._answer(number, question, lead)

    def _answer(self, number: int, question: _Question, found: int | None) -> None:
        del self._questions[number]
        question.tell(found)

    def tick(self) -> None:
        """Once a step: ask again."""
        if not self._questions:
            return
        now_s = self._clock()
        for number, question in list(self._questions.items()):
            if question.again_s is not None and question.again_s <= now_s:
                self._check(number, question)

    @property
    def pending(self) -> bool:
        """Whether any goes on."""
        return bool(self._questions)
