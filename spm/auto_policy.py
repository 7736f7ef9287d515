"""What to do with the GPU blocks of an idle session when nobody says: one pure decision.

The rule is Gray and Putzolu's five-minute rule (Tandem TR 86.1, 1986: keep in memory what is
read again before the break-even interval) with the costs of InferCept (Abhyankar et al., ICML
2024: preserving wastes gap x memory, swapping wastes the transfers both ways, discarding wastes
the recomputation; do what wastes least). Both sides are divided by the pool, which leaves
seconds::

    hold = gap_s x kv_bytes / pool_bytes x pressure     pool time that others miss
    move = (kv_bytes + bytes not stored yet) / load_bytes_per_s

Hold while ``hold <= move``. For a session that is stored already its size cancels out: hold
while gap x bandwidth x pressure is at most the pool. Others (Continuum, arXiv 2511.02230;
TokenCake, arXiv 2510.18586) weigh the same quantities with a model of tool durations.

``pressure`` is what InferCept takes to be 1: a byte of a pool with free blocks is missed by
nobody, so that without pressure holding costs nothing.
"""

import math
from dataclasses import dataclass
from enum import Enum

AMPLE_FREE_SHARE = 0.25
"""With so much of the pool free or unprotected there is no pressure."""

UNKNOWN_GAP_PRESSURE = 0.5
"""From here on a session of which nobody knows when it returns gives way."""


class AutoAction(str, Enum):
    RETAIN = "retain"
    """Stay in the GPU pool as it is."""
    OFFLOAD = "offload"
    """Be stored outside, then give the pool's blocks away first."""
    DROP = "drop"
    """Give the pool's blocks away first; recomputed if needed."""


@dataclass(frozen=True, slots=True)
class IdleSession:
    """What the decision is based on. Raises ValueError for numbers that make no sense.

    ``expected_gap_s``: until the next request, None: unknown. ``kv_bytes``: of the session,
    ``stored_bytes`` of them are kept outside already. ``load_bytes_per_s``: of the fastest
    tier that would hold them, None: there is none, or it was never measured.
    ``recompute_s``: None: unknown. ``free_share``: of the pool, free and of ordinary or lower
    retention.
    """

    expected_gap_s: float | None
    kv_bytes: int
    stored_bytes: int
    load_bytes_per_s: float | None
    recompute_s: float | None
    free_share: float
    pool_bytes: int

    def __post_init__(self) -> None:
        sane = (
            (self.expected_gap_s is None or 0.0 <= self.expected_gap_s < math.inf)
            and 0 <= self.stored_bytes <= self.kv_bytes
            and (self.load_bytes_per_s is None or 0.0 < self.load_bytes_per_s < math.inf)
            and (self.recompute_s is None or 0.0 <= self.recompute_s < math.inf)
            and 0.0 <= self.free_share <= 1.0
            and self.pool_bytes > 0
        )
        if not sane:
            raise ValueError(f"out of range: {self}")


@dataclass(frozen=True, slots=True)
class AutoDecision:
    """``reason`` is one sentence for people; the numbers behind it are None where unknown.

    ``recompute_s`` is what was given. All in seconds, except ``pressure`` from 0 to 1.
    """

    action: AutoAction
    reason: str
    pressure: float
    hold_s: float | None
    move_s: float | None
    reload_s: float | None
    recompute_s: float | None


def decide(session: IdleSession) -> AutoDecision:
    """Retain, offload or drop. Pure; any thread.

    Drops only what is known to be recomputed faster than it would be reloaded, and only under
    pressure. With all else equal a longer gap, more pressure or more bytes stored never turn
    leaving the pool into staying.
    """
    pressure = max(0.0, 1.0 - session.free_share / AMPLE_FREE_SHARE)
    reload_s = move_s = hold_s = None
    if session.load_bytes_per_s is not None:
        reload_s = session.kv_bytes / session.load_bytes_per_s
        unstored_bytes = session.kv_bytes - session.stored_bytes
        move_s = reload_s + unstored_bytes / session.load_bytes_per_s
    if session.expected_gap_s is not None:
        share = min(1.0, session.kv_bytes / session.pool_bytes)
        hold_s = session.expected_gap_s * share * pressure
    action, reason = _choose(session, pressure, hold_s, move_s, reload_s)
    return AutoDecision(action, reason, pressure, hold_s, move_s, reload_s, session.recompute_s)


def _choose(
    session: IdleSession,
    pressure: float,
    hold_s: float | None,
    move_s: float | None,
    reload_s: float | None,
) -> tuple[AutoAction, str]:
    if not session.kv_bytes:
        return AutoAction.RETAIN, "The session has nothing in the pool."
    if not pressure:
        return (
            AutoAction.RETAIN,
            f"No pressure: {session.free_share:.0%} of the pool are free, so holding is free.",
        )
    if move_s is None or reload_s is None:
        return AutoAction.RETAIN, "No tier that could take it has been measured."
    leave, leave_s, what = AutoAction.OFFLOAD, move_s, "moving it out and back"
    if session.recompute_s is not None and session.recompute_s < reload_s:
        leave, leave_s, what = AutoAction.DROP, session.recompute_s, "computing it again"
    costs = f"{what} costs {leave_s:.3g} s at pressure {pressure:.2f}"
    if hold_s is None:
        if pressure < UNKNOWN_GAP_PRESSURE:
            return AutoAction.RETAIN, f"Its return is not known and pressure is low; {costs}."
        return leave, f"Its return is not known and pressure is high; {costs}."
    hold = f"Holding it for {session.expected_gap_s:.3g} s costs others {hold_s:.3g} s of the pool"
    if hold_s <= leave_s:
        return AutoAction.RETAIN, f"{hold}; {costs}, which is not less."
    return leave, f"{hold}; {costs}, which is less."
