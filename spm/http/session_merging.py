"""One session as several engines see it (data parallel), without I/O."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_STRENGTH = ("finished", "ordinary", "associated", "later", "soon")
"""Retention classes, the strongest last."""
_LOCAL = "local"
_NOT_COUNTS = ("age_s", "ranges")
"""What a residency holds besides numbers of blocks and bytes."""


class Sighting(NamedTuple):
    """What one engine says about a session; ``engine``: its place among those asked."""

    engine: int
    session: Mapping[str, Any]


def merge_sessions(sightings: Sequence[Sighting]) -> dict[str, Any]:
    """One session out of at least one sighting; a single one is quoted.

    Engines that know a session only by its manifest in the store read the same manifest: one
    of them is quoted, and none if another engine has seen the session itself.
    """
    seen = [s for s in sightings if _origin(s.session) == _LOCAL] or sightings[:1]
    sessions = [s.session for s in seen]
    if len(sessions) == 1:
        return dict(sessions[0])
    parents = [s["parent_session_id"] for s in sessions if s.get("parent_session_id")]
    merged: dict[str, Any] = {
        "id": sessions[0]["id"],
        "parent_session_id": parents[0] if parents else None,
        "children": max(s.get("children", 0) for s in sessions),
        "active_requests": sum(s.get("active_requests", 0) for s in sessions),
        "idle_s": min(s.get("idle_s", 0.0) for s in sessions),
        "ttl_left_s": max(s.get("ttl_left_s", 0.0) for s in sessions),
        "class": strongest_class(sessions),
        "blocks": sum(s.get("blocks", 0) for s in sessions),
    }
    placed = [(s.engine, s.session["residency"]) for s in seen if "residency" in s.session]
    if placed:
        merged["residency"] = _merge_residency(placed)
    deciding = [s for s in sessions if "auto" in s]
    if deciding:
        merged["auto"] = max(deciding, key=lambda s: (_strength(s), s["auto"] is not None))["auto"]
    if any("operations" in s for s in sessions):
        merged["operations"] = [one for s in sessions for one in s.get("operations", ())]
    if any("origin" in s for s in sessions):
        merged["origin"] = _LOCAL
    return merged


def strongest_class(items: Sequence[Mapping[str, Any]]) -> str:
    """The retention class that protects longest among ``class`` of each item."""
    return str(max(items, key=_strength).get("class"))


def _merge_residency(placed: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Sums of blocks and bytes, and the oldest knowledge. Each engine counts a session's blocks
    for itself, so ranges are not united but marked with their engine."""
    residencies = [residency for _, residency in placed]
    counts = dict.fromkeys(key for r in residencies for key in r if key not in _NOT_COUNTS)
    merged: dict[str, Any] = {key: sum(r.get(key, 0) for r in residencies) for key in counts}
    if any("age_s" in r for r in residencies):
        ages_s = [r["age_s"] for r in residencies if r.get("age_s") is not None]
        merged["age_s"] = max(ages_s, default=None)
    if any("ranges" in r for r in residencies):
        merged["ranges"] = [
            {**one, "engine": engine} for engine, r in placed for one in r.get("ranges", ())
        ]
    return merged


def _origin(session: Mapping[str, Any]) -> str:
    return str(session.get("origin", _LOCAL))


def _strength(item: Mapping[str, Any]) -> int:
    name = item.get("class")
    return _STRENGTH.index(name) if name in _STRENGTH else -1
