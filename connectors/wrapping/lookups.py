"""How long the prefix of a session is that a wrapped connector has: asked on behalf of stand-ins
that load nothing.

Scheduler thread only. Questions wait in line, a few are asked at a time, each again in every
step until the connector knows or the deadline passes.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from connectors.wrapping.chains import SessionChain
from connectors.wrapping.stand_in import StandIn, StandIns
from spm.errors import ConnectorError

AT_A_TIME = 4
"""Questions that are with the connector at once."""

Tell = Callable[[int | None], None]
"""Gets the number of logical blocks, or None if nobody could say."""


@dataclass(slots=True, eq=False)
class _Question:
    chain: SessionChain
    stop: int
    tell: Tell
    deadline_s: float = 0.0
    stand_in: StandIn | None = None
    withdrawn: bool = False


class PrefixLookups:
    """Those of one engine."""

    def __init__(self, stand_ins: StandIns, deadline_s: float, clock: Callable[[], float]) -> None:
        """``deadline_s``: how long one answer may take."""
        self._stand_ins = stand_ins
        self._patience_s = deadline_s
        self._clock = clock
        self._waiting: deque[_Question] = deque()
        self._asked: list[_Question] = []

    def ask(self, chain: SessionChain, stop: int, tell: Tell) -> Callable[[], None]:
        """Ask how many of the chain's first ``stop`` logical blocks the connector has, from the
        first on. ``tell`` gets the answer in a later step. Returns a function that withdraws
        the question; then ``tell`` is not called any more, and the answer only waited for."""
        question = _Question(chain, stop, tell)
        self._waiting.append(question)

        def withdraw() -> None:
            question.withdrawn = True

        return withdraw

    @property
    def busy(self) -> bool:
        """Whether an answer is being waited for."""
        return bool(self._waiting or self._asked)

    def status(self) -> dict[str, int]:
        """For the operation ``status``."""
        return {"waiting": len(self._waiting), "in_flight": len(self._asked), "in_flight_bytes": 0}

    def step(self) -> None:
        """Once a step, after vLLM has scheduled it: ask, and pass answers on."""
        if not self.busy:
            return
        while self._waiting and len(self._asked) < AT_A_TIME:
            question = self._waiting.popleft()
            if not question.withdrawn:
                question.deadline_s = self._clock() + self._patience_s
                self._asked.append(question)
        asked, self._asked = self._asked, []
        for question in asked:
            if not self._advance(question):
                self._asked.append(question)

    def _advance(self, question: _Question) -> bool:
        """Ask once more; True: that was the last time."""
        tokens: int | None = None
        try:
            unasked = question.stand_in is None and question.withdrawn
            if self._stand_ins.works and not unasked:
                # Also if it was withdrawn: before there is an answer, a connector may have to
                # be waited for to end a lookup, or leave locked what it found.
                if question.stand_in is None:
                    question.stand_in = self._stand_ins.new(question.chain, question.stop)
                tokens, _ = question.stand_in.ask(0)
                if tokens is None and self._clock() < question.deadline_s:
                    return False
                if tokens is not None:
                    question.stand_in.decline(tokens)
        except ConnectorError:
            tokens = None
        if question.stand_in is not None:
            question.stand_in.finish()
        if not question.withdrawn:
            blocks = None if tokens is None else tokens // self._stand_ins.block_tokens
            question.tell(None if blocks is None else min(blocks, question.stop))
        return True

    def fail_all(self) -> None:
        """Nothing is known any more (a reset, or the engine ends): whoever asked hears so; what
        is with the connector is taken back in the next step."""
        asked, self._waiting = [*self._asked, *self._waiting], deque()
        for question in asked:
            if not question.withdrawn:
                question.withdrawn = True
                question.tell(None)
