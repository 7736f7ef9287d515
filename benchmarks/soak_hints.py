"""What an agent of a soak says beside its prompts: hints, good and bad, and management calls."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_STATES = ("waiting_tool", "waiting_user", "finished")
_EDITS = ("offload", "prefetch", "evict")
_MANAGED = frozenset({200, 202, 404, 429})
"""Done, going on, no such session (it was ended or forgotten), over a bound: all are answers."""

_BAD: tuple[Any, ...] = (
    "not an object",
    {"session_id": ""},
    {"session_id": "with spaces"},
    {"session_id": "x" * 257},
    {"session_id": ["a"]},
    {"session_id": "a", "cache_control": {"ttl": "forever"}},
    {"session_id": "a", "cache_control": {"ttl": -1}},
    {"session_id": "a", "cache_control": {"ttl": 3601}},
    {"session_id": "a", "cache_control": []},
    {"session_id": "a", "state": "sleeping"},
    {"session_id": "a", "expected_resume_s": True},
    {"session_id": "a", "unknown": 1},
    {"session_id": "a", "context_management": {"edits": [{"type": "offload"}] * 17}},
    {"session_id": "a", "context_management": {"edits": [{"type": "prefetch", "block_start": 3}]}},
    {"session_id": "a", "context_management": {"edits": [{"type": "evict", "target": "gpu"}]}},
)


@dataclass(frozen=True)
class ManagementCall:
    """One call of the session routes, and the HTTP statuses that are right answers."""

    method: str
    path: str
    body: dict[str, Any] | None = None
    right: frozenset[int] = _MANAGED


def good_hint(rng: random.Random, session: str, parent: str | None) -> dict[str, Any]:
    """Anything a sensible application could say."""
    hint: dict[str, Any] = {"session_id": session}
    if parent is not None and parent != session:
        hint["parent_session_id"] = parent
    if rng.random() < 0.5:
        hint["cache_control"] = {"ttl": rng.choice([0, 1, 20, 3600])}
        if rng.random() < 0.3:
            hint["cache_control"]["block_offset"] = rng.randrange(40)
    if rng.random() < 0.4:
        hint["state"] = rng.choice(_STATES)
    if rng.random() < 0.3:
        hint["expected_resume_s"] = rng.choice([0.5, 30, 86_400])
    if rng.random() < 0.15:
        hint["context_management"] = {"edits": _edits(rng)}
    return hint


def bad_hint(rng: random.Random) -> Any:  # noqa: ANN401  (bad ones have every type)
    """One that is refused with a 400, or ignored where it cannot be refused."""
    return rng.choice(_BAD)


def management_call(rng: random.Random, session: str, others: Sequence[str]) -> ManagementCall:
    """A call about a session of one's own, rarely about another's."""
    name = rng.choice(others) if others and rng.random() < 0.1 else session
    path = f"/v1/sessions/{name}"
    what = rng.random()
    if what < 0.45:
        return ManagementCall("POST", f"{path}/edits", {"edits": _edits(rng)})
    if what < 0.55:
        retain = {"cache_control": {"ttl": rng.choice([0, 5, 60])}, "state": rng.choice(_STATES)}
        return ManagementCall("POST", f"{path}/edits", retain)
    if what < 0.70:
        return ManagementCall("GET", path)
    if what < 0.80:
        return ManagementCall("GET", f"/v1/sessions?limit={rng.randint(1, 50)}")
    if what < 0.88:
        return ManagementCall("GET", "/v1/spm/status")
    if what < 0.94:
        return ManagementCall("DELETE", f"{path}?tree={rng.choice(['true', 'false'])}")
    bad: dict[str, Any] = rng.choice(
        [{}, {"edits": 7}, {"edits": [{"type": "explode"}]}, {"state": "?"}]
    )
    return ManagementCall("POST", f"{path}/edits", bad, frozenset({400}))


def _edits(rng: random.Random) -> list[dict[str, Any]]:
    return [_edit(rng) for _ in range(rng.choice([1, 1, 1, 2, 4]))]


def _edit(rng: random.Random) -> dict[str, Any]:
    edit: dict[str, Any] = {"type": rng.choice(_EDITS)}
    if rng.random() < 0.4:
        start = rng.randrange(30)
        edit |= {"block_start": start, "block_end": start + rng.randint(1, 30)}
    if edit["type"] == "prefetch" and rng.random() < 0.4:
        edit["target"] = rng.choice(["gpu", "host"])
    return edit
