"""How long a load from the remote store would take, from what loads took. Pure."""

import math

_SLOWER_BY = 0.5
"""So much of the way the estimate follows a measurement that is slower than it."""


class LoadEstimate:
    """One rank's: a batch takes a fixed time, and some time for each byte.

    What a measurement differs from the estimate by is put down to both in proportion to the
    batch's size, so that small loads say little of bandwidth and large ones little of round
    trips. A faster measurement is believed at once, a slower one by degrees: to load when
    computing would have been faster costs little and is measured; not to load measures nothing.
    """

    def __init__(self, batch_bytes: int, threads: int) -> None:
        """A load is cut into batches of this size, read by so many threads."""
        self._batch_bytes = batch_bytes
        self._threads = threads
        self._known = False
        self._fixed_s = self._s_per_byte = 0.0

    def batches(self, size_bytes: int) -> int:
        """Round trips that a load of this size needs."""
        return max(1, math.ceil(size_bytes / self._batch_bytes))

    def note(self, size_bytes: int, seconds: float) -> None:
        """Batches of one load arrived; ``seconds`` summed over them. Sizes and times that are
        not positive and finite say nothing."""
        self._note(size_bytes, seconds, _SLOWER_BY)

    def _note(self, size_bytes: int, seconds: float, slower_by: float) -> None:
        if size_bytes <= 0 or not 0.0 < seconds < math.inf:
            return
        batches = self.batches(size_bytes)
        batch_bytes = size_bytes / batches
        off_s = seconds / batches - self._fixed_s - self._s_per_byte * batch_bytes
        step_s = off_s * slower_by if self._known and off_s > 0 else off_s
        share = min(1.0, batch_bytes / self._batch_bytes)
        self._fixed_s += step_s * (1.0 - share)
        self._s_per_byte += step_s * share / batch_bytes
        if self._fixed_s < 0.0:
            self._s_per_byte, self._fixed_s = self._s_per_byte + self._fixed_s / batch_bytes, 0.0
        if self._s_per_byte < 0.0:
            self._fixed_s, self._s_per_byte = self._fixed_s + self._s_per_byte * batch_bytes, 0.0
        self._known = True

    def note_at_least(self, size_bytes: int, seconds: float) -> None:
        """So much takes at least this time, by the clock on the wall: believed at once."""
        batches = self.batches(size_bytes)
        known_s = self.seconds_for(size_bytes, batches)
        if known_s is None or known_s < seconds:
            self._note(size_bytes, seconds * min(self._threads, batches), 1.0)

    def seconds_for(self, size_bytes: int, batches: int) -> float | None:
        """Until so much in so many batches has arrived; None: nothing was measured yet."""
        if not self._known:
            return None
        total_s = batches * self._fixed_s + size_bytes * self._s_per_byte
        return total_s / max(1, min(self._threads, batches))
