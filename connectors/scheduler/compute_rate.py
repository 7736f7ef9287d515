"""How fast this engine computes prompts, measured from its own steps. Scheduler thread only."""

import math
from collections import deque
from collections.abc import Callable

_MIN_TOKENS = 256
"""Smaller steps are decoding, whose time says nothing about prompts."""
_MAX_STEP_S = 60.0
_NEWEST = 0.2
"""Weight of the newest step in the moving average."""
_MAX_STEPS = 64
"""Steps under way; vLLM has two with asynchronous scheduling, one for each stage of a pipeline."""


class ComputeRate:
    """Moving average of prompt tokens a second.

    Steps may be scheduled before the ones ahead of them have ended, but they run and end in
    order: a step took from when it was scheduled, or the one before it ended, until it ended.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._steps: deque[tuple[float, int]] = deque(maxlen=_MAX_STEPS)
        self._last_end_s = -math.inf
        self._tokens_per_s: float | None = None
        self.backlog_tokens = 0
        """Prompt tokens of running requests that are still to be computed."""

    def note_step(self, num_tokens: int) -> None:
        """A step with so many tokens was scheduled."""
        self._steps.append((self._clock(), num_tokens))

    def note_end(self) -> None:
        """The oldest step that was scheduled has ended."""
        if not self._steps:
            return
        now_s = self._clock()
        scheduled_s, num_tokens = self._steps.popleft()
        elapsed_s = now_s - max(scheduled_s, self._last_end_s)
        self._last_end_s = now_s
        if num_tokens >= _MIN_TOKENS and 0.0 < elapsed_s < _MAX_STEP_S:
            rate = num_tokens / elapsed_s
            known = self._tokens_per_s
            self._tokens_per_s = rate if known is None else known + _NEWEST * (rate - known)

    def seconds_for(self, num_tokens: int) -> float | None:
        """Time to compute a prompt of this length; None: nothing was measured yet."""
        if self._tokens_per_s is None:
            return None
        return num_tokens / self._tokens_per_s

    def seconds_until(self, num_tokens: int) -> float | None:
        """The same, behind what running requests have left."""
        return self.seconds_for(self.backlog_tokens + num_tokens)
