"""One answer out of those of several engines (data parallel), without I/O.

An engine that does not know a session has no say about it if another engine knows it. With
one engine every function returns what that engine said.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spm.http.session_merging import Sighting, merge_sessions, strongest_class
from spm.operation import UNFINISHED

Answer = Mapping[str, Any]

_GOING_WELL: frozenset[str] = UNFINISHED | {"ok"}
_EFFECTIVE = _GOING_WELL | {"partial"}


def merge_status(statuses: Sequence[str]) -> str:
    """Equal stays; ``accepted`` while some go on and the others went well; else mixed is
    ``partial``, or ``failed`` when none of several had any effect."""
    known = {s for s in statuses if s != "not_found"} or set(statuses)
    if len(known) == 1:
        return known.pop()
    if known <= _GOING_WELL:
        return "accepted"
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
    merged = _common(answers, _with_a_say(answers))
    seen = [Sighting(n, a["session"]) for n, a in enumerate(answers) if a.get("session")]
    if seen:
        merged["session"] = merge_sessions(seen)
    return merged


def merge_list(answers: Sequence[Answer], limit: int) -> dict[str, Any]:
    """Answers to ``list_sessions``, each asked for ``limit``: ascending by id, cut to it.

    Right although each engine cut its own list: what is among the first ``limit`` of all is
    among the first ``limit`` of each engine that has it.
    """
    merged = _common(answers, _with_a_say(answers))
    listing = [(n, a) for n, a in enumerate(answers) if "sessions" in a]
    if not listing:
        return merged
    by_id: dict[str, list[Sighting]] = {}
    for seen in (Sighting(n, session) for n, a in listing for session in a["sessions"]):
        by_id.setdefault(seen.session["id"], []).append(seen)
    ids = sorted(by_id)
    merged["sessions"] = [merge_sessions(by_id[i]) for i in ids[:limit]]
    merged["has_more"] = len(ids) > limit or any(a.get("has_more") for _, a in listing)
    return merged


def merge_operation(answers: Sequence[Answer]) -> dict[str, Any]:
    """Answers to ``get_operation``: what became of it, merged as the first answers were."""
    said = _with_a_say(answers)
    merged = _common(answers, said)
    found = [a["operation"] for a in said if a.get("operation")]
    if found:
        merge = merge_end if any("ended" in f for f in found) else merge_apply
        done = all(_is_done(f) for f in _with_a_say(found))
        merged["operation"] = {**merge(found), "done": done}
    return merged


def merge_engines(answers: Sequence[Answer]) -> dict[str, Any]:
    """Answers to ``status``: an entry for each engine, in their order. If one engine has no
    status to give, its entry says why instead; if none has, there are no entries."""
    merged = _common(answers, answers)
    if any("engine" in a for a in answers):
        merged["engines"] = [{"engine": n, **a.get("engine", a)} for n, a in enumerate(answers)]
    return merged


def _with_a_say(answers: Sequence[Answer]) -> Sequence[Answer]:
    return [a for a in answers if a["status"] != "not_found"] or answers


def _is_done(operation: Answer) -> bool:
    """As the engine says; one that says nothing has nothing under way but what it lists."""
    under_way = any(edit["status"] in UNFINISHED for edit in operation.get("edits", ()))
    return bool(operation.get("done", not under_way))


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
    if len(said) == 1:
        return dict(said[0])
    starts = [e["block_start"] for e in said if e.get("block_start") is not None]
    ends = [e["block_end"] for e in said if e.get("block_end") is not None]
    merged: dict[str, Any] = {
        **{key: said[0][key] for key in ("type", "target") if key in said[0]},
        "status": merge_status([e["status"] for e in edits]),
        "block_start": min(starts, default=None),
        "block_end": max(ends, default=None),
        "blocks": sum(e.get("blocks", 0) for e in said),
    }
    if any("done_blocks" in e for e in said):
        merged["done_blocks"] = sum(e.get("done_blocks", 0) for e in said)
    _set_detail(merged, said)
    return merged


def _merge_retention(kept: Sequence[Answer]) -> dict[str, Any] | None:
    if not kept:
        return None
    return {
        "class": strongest_class(kept),
        "ttl_s": max(r.get("ttl_s", 0.0) for r in kept),
        "blocks": sum(r.get("blocks", 0) for r in kept),
    }
