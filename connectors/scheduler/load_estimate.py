"""How long a load from the remote store would take, from what loads took. Pure."""

import math

_SLOWER_BY = 0.1
"""So much of the way the fixed part of a batch's time follows a slower measurement."""
_STEEPER_BY = 0.5
"""And so much of the way the part that grows with its size."""


class LoadEstimate:
    """One rank's: a batch takes a fixed time, and some time for each byte.

    A faster measurement is believed at once, a slower one by degrees: to load when computing
    would have been faster costs little and is measured; not to load measures nothing. For the
    same reason all of a first measurement is taken for the fixed part.
    """

    def __init__(self, batch_bytes: int, threads: int) -> None:
        """A load is cut into batches of this size, read by so many threads."""
        self._batch_bytes = batch_bytes
        self._threads = threads
        self._fixed_s: float | None = None
        self._s_per_byte = 0.0

    def batches(self, size_bytes: int) -> int:
        """Round trips that a load of this size needs."""
        return max(1, math.ceil(size_bytes / self._batch_bytes))

    def note(self, size_bytes: int, seconds: float) -> None:
        """Batches of one load arrived; ``seconds`` summed over them. Sizes and times that are
        not positive and finite say nothing."""
        if size_bytes <= 0 or not 0.0 < seconds < math.inf:
            return
        batches = self.batches(size_bytes)
        batch_s = seconds / batches
        if self._fixed_s is None or batch_s < self._fixed_s:
            self._fixed_s = batch_s
        else:
            self._fixed_s += _SLOWER_BY * (batch_s - self._fixed_s)
        steepness = (batch_s - self._fixed_s) * batches / size_bytes
        if steepness < self._s_per_byte:
            self._s_per_byte = steepness
        else:
            self._s_per_byte += _STEEPER_BY * (steepness - self._s_per_byte)

    def note_at_least(self, size_bytes: int, seconds: float) -> None:
        """So much had not arrived after this time, by the clock on the wall."""
        batches = self.batches(size_bytes)
        known_s = self.seconds_for(size_bytes, batches)
        if known_s is None or known_s < seconds:
            self.note(size_bytes, seconds * min(self._threads, batches))

    def seconds_for(self, size_bytes: int, batches: int) -> float | None:
        """Until so much in so many batches has arrived; None: nothing was measured yet."""
        if self._fixed_s is None:
            return None
        total_s = batches * self._fixed_s + size_bytes * self._s_per_byte
        return total_s / max(1, min(self._threads, batches))
