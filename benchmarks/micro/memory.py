"""Bytes a key and a session cost in each part that keeps them, their names not included."""

import sys

from benchmarks.keepalive import block_keys
from benchmarks.report import Report
from benchmarks.sam_sessions import Memory
from spm.hints import DEFAULT_TENANT
from spm.keepalive import KeepAliveRing
from spm.residency import ResidencyIndex
from tracker.ids import GroupId, SessionId, SessionRef
from tracker.session_key_tracker import SessionKeyTracker
from tracker.ttl_wheel import TtlWheel

_INTERVAL_S = 30.0
_TTL_S = 300.0
_UNTIL_S = 1e9


def measure_memory(sessions: int, keys_a_session: int, seed: int) -> dict[str, float]:
    """Bytes a key or a session, by part; what an empty part has is left out.

    Each key belongs to one session; ``bytes_per_session_tracker`` is of one without keys.
    """
    refs = [SessionRef(DEFAULT_TENANT, SessionId(f"session-{n}")) for n in range(sessions)]
    keys = list(block_keys(sessions * keys_a_session, seed))
    tracker = SessionKeyTracker(max(2, sessions), len(keys), lambda: 0.0)
    wheel: TtlWheel[SessionRef] = TtlWheel(lambda: 0.0)
    residency = ResidencyIndex(1, len(keys), _TTL_S, lambda: 0.0)
    ring = KeepAliveRing(_INTERVAL_S, len(keys))
    with Memory() as opened:
        for ref in refs:
            tracker.open(ref)
    with Memory() as associated:
        for at, ref in enumerate(refs):
            chain = keys[at * keys_a_session : (at + 1) * keys_a_session]
            tracker.associate(ref, GroupId(0), 0, chain)
    with Memory() as waiting:
        for at, ref in enumerate(refs):
            wheel.register(ref, _TTL_S * at / sessions)
    with Memory() as located:
        for at in range(0, len(keys), keys_a_session):
            residency.confirm_remote(keys[at : at + keys_a_session])
    with Memory() as kept:
        for at in range(sessions):  # an instant of its own for each session
            ring.hold(keys[at * keys_a_session : (at + 1) * keys_a_session], _UNTIL_S + at)
    assert tracker.num_sessions == len(wheel) == sessions, "sessions were forgotten"
    held = {tracker.num_keys, residency.num_remote_keys, len(ring)}
    assert held == {len(keys)}, "keys were forgotten"
    return {
        "bytes_per_key_name": sys.getsizeof(keys[0]),
        "bytes_per_key_tracker": associated.grown_bytes / len(keys),
        "bytes_per_key_residency": located.grown_bytes / len(keys),
        "bytes_per_key_keep_alive": kept.grown_bytes / len(keys),
        "bytes_per_session_tracker": opened.grown_bytes / sessions,
        "bytes_per_session_ttl_wheel": waiting.grown_bytes / sessions,
    }


def add_memory(report: Report, sessions: int, keys_a_session: int) -> None:
    """Add the bytes, and the sum a key over all parts."""
    by_part = measure_memory(sessions, keys_a_session, report.options.seed)
    report.counts.update(by_part)
    for what in ("key", "session"):
        parts = [size for name, size in by_part.items() if name.startswith(f"bytes_per_{what}_")]
        report.counts[f"bytes_per_{what}"] = sum(parts)
    print(f"  bytes of {sessions} sessions with {keys_a_session} keys each", flush=True)
