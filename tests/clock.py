"""The clock that tests inject: it moves only when told."""


class FakeClock:
    """Monotonic seconds; set ``now_s`` to let time pass."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
