"""One answer out of those of several engines (data parallel), without I/O.

An engine that does not know a session has no say about it if another engine knows it. With
one engine every function returns what that engine said.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Answer = Mapping[str, Any]

_STRENGTH = ("finished", "ordinary", "associated", "later", "soon")
"""Retention classes, the strongest last."""
_EFFECTIVE = frozenset({"ok", "partial", "accepted", "deferred"})


def merge_status(statuses: Sequence[str]) -> str:
    """Equal stays, mixed is ``partial``; ``failed`` when none of several had any effect."""
    known = {s for s in statuses if s != "not_found"} or set(statuses)
    if len(known) == 1:
        return known.pop()
    return "partial" if known & _EFFECTIVE else "failed"


def merge_apply(answers: Sequence[Answer]) -> dict[str, Any]:
    """Answers to ``apply``: edits are merged one by one, block counts summed."""
    said = _with_a_say(answers)
    merged = _common(answers, said)
    merged["edits"] = [_merge_edit(edits) for edits in _columns(said, "edits")]
    merged["retention"] = _merge_retention([a["retention"] for a in said if a.get("retention")])
    return merged


def merge_end(answers: Sequence[Answer]) -> dict[str, Any]:
    """Answers to ``end_session``: the union of what ended, in the order it was said."""
    said = _with_a_say(answers)
    merged = _common(answers, said)
    merged["ended"] = list(dict.fromkeys(i for a in said for i in a.get("ended", ())))
    return merged


def merge_session(answers: Sequence[Answer]) -> dict[str, Any]:
    """Answers to ``get_session``."""
    said = _with_a_say(answers)
    merged = _common(answers, said)
    sessions = [a["session"] for a in said if a.get("session")]
    if sessions:
        merged["session"] = _merge_sessions(sessions)
    return merged


def merge_list(answers: Sequence[Answer], limit: int) -> dict[str, Any]:
    """Answers to ``list_sessions``, each asked for ``limit``: ascending by id, cut to it.

    Right although each engine cut its own list: what is among the first ``limit`` of all is
    among the first ``limit`` of each engine that has it.
    """
    merged = _common(answers, _with_a_say(answers))
    listing = [a for a in answers if "sessions" in a]
    if not listing:
        return merged
    by_id: dict[str, list[Answer]] = {}
    for session in (s for a in listing for s in a["sessions"]):
        by_id.setdefault(session["id"], []).append(session)
    ids = sorted(by_id)
    merged["sessions"] = [_merge_sessions(by_id[i]) for i in ids[:limit]]
    merged["has_more"] = len(ids) > limit or any(a.get("has_more") for a in listing)
    return merged


def merge_operation(answers: Sequence[Answer]) -> dict[str, Any]:
    """Answers to ``get_operation``: the first answers, merged as they were merged then."""
    said = _with_a_say(answers)
    merged = _common(answers, said)
    firsts = [a["operation"] for a in said if a.get("operation")]
    if firsts:
        merge = merge_end if any("ended" in f for f in firsts) else merge_apply
        merged["operation"] = merge(firsts)
    return merged


def _with_a_say(answers: Sequence[Answer]) -> Sequence[Answer]:
    return [a for a in answers if a["status"] != "not_found"] or answers


def _common(answers: Sequence[Answer], said: Sequence[Answer]) -> dict[str, Any]:
    """Status, ids, the most useful detail, and whether all of it was a repeat."""
    merged: dict[str, Any] = {"status": merge_status([a["status"] for a in answers])}
    for key in ("operation_id", "session_id"):
        values = [a[key] for a in said if a.get(key) is not None]
        if values:
            merged[key] = values[0]
    _set_detail(merged, said)
    if all(a.get("duplicate") for a in said):
        merged["duplicate"] = True
    return merged


def _set_detail(merged: dict[str, Any], said: Sequence[Answer]) -> None:
    """Sentences that say what to do come from those for whom it did not work out."""
    details = [a["detail"] for a in said if a.get("detail") and a["status"] != "ok"]
    details += [a["detail"] for a in said if a.get("detail")]
    if details:
        merged["detail"] = details[0]


def _columns(answers: Sequence[Answer], key: str) -> Iterable[list[Answer]]:
    """The n-th entry of each answer's list, for every n; an answer may have fewer."""
    longest = max(len(a.get(key, ())) for a in answers)
    return ([a[key][n] for a in answers if len(a.get(key, ())) > n] for n in range(longest))


def _merge_edit(edits: Sequence[Answer]) -> dict[str, Any]:
    said = _with_a_say(edits)
    starts = [e["block_start"] for e in said if e.get("block_start") is not None]
    ends = [e["block_end"] for e in said if e.get("block_end") is not None]
    merged: dict[str, Any] = {
        "type": said[0]["type"],
        "status": merge_status([e["status"] for e in edits]),
        "block_start": min(starts, default=None),
        "block_end": max(ends, default=None),
        "blocks": sum(e.get("blocks", 0) for e in said),
    }
    _set_detail(merged, said)
    return merged


def _merge_retention(kept: Sequence[Answer]) -> dict[str, Any] | None:
    if not kept:
        return None
    return {
        "class": _strongest(kept),
        "ttl_s": max(r.get("ttl_s", 0.0) for r in kept),
        "blocks": sum(r.get("blocks", 0) for r in kept),
    }


def _merge_sessions(sessions: Sequence[Answer]) -> dict[str, Any]:
    """One session as several engines see it."""
    parents = [s["parent_session_id"] for s in sessions if s.get("parent_session_id")]
    merged: dict[str, Any] = {
        "id": sessions[0]["id"],
        "parent_session_id": parents[0] if parents else None,
        "children": max(s.get("children", 0) for s in sessions),
        "active_requests": sum(s.get("active_requests", 0) for s in sessions),
        "idle_s": min(s.get("idle_s", 0.0) for s in sessions),
        "ttl_left_s": max(s.get("ttl_left_s", 0.0) for s in sessions),
        "class": _strongest(sessions),
        "blocks": sum(s.get("blocks", 0) for s in sessions),
    }
    residencies = [s["residency"] for s in sessions if "residency" in s]
    if residencies:
        tiers = dict.fromkeys(tier for r in residencies for tier in r)
        merged["residency"] = {t: sum(r.get(t, 0) for r in residencies) for t in tiers}
    return merged


def _strongest(items: Sequence[Answer]) -> str:
    classes = [str(i.get("class")) for i in items]
    return max(classes, key=lambda c: _STRENGTH.index(c) if c in _STRENGTH else -1)
