"""A TTL wheel with so many sessions on it: what an expiry costs, one by one and all at once."""

from time import thread_time

from spm.hints import DEFAULT_TENANT
from tracker.ids import SessionId, SessionRef
from tracker.ttl_wheel import TtlWheel

_TTL_S = 300
_AT_ONCE = 16
"""As many as the manager takes at a time."""


class TurningWheel:
    """Every session's time is over once in 300 s, evenly spread, and begins anew."""

    def __init__(self, sessions: int) -> None:
        self._now_s = 0.0
        self.wheel: TtlWheel[SessionRef] = TtlWheel(lambda: self._now_s)
        for number in range(sessions):
            ref = SessionRef(DEFAULT_TENANT, SessionId(f"session-{number}"))
            self.wheel.register(ref, _TTL_S * (number + 1) / sessions)

    def turn(self) -> float:
        """CPU seconds an entry that expires and is registered again, one whole turn long."""
        expired = 0
        started = thread_time()
        for _ in range(_TTL_S):
            self._now_s += 1.0
            due = self.wheel.advance()
            expired += len(due)
            for ref in due:
                self.wheel.register(ref, _TTL_S)
        seconds = thread_time() - started
        assert expired == len(self.wheel), "not everybody's time was over once"
        return seconds / expired

    def burst(self) -> float:
        """CPU seconds an entry when all are due in the same second."""
        refs: list[SessionRef] = []
        self._now_s += 2 * _TTL_S
        started = thread_time()
        while due := self.wheel.advance(_AT_ONCE):
            refs += due
        seconds = thread_time() - started
        for at, ref in enumerate(refs, start=1):
            self.wheel.register(ref, _TTL_S * at / len(refs))
        return seconds / len(refs)
