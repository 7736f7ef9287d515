"""Whether the remote store is being used, seen from both of an engine's sides.

Scheduler thread only.
"""

import math
from collections.abc import Callable
from typing import Any

from spm.breaker import BreakerState
from spm.keys import Rank
from spm.metrics import Metric, metric_key

_BY_BADNESS = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)


class StoreHealth:
    """The circuit breaker of the scheduler's side, and what workers said of theirs."""

    def __init__(
        self,
        own_state: Callable[[], BreakerState],
        believed_s: float,
        clock: Callable[[], float],
    ) -> None:
        """``believed_s``: a worker tells with every step that its breaker is not closed, but
        an idle engine takes no steps: what was said longer ago means nothing. A load that
        fails at once costs less than a store that is not used."""
        self._own_state = own_state
        self._believed_s = believed_s
        self._clock = clock
        self._ranks: dict[Rank, BreakerState] = {}
        self._heard_s = -math.inf

    def heard(self, rank: Rank, state: BreakerState) -> None:
        """One rank's news of its breaker."""
        self._heard_s = self._clock()
        if state is BreakerState.CLOSED:
            self._ranks.pop(rank, None)
        else:
            self._ranks[rank] = state

    @property
    def usable(self) -> bool:
        """Whether the store may be asked and loaded from: both sides' breakers are closed."""
        return self._own_state() is BreakerState.CLOSED and self._worker() is BreakerState.CLOSED

    def _worker(self) -> BreakerState:
        """The worst of all ranks'."""
        if not self._ranks:
            return BreakerState.CLOSED
        if self._clock() - self._heard_s > self._believed_s:
            return BreakerState.CLOSED
        return max(self._ranks.values(), key=_BY_BADNESS.index)

    def _sides(self) -> dict[str, BreakerState]:
        return {"scheduler": self._own_state(), "worker": self._worker()}

    def status(self) -> dict[str, Any]:
        """The worst of both sides', and each side's."""
        sides = self._sides()
        worst = max(sides.values(), key=_BY_BADNESS.index)
        return {
            "breaker": worst.value,
            "breakers": {side: state.value for side, state in sides.items()},
        }

    def sizes(self) -> tuple[int, ...]:
        """Changes when a gauge does."""
        return tuple(map(_BY_BADNESS.index, self._sides().values()))

    def gauges(self) -> dict[str, float]:
        """For each side, 1 for the state it is in and 0 for the others."""
        return {
            metric_key(Metric.BREAKER_STATE, f"{side},{state.value}"): float(state is now)
            for side, now in self._sides().items()
            for state in BreakerState
        }
