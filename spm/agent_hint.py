"""The ``agent_hint`` of a request, parsed and validated (the schema of vLLM RFC #52113).

Every refusal names the field by its dotted path, quotes the value and says what is allowed.
Unknown keys are errors: a hint that is silently ignored is a hint somebody relies on. A null
says nothing, as if the field were absent. Two fields are ours: ``expected_resume_s``, ``state``.
"""

import difflib
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from spm.config import MAX_TTL_S
from spm.errors import SpmError
from tracker.ids import SessionId

MAX_SESSION_ID_CHARS = 256
MAX_EDITS = 16
MAX_BLOCK = 2**31 - 1
MAX_RESUME_S = 86_400

_VISIBLE = re.compile(rf"[!-~]{{1,{MAX_SESSION_ID_CHARS}}}")
"""Visible ASCII, no spaces: safe in headers, logs and URLs."""
_PLAIN_KEY = re.compile(r"\w{1,40}", re.ASCII)
_LONGEST_SHOWN_BITS = 64
"""Python refuses to print very long integers, and nobody wants to read them."""

_HINT_KEYS = (
    "session_id",
    "parent_session_id",
    "cache_control",
    "context_management",
    "expected_resume_s",
    "state",
)
_CACHE_KEYS = ("type", "ttl", "block_offset")
_MANAGEMENT_KEYS = ("manage_request", "edits")
_BLOCK_KEYS = ("block_start", "block_end")
_EDIT_KEYS = (*_BLOCK_KEYS, "target")

_Parsed = TypeVar("_Parsed")
_Kind = TypeVar("_Kind", bound=Enum)


class EditType(str, Enum):
    """What an edit does to the blocks it names."""

    OFFLOAD = "offload"
    PREFETCH = "prefetch"
    EVICT = "evict"


class PrefetchTarget(str, Enum):
    """Where a prefetch puts what it loads."""

    GPU = "gpu"
    HOST = "host"


class SessionState(str, Enum):
    """What the application says its session is doing."""

    WAITING_TOOL = "waiting_tool"
    WAITING_USER = "waiting_user"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class BlockRange:
    """The session's logical blocks ``[start, stop)``, counted from its first token."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Edit:
    """One management edit; ``blocks`` None means the whole session. Only a prefetch has a
    say about its ``target``."""

    type: EditType
    blocks: BlockRange | None = None
    target: PrefetchTarget = PrefetchTarget.GPU


@dataclass(frozen=True, slots=True)
class CacheControl:
    """How long to protect a session's blocks.

    Blocks ``[0, block_offset)`` of the session are protected for ``ttl_s``; the rest is only
    associated with it. ``block_offset`` None protects all of them.
    """

    ttl_s: float = 300.0
    block_offset: int | None = None


@dataclass(frozen=True, slots=True)
class AgentHint:
    """A well-formed hint; what was absent or null is None (false or empty for the edits)."""

    session_id: SessionId | None = None
    parent_session_id: SessionId | None = None
    cache_control: CacheControl | None = None
    manage_request: bool = False
    edits: tuple[Edit, ...] = ()
    expected_resume_s: float | None = None
    state: SessionState | None = None


class HintError(SpmError):
    """A hint is malformed. ``field`` is the dotted path of what is wrong with it.

    The message is for whoever sent the hint: it may quote a session id, so it is no log line.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}{problem}")
        self.field = field


def parse_agent_hint(raw: object, path: str = "agent_hint") -> AgentHint:
    """The hint in the JSON value ``raw``; raises only :class:`HintError`. Any thread."""
    given = _fields(raw, _HINT_KEYS, path)
    managed, edits = parse_optional(_management, given, "context_management", path) or (False, ())
    return AgentHint(
        session_id=parse_optional(parse_session_id, given, "session_id", path),
        parent_session_id=parse_optional(parse_session_id, given, "parent_session_id", path),
        cache_control=parse_optional(parse_cache_control, given, "cache_control", path),
        manage_request=managed,
        edits=edits,
        expected_resume_s=parse_optional(parse_expected_resume, given, "expected_resume_s", path),
        state=parse_optional(parse_state, given, "state", path),
    )


def parse_optional(
    parse: Callable[[object, str], _Parsed], given: Mapping[str, object], key: str, path: str
) -> _Parsed | None:
    """``given[key]`` by ``parse``, which is one of the parsers here; None if absent or null."""
    value = given.get(key)
    return None if value is None else parse(value, f"{path}.{key}")


def parse_session_id(raw: object, path: str = "session_id") -> SessionId:
    """A session id; like all parsers here, it takes any JSON value or raises HintError."""
    if isinstance(raw, str) and _VISIBLE.fullmatch(raw):
        return SessionId(raw)
    raise _refused(
        path, raw, f"1 to {MAX_SESSION_ID_CHARS} visible ASCII characters without spaces are needed"
    )


