"""How fast each tier gives values back, as measured. Owned by the scheduler thread."""

import math
from dataclasses import dataclass

from spm.residency import Tier

HALF_LIFE_BYTES = 256 * 2**20
"""After so many bytes more, what was measured before counts half."""


@dataclass(slots=True)
class _Average:
    weight_bytes: float = 0.0
    weighted_log: float = 0.0


class Speeds:
    """Moving average of bytes a second by tier.

    It is the geometric mean, weighted by bytes: neither a tiny transfer that measured a round
    trip nor a lucky one answered from a buffer moves it by more than its bytes say.
    """

    def __init__(self) -> None:
        self._averages: dict[Tier, _Average] = {}

    def note(self, tier: Tier, size_bytes: int, seconds: float) -> None:
        """A transfer was measured; sizes and times that are not positive and finite say nothing."""
        if size_bytes <= 0 or not 0.0 < seconds < math.inf:
            return
        average = self._averages.setdefault(tier, _Average())
        kept = 2.0 ** -(size_bytes / HALF_LIFE_BYTES)
        # Logarithms apart: the quotient of two finite numbers may not be finite.
        log_speed = math.log(size_bytes) - math.log(seconds)
        average.weight_bytes = average.weight_bytes * kept + size_bytes
        average.weighted_log = average.weighted_log * kept + size_bytes * log_speed

    def bytes_per_s(self, tier: Tier) -> float | None:
        """The average; None: nothing was measured yet."""
        average = self._averages.get(tier)
        if average is None:
            return None
        return math.exp(average.weighted_log / average.weight_bytes)
