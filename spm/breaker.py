"""Circuit breaker: leaves a failing store alone and asks again, ever less often."""

import logging
import random
import threading
import time
from collections.abc import Callable
from enum import Enum

logger = logging.getLogger(__name__)


class BreakerState(Enum):
    """``CLOSED``: calls pass. ``OPEN``: none does. ``HALF_OPEN``: one probe is under way."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Opens after ``failures`` consecutive failures; then one probe per pause is admitted.

    The n-th pause lasts ``backoff_s * 2**n`` seconds, at most ``backoff_cap_s``, times a
    random factor in [0.5, 1) so that many workers do not return at once. A probe that
    succeeds closes the breaker; one that fails, or has not reported by the end of another
    pause, leads to the next probe. Never blocks on anything but its own lock; any thread.
    """

    def __init__(
        self,
        *,
        failures: int,
        backoff_s: float,
        backoff_cap_s: float,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[], float] = random.random,
        name: str = "the store",
    ) -> None:
        """``name`` is for log lines. ``clock`` gives monotonic seconds, ``uniform`` a random
        number in [0, 1)."""
        self._failures_to_open = failures
        self._backoff_s = backoff_s
        self._backoff_cap_s = backoff_cap_s
        self._clock = clock
        self._uniform = uniform
        self._name = name
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._pauses = 0
        self._next_probe_s = 0.0

    @property
    def state(self) -> BreakerState:
        """``OPEN`` until :meth:`allow` admits a probe, however long that takes."""
        return self._state

    def allow(self) -> bool:
        """Whether the caller may use the store now; it must report the outcome."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return True
            if self._clock() < self._next_probe_s:
                return False
            self._state = BreakerState.HALF_OPEN
            self._pause()
            return True

    def record_success(self) -> None:
        """The store answered. Closes the breaker if a probe was under way; while it is
        open, an answer to an older call says nothing new."""
        with self._lock:
            if self._state is BreakerState.OPEN:
                return
            if self._state is BreakerState.HALF_OPEN:
                logger.info("%s answers again", self._name)
            self._state = BreakerState.CLOSED
            self._failures = 0
            self._pauses = 0

    def record_failure(self) -> None:
        """The store did not answer. While open, late reports of older calls change nothing."""
        with self._lock:
            if self._state is BreakerState.OPEN:
                return
            self._failures += 1
            if self._state is BreakerState.HALF_OPEN or self._failures >= self._failures_to_open:
                if self._state is BreakerState.CLOSED:
                    logger.warning("%s does not answer; it is left alone and probed", self._name)
                self._state = BreakerState.OPEN
                self._pause()

    def trip(self) -> None:
        """Open at once: the store answers, but so slowly that asking it costs more than it
        gives. Changes nothing while open."""
        with self._lock:
            if self._state is not BreakerState.OPEN:
                self._state = BreakerState.OPEN
                self._pause()

    def _pause(self) -> None:
        """Put the next probe one backoff step away; lock held."""
        doublings = min(self._pauses, 64)
        pause_s = min(self._backoff_cap_s, self._backoff_s * 2.0**doublings)
        self._next_probe_s = self._clock() + pause_s * (0.5 + 0.5 * self._uniform())
        self._pauses += 1