def parse_cache_control(raw: object, path: str) -> CacheControl:
    """``{type?, ttl?, block_offset?}``."""
    given = _fields(raw, _CACHE_KEYS, path)
    kind = given.get("type", "ephemeral")
    if kind != "ephemeral":
        raise _refused(f"{path}.type", kind, "only 'ephemeral' is known")
    block_offset = parse_optional(_block, given, "block_offset", path)
    if "ttl" not in given:
        return CacheControl(block_offset=block_offset)
    return CacheControl(_seconds(given["ttl"], f"{path}.ttl", MAX_TTL_S), block_offset)


def parse_edit(kind: EditType, raw: object, path: str) -> Edit:
    """``{block_start?, block_end?, target?}`` of an edit of type ``kind``: both or neither of
    the first two, the last one only of a prefetch."""
    return _edit_of(kind, _fields(raw, _EDIT_KEYS, path), path)


def parse_expected_resume(raw: object, path: str) -> float:
    """Seconds until the session is expected to go on."""
    return _seconds(raw, path, MAX_RESUME_S)


def parse_state(raw: object, path: str) -> SessionState:
    """The name of a :class:`SessionState`."""
    return _choice(SessionState, raw, path)


def _management(raw: object, path: str) -> tuple[bool, tuple[Edit, ...]]:
    given = _fields(raw, _MANAGEMENT_KEYS, path)
    manage_request = given.get("manage_request", False)
    if not isinstance(manage_request, bool):
        raise _refused(f"{path}.manage_request", manage_request, "true or false is needed")
    edits = given.get("edits", [])
    if not isinstance(edits, (list, tuple)):
        raise _refused(f"{path}.edits", edits, "a list is needed")
    if len(edits) > MAX_EDITS:
        raise HintError(f"{path}.edits", f" has {len(edits)} edits: at most {MAX_EDITS}")
    return manage_request, tuple(_edit(one, f"{path}.edits[{i}]") for i, one in enumerate(edits))


def _edit(raw: object, path: str) -> Edit:
    given = _fields(raw, ("type", *_EDIT_KEYS), path)
    return _edit_of(_choice(EditType, given.get("type"), f"{path}.type"), given, path)


def _edit_of(kind: EditType, given: Mapping[str, object], path: str) -> Edit:
    if "target" in given and kind is not EditType.PREFETCH:
        raise _refused(f"{path}.target", given["target"], "only a prefetch has a target")
    target = parse_optional(_target, given, "target", path) or PrefetchTarget.GPU
    return Edit(kind, _range(given, path), target)


def _target(raw: object, path: str) -> PrefetchTarget:
    return _choice(PrefetchTarget, raw, path)


def _range(given: Mapping[str, object], path: str) -> BlockRange | None:
    start, stop = (parse_optional(_block, given, key, path) for key in _BLOCK_KEYS)
    if start is None and stop is None:
        return None
    if start is None:
        raise HintError(f"{path}.block_start", f" is missing: block_end={stop} needs it")
    if stop is None:
        raise HintError(f"{path}.block_end", f" is missing: block_start={start} needs it")
    if start >= stop:
        raise _refused(f"{path}.block_end", stop, f"more than block_start={start} is needed")
    return BlockRange(start, stop)


def _choice(kind: type[_Kind], raw: object, path: str) -> _Kind:
    for one in kind:
        if raw == one.value:
            return one
    raise _refused(path, raw, f"one of {[one.value for one in kind]} is needed")


def _block(raw: object, path: str) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or not 0 <= raw <= MAX_BLOCK:
        raise _refused(path, raw, f"a whole number from 0 to {MAX_BLOCK} is needed")
    return raw


def _seconds(raw: object, path: str, most: int) -> float:
    # "Not in range", because every comparison with a NaN is false.
    if isinstance(raw, bool) or not isinstance(raw, (int, float)) or not 0 <= raw <= most:
        raise _refused(path, raw, f"a number of seconds from 0 to {most} is needed")
    return float(raw)


def _fields(raw: object, known: tuple[str, ...], path: str) -> dict[str, object]:
    """What the JSON object ``raw`` says: its keys checked, its nulls left out."""
    if not isinstance(raw, Mapping):
        raise _refused(path, raw, "an object is needed")
    for key, value in raw.items():
        if key not in known:
            raise _unknown_key(key, value, known, path)
    return {key: value for key, value in raw.items() if value is not None}


def _unknown_key(key: object, value: object, known: tuple[str, ...], path: str) -> HintError:
    if not isinstance(key, str) or not _PLAIN_KEY.fullmatch(key):
        return _refused(f"{path}.({_shown(key)})", value, f"unknown key; known: {sorted(known)}")
    near = difflib.get_close_matches(key, known, n=1)
    suggestion = f"; did you mean {near[0]}?" if near else ""
    return _refused(f"{path}.{key}", value, f"unknown key{suggestion}; known: {sorted(known)}")


def _refused(field: str, value: object, allowed: str) -> HintError:
    return HintError(field, f"={_shown(value)}: {allowed}")


def _shown(value: object) -> str:
    """A short ``repr`` of a plain scalar; anything else is only named."""
    if isinstance(value, int) and value.bit_length() > _LONGEST_SHOWN_BITS:
        return "(a very long number, not shown)"
    if value is None or isinstance(value, (bool, int, float, str)):
        return reprlib.repr(value)
    return f"({type(value).__name__}, not shown)"
