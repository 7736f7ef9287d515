"""What happened to all requests and calls of a soak, as its agents tell it."""

from collections import Counter
from dataclasses import dataclass, field

from benchmarks.soak_chain import Chain
from benchmarks.soak_requests import Answer, Outcome

_SHOWN = 20


@dataclass
class Tally:
    """Belongs to the event loop of the agents."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    """The first of them, with what was wrong."""
    calls: Counter[int] = field(default_factory=Counter)
    """Management calls by HTTP status; 0: no answer."""
    failed_calls: list[str] = field(default_factory=list)
    """Those that were answered as they should not be."""
    chains: list[Chain] = field(default_factory=list)
    """Finished lines of all conversations."""

    def note(self, label: str, answer: Answer) -> None:
        """A request is over."""
        self.outcomes[answer.outcome] += 1
        if answer.outcome is Outcome.LOST:
            self.lost.append(f"{label}: {answer.problem}")
            print(f"  lost: {self.lost[-1]}", flush=True)

    def note_call(self, what: str, status: int, is_right: bool, said: str) -> None:
        """A management call is over."""
        self.calls[status] += 1
        if not is_right:
            self.failed_calls.append(f"{what}: HTTP {status}: {said[:200]}")
            print(f"  failed: {self.failed_calls[-1]}", flush=True)

    def problems(self) -> list[str]:
        """What has to be looked at, the first of each kind."""
        return [*self.lost[:_SHOWN], *self.failed_calls[:_SHOWN]]

    def line(self) -> str:
        """For progress."""
        outcomes = ", ".join(f"{self.outcomes[one]} {one.value}" for one in Outcome)
        return f"{outcomes}; {self.calls.total()} calls, {len(self.failed_calls)} of them wrong"
