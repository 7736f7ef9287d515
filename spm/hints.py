"""Session identity of a request, from whatever the client was able to send.

Only identity is read here. A malformed hint never fails a generation: it is reported as
malformed, counted by the caller and ignored.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tracker.ids import SessionId, SessionRef, TenantId

DEFAULT_TENANT = TenantId("default")
MAX_SESSION_ID_CHARS = 256
_PRINTABLE = re.compile(rf"[!-~]{{1,{MAX_SESSION_ID_CHARS}}}")
"""Visible ASCII, no spaces: safe in headers, logs and URLs."""


@dataclass(frozen=True, slots=True)
class SessionIdentity:
    """Who a request belongs to. ``malformed`` is set when something was sent but unusable."""

    ref: SessionRef | None = None
    parent: SessionRef | None = None
    malformed: bool = False


def session_identity(
    session_id: str | None, kv_transfer_params: Mapping[str, Any] | None
) -> SessionIdentity:
    """Identity from ``kv_transfer_params.agent_hint`` if given, else vLLM's ``session_id``.

    The hint wins because it is the more specific statement about the same request. A
    null says nothing, as if the field were absent.
    """
    params, params_malformed = _mapping(kv_transfer_params)
    fields, malformed = _mapping(params.get("agent_hint"))
    malformed |= params_malformed
    given = fields.get("session_id")
    if given is None:
        given = session_id
    ref = _ref(given)
    parent_given = fields.get("parent_session_id")
    parent = _ref(parent_given)
    malformed |= given is not None and ref is None
    malformed |= parent_given is not None and parent is None
    return SessionIdentity(ref, parent if ref is not None else None, malformed)


def _mapping(value: object) -> tuple[Mapping[str, Any], bool]:
    """``value`` if it is an object, else an empty one; and whether it was malformed."""
    if isinstance(value, Mapping):
        return value, False
    return {}, value is not None


def _ref(value: object) -> SessionRef | None:
    if not isinstance(value, str) or not _PRINTABLE.fullmatch(value):
        return None
    return SessionRef(DEFAULT_TENANT, SessionId(value))
