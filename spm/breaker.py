"""Circuit breaker: leaves a failing store alone until a probe finds that it answers again."""

import logging
import math
import random
import threading
import time
from collections.abc import Callable
from enum import Enum

logger = logging.getLogger(__name__)


class BreakerState(Enum):
    """``CLOSED``: calls pass. ``OPEN``: none does. ``HALF_OPEN``: a probe is under way, and
    still no call passes."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Opens after ``failures`` consecutive failures; then it is closed by a probe.

    Ordinary calls are never probes: whoever waits for an answer must not be the one who finds
    out that there is none. A prober waits for :meth:`await_probe` (or asks
    :meth:`begin_probe`), makes a small call and reports it with :meth:`end_probe`. So is it
    found out whether a store that is suspected, because it was too slow for somebody in a hurry,
    answers at all; until then calls pass.

    The n-th pause before a probe lasts ``backoff_s * 2**n`` seconds, at most
    ``backoff_cap_s``, times a random factor in [0.5, 1) so that many workers do not return at
    once. A store that answers probes and fails at work does not start over: pauses go on
    growing unless calls have succeeded for at least ``backoff_cap_s``. Any thread; blocks on
    nothing but its own lock, except in :meth:`await_probe`.
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
        on_open: Callable[[], None] = lambda: None,
    ) -> None:
        """``name`` is for log lines. ``clock`` gives monotonic seconds, ``uniform`` a random
        number in [0, 1). ``on_open`` is called, no lock held, when it opens out of use (not
        when a probe fails)."""
        self._failures_to_open = failures
        self._backoff_s = backoff_s
        self._backoff_cap_s = backoff_cap_s
        self._clock = clock
        self._uniform = uniform
        self._name = name
        self._on_open = on_open
        self._changed = threading.Condition()
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._pauses = 0
        self._next_probe_s = math.inf
        self._works_since_s = math.inf
        """First success since it was closed; infinity: there was none."""
        self._checking = False
        """A probe was begun while it is closed."""
        self._retired = False
        self._why = ""
        """What the last failure said."""

    @property
    def state(self) -> BreakerState:
        """Calls pass only while it is ``CLOSED``."""
        return self._state

    @property
    def next_probe_s(self) -> float:
        """When the next probe is due, by the clock; infinity while it is not ``OPEN``."""
        return self._next_probe_s

    def allow(self) -> bool:
        """Whether the caller may use the store now; it must report the outcome."""
        return self._state is BreakerState.CLOSED

    def record_success(self) -> None:
        """The store answered. While it is left alone, an answer to an older call says
        nothing new."""
        with self._changed:
            if self._state is BreakerState.CLOSED:
                self._failures = 0
                self._works_since_s = min(self._works_since_s, self._clock())

    def record_failure(self, why: object = "") -> None:
        """The store did not answer; ``why`` is for the log, and holds no secret. While it is
        left alone, late reports change nothing."""
        with self._changed:
            if self._state is not BreakerState.CLOSED:
                return
            self._why = str(why)
            self._failures += 1
            if self._failures < self._failures_to_open:
                return
            self._open()
        self._on_open()

    def trip(self) -> None:
        """Open at once: waiting for the store has cost more than it gives. Changes nothing
        while it is left alone."""
        with self._changed:
            if self._state is not BreakerState.CLOSED:
                return
            self._open()
        self._on_open()

    def suspect(self) -> None:
        """Somebody waited for the store in vain, but not for long enough to tell that it
        fails: a probe is due now. Changes nothing while it is left alone."""
        with self._changed:
            if self._state is BreakerState.CLOSED and not self._checking:
                self._next_probe_s = min(self._next_probe_s, self._clock())
                self._changed.notify_all()

    # --- the prober ---------------------------------------------------------------------

    def begin_probe(self) -> bool:
        """True if a probe is due: the caller makes it, alone, and reports its end."""
        with self._changed:
            if self._state is BreakerState.HALF_OPEN or self._clock() < self._next_probe_s:
                return False
            if self._state is BreakerState.OPEN:
                self._state = BreakerState.HALF_OPEN
            else:
                self._checking = True
            self._next_probe_s = math.inf
            return True

    def end_probe(self, *, answered: bool) -> None:
        """The probe that was begun has ended."""
        with self._changed:
            checking, self._checking = self._checking, False
            opens = checking and not answered and self._state is BreakerState.CLOSED
            if opens:
                self._open()
            elif self._state is not BreakerState.HALF_OPEN:
                return
            elif not answered:
                self._state = BreakerState.OPEN
                self._pause()
                return
            else:
                self._state = BreakerState.CLOSED
                self._failures = 0
                self._works_since_s = math.inf
        if opens:
            self._on_open()
        else:
            logger.info("%s answers again", self._name)

    def await_probe(self) -> bool:
        """Block until a probe is due, then begin it. False: the breaker has been retired."""
        while True:
            with self._changed:
                if self._retired:
                    return False
                left_s = self._next_probe_s - self._clock()
                if left_s > 0:
                    self._changed.wait(None if left_s == math.inf else left_s)
            if self.begin_probe():
                return True

    def retire(self) -> None:
        """Nobody is to wait for probes any more."""
        with self._changed:
            self._retired = True
            self._changed.notify_all()

    # --- inside, lock held --------------------------------------------------------------

    def _open(self) -> None:
        because = f" ({self._why})" if self._why else ""
        logger.warning("%s does not answer%s; it is left alone and probed", self._name, because)
        if self._clock() - self._works_since_s >= self._backoff_cap_s:
            self._pauses = 0
        self._state = BreakerState.OPEN
        self._pause()
        self._changed.notify_all()

    def _pause(self) -> None:
        """Put the next probe one backoff step away."""
        doublings = min(self._pauses, 64)
        pause_s = min(self._backoff_cap_s, self._backoff_s * 2.0**doublings)
        self._next_probe_s = self._clock() + pause_s * (0.5 + 0.5 * self._uniform())
        self._pauses += 1
