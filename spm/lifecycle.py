"""What the outside is told of sessions and their blocks: typed records, versioned on the wire.

A record is one msgpack map of at most :data:`MAX_RECORD_BYTES`: ``v``, ``seq``, ``engine``,
``at``, ``kind``, and the fields of its kind. Whoever reads records trusts nobody who can
write them: what is not exactly a record of this version is a :class:`BadValueError`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import msgpack

from spm.agent_hint import EditType
from spm.errors import BadValueError
from spm.operation import Status
from spm.packed import Bounds, unpack_map
from spm.residency import Tier
from tracker.ids import BlockKey, SessionId, TenantId

VERSION = 1
MAX_KEYS = 512
"""Block keys in one record; more are split over several."""
MAX_RECORD_BYTES = 128 << 10

_BOUNDS = Bounds(size_bytes=MAX_RECORD_BYTES, fields=32, items=MAX_KEYS, depth=2)
_MAX_KEY_BYTES = 128
_MAX_TEXT_CHARS = 256
_MAX_INT = 2**63 - 1


class LifecycleKind(str, Enum):
    """What happened."""

    SESSION_OPENED = "session_opened"
    SESSION_REFRESHED = "session_refreshed"
    SESSION_EXPIRED = "session_expired"
    """Forgotten, for the reason given."""
    SESSION_FREED = "session_freed"
    """The application ended it."""
    BLOCKS_ASSOCIATED = "blocks_associated"
    """A session holds keys it did not hold before."""
    BLOCKS_SAVED = "blocks_saved"
    """All ranks' values are in the tier."""
    BLOCKS_LOADED = "blocks_loaded"
    """They came into the GPU pool from the tier."""
    BLOCKS_EVICTED = "blocks_evicted"
    """Some rank's value is not in the tier any more. No keys: nothing saved so far in the
    tier will be used again."""
    EDIT_ASKED = "edit_asked"
    EDIT_DONE = "edit_done"


class ExpiryReason(str, Enum):
    """Why a session was forgotten."""

    IDLE = "idle"
    BOUND = "bound"


@dataclass(frozen=True, slots=True)
class LifecycleRecord:
    """One thing that happened in one engine; what its kind does not have is None."""

    seq: int
    """Counts the records of an engine, without gaps."""
    engine_id: str
    at_s: float
    """Seconds since the epoch."""
    kind: LifecycleKind
    tenant: TenantId | None = None
    session_id: SessionId | None = None
    parent: SessionId | None = None
    """Of the same tenant."""
    keys: tuple[BlockKey, ...] = ()
    tier: Tier | None = None
    reason: ExpiryReason | None = None
    edit: EditType | None = None
    status: Status | None = None
    operation_id: str | None = None
    blocks: int | None = None
    """Stored blocks an edit is about, or has done."""
    version: int = VERSION


_SESSION = frozenset(("tenant", "session_id"))
_FIELDS: dict[LifecycleKind, tuple[frozenset[str], frozenset[str]]] = {
    LifecycleKind.SESSION_OPENED: (_SESSION, frozenset(("parent",))),
    LifecycleKind.SESSION_REFRESHED: (_SESSION, frozenset(("parent",))),
    LifecycleKind.SESSION_EXPIRED: (_SESSION | {"reason"}, frozenset()),
    LifecycleKind.SESSION_FREED: (_SESSION, frozenset()),
    LifecycleKind.BLOCKS_ASSOCIATED: (_SESSION | {"keys"}, frozenset(("parent",))),
    LifecycleKind.BLOCKS_SAVED: (frozenset(("tier", "keys")), frozenset()),
    LifecycleKind.BLOCKS_LOADED: (frozenset(("tier", "keys")), _SESSION),
    LifecycleKind.BLOCKS_EVICTED: (frozenset(("tier",)), frozenset(("keys",))),
    LifecycleKind.EDIT_ASKED: (_SESSION | {"edit", "blocks"}, frozenset(("operation_id",))),
    LifecycleKind.EDIT_DONE: (
        _SESSION | {"edit", "blocks", "status"},
        frozenset(("operation_id",)),
    ),
}
"""By kind: the fields it must have, and those it may have."""


def encode_event(event: LifecycleRecord) -> bytes:
    """The record on the wire. Any thread."""
    wire: dict[str, Any] = {
        "v": event.version,
        "seq": event.seq,
        "engine": event.engine_id,
        "at": event.at_s,
        "kind": event.kind.value,
    }
    for name in _PARSERS:
        value = getattr(event, name)
        if value is not None and value != ():
            wire[name] = value.value if isinstance(value, Enum) else value
    packed: bytes = msgpack.packb(wire)
    return packed


def decode_event(data: bytes) -> LifecycleRecord:
    """The record in ``data``; raises only :class:`BadValueError`. Any thread."""
    wire = unpack_map(data, _BOUNDS)
    if _whole("v", wire.get("v")) != VERSION:
        raise BadValueError(f"not a lifecycle record of version {VERSION}")
    kind = _choice(LifecycleKind, "kind", wire.get("kind"))
    must, may = _FIELDS[kind]
    given = wire.keys() - _COMMON
    if not must <= given <= must | may:
        raise BadValueError(f"a {kind.value} record has other fields than it should")
    if len(_SESSION & given) == 1:
        raise BadValueError("a session is named by tenant and id together")
    at_s = wire.get("at")
    if not isinstance(at_s, float) or not math.isfinite(at_s):
        raise BadValueError("at: not a finite number")
    return LifecycleRecord(
        seq=_whole("seq", wire.get("seq")),
        engine_id=_text("engine", wire.get("engine")),
        at_s=at_s,
        kind=kind,
        **{name: _PARSERS[name](name, wire[name]) for name in given},
    )


def _choice(kind: type[Enum], name: str, value: object) -> Any:  # noqa: ANN401
    try:
        return kind(value)
    except ValueError as error:
        raise BadValueError(f"{name}: not one of {[one.value for one in kind]}") from error


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= _MAX_TEXT_CHARS:
        raise BadValueError(f"{name}: not a text of 1 to {_MAX_TEXT_CHARS} characters")
    return value


def _whole(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_INT:
        raise BadValueError(f"{name}: not a whole number from 0 on")
    return value


def _keys(name: str, value: object) -> tuple[BlockKey, ...]:
    if not isinstance(value, list) or not value or not all(map(_is_key, value)):
        raise BadValueError(f"{name}: not a list of block keys")
    return tuple(value)


def _is_key(value: object) -> bool:
    return isinstance(value, bytes) and 4 < len(value) <= _MAX_KEY_BYTES


_PARSERS: dict[str, Callable[[str, object], Any]] = {
    "tenant": _text,
    "session_id": _text,
    "parent": _text,
    "keys": _keys,
    "tier": partial(_choice, Tier),
    "reason": partial(_choice, ExpiryReason),
    "edit": partial(_choice, EditType),
    "status": partial(_choice, Status),
    "operation_id": _text,
    "blocks": _whole,
}
_COMMON = frozenset(("v", "seq", "engine", "at", "kind"))
