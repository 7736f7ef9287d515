"""How long to pause between two looks at an operation."""

from collections.abc import Callable

from spm.client.errors import WaitTimeoutError

DEFAULT_WAIT_S = 60.0
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
_GROWTH = 1.5


class Pauses:
    """Pauses that grow up to two seconds and end exactly at the deadline."""

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._deadline_s = clock() + timeout_s
        self._pause_s = FIRST_PAUSE_S

    def next_s(self) -> float:
        """Seconds to sleep now; raises :class:`WaitTimeoutError` once the time is over."""
        left_s = self._deadline_s - self._clock()
        if left_s <= 0:
            raise WaitTimeoutError(f"not done after {self._timeout_s:g} s; it goes on")
        pause_s = min(self._pause_s, left_s)
        self._pause_s = min(self._pause_s * _GROWTH, LONGEST_PAUSE_S)
        return pause_s
