"""What goes wrong during a soak, and when: drawn from the seed before anything starts."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

_BEFORE_S = 6.0
"""Without a fault, at the start: so that something is stored."""
_AFTER_S = 12.0
"""Without one, at the end: requests that wait for a deadline still get their answer."""
_LONGEST_SLOT_S = 20.0
_LONGEST_FAULT_S = 8.0
_SHARE_OF_SLOT = (0.3, 0.6)
"""How much of a slot a fault that lasts may take; the rest of it is for coming back."""
_REST_EVERY_S, _REST_S = 45.0, 8.0
"""The last seconds of each period all agents rest: the pool gets room."""


class FaultKind(Enum):
    """``lasts``: it goes on for a while; the others are over at once."""

    KILLED = ("killed", True)
    """Redis is gone, and comes back empty."""
    FROZEN = ("frozen", True)
    """Redis is stopped (SIGSTOP): connections stay open and nothing answers."""
    REFUSING = ("refusing", True)
    """Redis is full and refuses writes: ``noeviction``."""
    EVICTING = ("evicting", True)
    """Redis is full and evicts: ``allkeys-lru``, with less room than what is in use."""
    READ_ONLY = ("read_only", True)
    """Redis answers reads and refuses writes, as a replica or without enough of them."""
    EMPTIED = ("emptied", False)
    """All keys are gone, and nobody was told."""
    CUT_OFF = ("cut_off", False)
    """Every connection is closed, in the middle of whatever it carried."""
    DAMAGED = ("damaged", False)
    """A byte of many stored values is changed."""
    CACHE_RESET = ("cache_reset", False)
    """vLLM's GPU cache is emptied, and every running request is preempted for it."""

    def __init__(self, word: str, lasts: bool) -> None:
        self.word = word
        self.lasts = lasts


@dataclass(frozen=True)
class Fault:
    """One fault; seconds since the load began."""

    kind: FaultKind
    at_s: float
    for_s: float

    def __str__(self) -> str:
        lasting = f" for {self.for_s:.1f} s" if self.kind.lasts else ""
        return f"{self.at_s:7.1f} s  {self.kind.word}{lasting}"


def make_schedule(seed: int, load_s: float) -> list[Fault]:
    """Every kind once in random order, then again in another, until the load is nearly over.

    Slots shrink so that a short load has every kind too; they never overlap.
    """
    rng = random.Random(f"faults/{seed}")
    room_s = load_s - _BEFORE_S - _AFTER_S
    slot_s = min(_LONGEST_SLOT_S, room_s / len(FaultKind))
    kinds: list[FaultKind] = []
    faults = []
    for number in range(int(room_s / slot_s + 1e-6) if slot_s > 0 else 0):
        kinds = kinds or rng.sample(list(FaultKind), len(FaultKind))
        kind = kinds.pop()
        longest_s = min(_LONGEST_FAULT_S, rng.uniform(*_SHARE_OF_SLOT) * slot_s)
        for_s = longest_s if kind.lasts else 0.0
        late_s = rng.uniform(0.0, 0.3 * slot_s)
        faults.append(Fault(kind, _BEFORE_S + number * slot_s + late_s, for_s))
    return faults


def show_schedule(faults: Sequence[Fault]) -> str:
    """One line a fault, as a failing run needs it."""
    return "\n".join(map(str, faults))


def rest_left_s(since_s: float) -> float:
    """How long the rest lasts that is going on ``since_s`` after the load began; 0: none is."""
    left_s = _REST_EVERY_S - since_s % _REST_EVERY_S
    return left_s if left_s <= _REST_S else 0.0
