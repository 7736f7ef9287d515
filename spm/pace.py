"""A bound on how often something is done, and how often it was."""

_WINDOW_S = 10.0


class Pace:
    """At most ``per_s`` things a second, in batches: after each batch there is a pause in
    proportion to its size, and time not used is not saved up. Pure state of one thread;
    instants are whatever monotonic seconds the caller passes.
    """

    __slots__ = ("_count", "_last_per_s", "_per_s", "_ready_s", "_window_start_s")

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._ready_s = float("-inf")
        self._window_start_s = 0.0
        self._count = 0
        self._last_per_s = 0.0

    @property
    def ready_s(self) -> float:
        """When the next batch may be done."""
        return self._ready_s

    def spend(self, count: int, now_s: float) -> None:
        """A batch of ``count`` is done now."""
        self._ready_s = max(self._ready_s, now_s) + count / self._per_s
        self._roll(now_s)
        self._count += count

    def measured_per_s(self, now_s: float) -> float:
        """How many there were a second, over the last 10 to 20 seconds."""
        self._roll(now_s)
        return max(self._last_per_s, self._count / _WINDOW_S)

    def _roll(self, now_s: float) -> None:
        passed_s = now_s - self._window_start_s
        if passed_s >= _WINDOW_S:
            self._last_per_s = self._count / passed_s
            self._window_start_s = now_s
            self._count = 0
