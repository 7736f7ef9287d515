"""Faults put into a store on purpose: which, and to which call. Pure, and the same for a seed.

For trials and soaks only. What happens to the n-th call of an operation depends on nothing but
the seed, the operation, n and, with bursts, on the time since the start: a run that failed is
replayed by its seed.
"""

import random
from dataclasses import dataclass, field
from enum import Enum

from spm.config_parsing import number, shown
from spm.errors import ConfigError


class FaultKind(str, Enum):
    """What can go wrong."""

    DELAY = "delay"
    """The call takes longer, and then does what it should."""
    HANG = "hang"
    """No answer before the deadline."""
    ERROR = "error"
    """The connection fails before anything was done."""
    DISCONNECT = "disconnect"
    """The connection fails in the middle: values before are done, the one it fails in is not."""
    SHORT_READ = "short_read"
    """A value comes back without its end."""
    FLIPPED_BIT = "flipped_bit"
    """A value comes back with one bit changed."""
    LOST_WRITE = "lost_write"
    """Acknowledged and not kept."""
    EVICTION = "eviction"
    """A value is gone, without a word."""
    OUT_OF_MEMORY = "out_of_memory"
    """Writes are refused, as by a full Redis; the rest works."""
    READ_ONLY = "read_only"
    """Everything that changes something is refused, as by a replica."""


class StoreCall(str, Enum):
    """Operations of a store, as far as faults tell them apart."""

    GET = "get"
    PUT = "put"
    CONTAINS = "contains"
    TOUCH = "touch"
    DELETE = "delete"
    DOCUMENT = "document"
    STREAM = "stream"
    CAPACITY = "capacity"


_OF_VALUES = frozenset(
    (FaultKind.SHORT_READ, FaultKind.FLIPPED_BIT, FaultKind.LOST_WRITE, FaultKind.EVICTION)
)
"""Drawn for each value; the others for each call."""


def check_kinds(name: str, text: str) -> None:
    """A list of kinds, comma-separated; empty: all. Raises :class:`ConfigError`."""
    known = [kind.value for kind in FaultKind]
    for word in filter(None, text.split(",")):
        if word not in known:
            raise ConfigError(
                f"{name} has {shown(word, text=True)}: some of {known}, comma-separated"
            )


@dataclass(frozen=True, slots=True)
class FaultsConfig:
    """Faults put into the remote store on purpose."""

    seed: int = number(0, 0, 2**63 - 1, "the same seed, the same faults")
    kinds: str = field(
        default="",
        metadata={"doc": "comma-separated; empty: all", "check": check_kinds},
    )
    share: float = number(0.1, 0.0, 1.0, "calls, or values, that each kind befalls")
    delay_s: float = number(0.1, 0.0, 600.0, "longest of a `delay`")
    burst_s: float = number(
        0.0, 0.0, 3600.0, "one kind, or none, for so long, then another; 0: all at any time"
    )
    slow_start_s: float = number(0.0, 0.0, 3600.0, "no answer but an error in the beginning")


class FaultPlan:
    """Says what befalls the n-th call of an operation. Immutable; any thread."""

    def __init__(self, config: FaultsConfig) -> None:
        self._config = config
        named = [FaultKind(word) for word in config.kinds.split(",") if word]
        self._kinds = named or list(FaultKind)

    def starting(self, age_s: float) -> bool:
        """Whether the store has not come up yet, ``age_s`` seconds after its start."""
        return age_s < self._config.slow_start_s

    def of_call(self, call: StoreCall, number: int, age_s: float) -> frozenset[FaultKind]:
        """What befalls the call as a whole."""
        return self._drawn(f"{call.value}/{number}", age_s, values=False)

    def of_value(
        self, call: StoreCall, number: int, position: int, age_s: float
    ) -> frozenset[FaultKind]:
        """What befalls one value of it."""
        return self._drawn(f"{call.value}/{number}/{position}", age_s, values=True)

    def delay_s(self, call: StoreCall, number: int) -> float:
        """How long a ``delay`` is."""
        return self._config.delay_s * self._random(f"{call.value}/{number}/delay").random()

    def place(self, call: StoreCall, number: int, stop: int) -> int:
        """Where in ``range(stop)`` it strikes: the value in which a connection fails, or a bit."""
        return self._random(f"{call.value}/{number}/place").randrange(max(1, stop))

    def _drawn(self, name: str, age_s: float, *, values: bool) -> frozenset[FaultKind]:
        drawn = self._random(name)
        struck = [kind for kind in self._kinds if drawn.random() < self._config.share]
        active = self._active(age_s)
        return frozenset(k for k in struck if k in active and (k in _OF_VALUES) is values)

    def _active(self, age_s: float) -> list[FaultKind]:
        if not self._config.burst_s:
            return self._kinds
        burst = int(age_s / self._config.burst_s)
        one = self._random(f"burst/{burst}").choice([None, *self._kinds])
        return [] if one is None else [one]

    def _random(self, name: str) -> random.Random:
        return random.Random(f"{self._config.seed}/{name}")
