"""How fast this engine computes prompts, measured from its own steps. Scheduler thread only."""

from collections.abc import Callable

_MIN_TOKENS = 256
"""Smaller steps are decoding, whose time says nothing about prompts."""
_MAX_STEP_S = 60.0
_NEWEST = 0.2
"""Weight of the newest step in the moving average."""


class ComputeRate:
    """Moving average of prompt tokens a second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: tuple[float, int] | None = None
        self._tokens_per_s: float | None = None

    def note_step(self, num_tokens: int) -> None:
        """A step with so many tokens was scheduled; the one before it took until now."""
        now_s = self._clock()
        if self._last is not None:
            started_s, before = self._last
            elapsed_s = now_s - started_s
            if before >= _MIN_TOKENS and 0.0 < elapsed_s < _MAX_STEP_S:
                rate = before / elapsed_s
                known = self._tokens_per_s
                self._tokens_per_s = rate if known is None else known + _NEWEST * (rate - known)
        self._last = (now_s, num_tokens) if num_tokens else None

    def seconds_for(self, num_tokens: int) -> float | None:
        """Time to compute a prompt of this length; None: nothing was measured yet."""
        if self._tokens_per_s is None:
            return None
        return num_tokens / self._tokens_per_s
