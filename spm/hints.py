"""What a request says about its session, from all the places it may say it, in one form.

The places: ``kv_transfer_params.agent_hint``, else vLLM's ``kv_hints`` envelope; and vLLM's own
``session_id``. Nothing sent can fail a generation: a malformed hint is reported as malformed,
counted by the caller and ignored, except for whose request it is as far as that is readable.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from spm.agent_hint import (
    MAX_EDITS,
    AgentHint,
    EditType,
    HintError,
    parse_agent_hint,
    parse_cache_control,
    parse_edit,
    parse_expected_resume,
    parse_optional,
    parse_session_id,
    parse_state,
)
from spm.tenancy import TenantVerifier
from tracker.ids import SessionRef, TenantId

DEFAULT_TENANT = TenantId("default")
MAX_ACTIONS = 16
"""Actions read from one ``kv_hints`` envelope; what follows is ignored."""

logger = logging.getLogger(__name__)
_Value = TypeVar("_Value")

_VERSION = re.compile(r"1(?!\d)")
"""The major version of the actions known here: "1", "1.0", "1.7.2", not "10"."""
_EDITS = {f"kv.{kind.value}": kind for kind in EditType}


class HintOutcome(str, Enum):
    """What became of the hint."""

    NONE = "none"
    ACCEPTED = "accepted"
    MALFORMED = "malformed"
    UNKNOWN = "unknown"
    """Only ``kv_hints`` actions that are not for us: other components may know them."""


@dataclass(frozen=True, slots=True)
class RequestHint:
    """Whose request it is and what it asks for.

    ``hint`` is set exactly when ``outcome`` is ACCEPTED. Its ids are only what the hint said;
    ``ref`` and ``parent`` are what counts. A request nobody owns has no ``ref``, hint or not.
    """

    ref: SessionRef | None = None
    parent: SessionRef | None = None
    hint: AgentHint | None = None
    outcome: HintOutcome = HintOutcome.NONE


_NOTHING = RequestHint()


def request_hint(
    session_id: str | None,
    kv_transfer_params: Mapping[str, Any] | None,
    kv_hints: object | None,
    tenants: TenantVerifier,
) -> RequestHint:
    """Everything the request says, normalised. Never raises. Scheduler thread.

    The hint's ``session_id`` wins over vLLM's: it is the more specific statement. An unproven
    tenant is :data:`DEFAULT_TENANT`.
    """
    if session_id is None and kv_transfer_params is None and kv_hints is None:
        return _NOTHING
    tenant = DEFAULT_TENANT
    if kv_transfer_params is None:
        said = _from_envelope(kv_hints)
    elif not isinstance(kv_transfer_params, Mapping):
        said = _Said(malformed=True)
    else:
        tenant = tenants.tenant_of(kv_transfer_params) or tenant
        raw = kv_transfer_params.get("agent_hint")
        said = _from_envelope(kv_hints) if raw is None else _from_hint(raw)
    return _resolved(said, session_id, tenant)


@dataclass(slots=True)
class _Said:
    """What one place says; the ids as they were sent, because a malformed hint still has them."""

    session_id: object = None
    parent_session_id: object = None
    hint: AgentHint | None = None
    malformed: bool = False
    unknown: bool = False

    def read_ids(self, raw: object) -> None:
        """Take over the ids of a raw hint, if it has any."""
        if isinstance(raw, Mapping):
            self.session_id = _later(raw.get("session_id"), self.session_id)
            self.parent_session_id = _later(raw.get("parent_session_id"), self.parent_session_id)

    def refuse(self, error: HintError) -> None:
        """Only the field is logged: the message may quote a session id."""
        logger.debug("ignoring a malformed hint: %s", error.field)
        self.malformed = True


def _resolved(said: _Said, session_id: object, tenant: TenantId) -> RequestHint:
    given = _later(said.session_id, session_id)
    ref = _ref(given, tenant)
    parent = None if ref is None else _ref(said.parent_session_id, tenant)
    if said.malformed or (given is not None and ref is None):
        return RequestHint(ref, parent, None, HintOutcome.MALFORMED)
    if said.hint is not None:
        return RequestHint(ref, parent, said.hint, HintOutcome.ACCEPTED)
    if said.unknown:
        return RequestHint(ref, parent, None, HintOutcome.UNKNOWN)
    return _NOTHING if ref is None else RequestHint(ref)


def _ref(value: object, tenant: TenantId) -> SessionRef | None:
    if value is None:
        return None
    try:
        return SessionRef(tenant, parse_session_id(value))
    except HintError:
        return None


def _from_hint(raw: object) -> _Said:
    said = _Said()
    said.read_ids(raw)
    try:
        said.hint = parse_agent_hint(raw)
    except HintError as error:
        said.refuse(error)
    return said


def _from_envelope(envelope: object | None) -> _Said:
    """The actions of a ``kv_hints`` envelope that are for us, as one hint; one that is malformed
    spoils them all, one that is not known here does not."""
    said = _Said()
    if envelope is None:
        return said
    actions = getattr(envelope, "actions", None)
    if not isinstance(actions, (list, tuple)):
        said.malformed = True
        return said
    for position, action in enumerate(actions[:MAX_ACTIONS]):
        try:
            _read_action(said, action, f"kv_hints.actions[{position}]")
        except HintError as error:
            said.refuse(error)
    return said


def _read_action(said: _Said, action: object, path: str) -> None:
    kind = getattr(action, "action_type", None)
    version = getattr(action, "action_version", None)
    if not isinstance(kind, str) or not isinstance(version, str):
        raise HintError(path, ": action_type and action_version must be strings")
    payload = getattr(action, "payload", None)
    path += ".payload"
    if not _VERSION.match(version):
        said.unknown = True
        return
    if kind == "agent_hint":
        said.read_ids(payload)
        hint = parse_agent_hint(payload, path)
    elif kind == "kv.retain":
        hint = _retain(payload, path)
    elif kind in _EDITS:
        hint = AgentHint(edits=(parse_edit(_EDITS[kind], payload, path),))
    else:
        said.unknown = True
        return
    said.hint = hint if said.hint is None else _merged(said.hint, hint, path)


def _retain(payload: object, path: str) -> AgentHint:
    """``cache_control``'s own fields, with ``state`` and ``expected_resume_s`` beside them."""
    if not isinstance(payload, Mapping):
        raise HintError(path, ": an object is needed")
    beside = ("state", "expected_resume_s")
    return AgentHint(
        cache_control=parse_cache_control(
            {key: value for key, value in payload.items() if key not in beside}, path
        ),
        expected_resume_s=parse_optional(parse_expected_resume, payload, "expected_resume_s", path),
        state=parse_optional(parse_state, payload, "state", path),
    )


def _merged(first: AgentHint, later: AgentHint, path: str) -> AgentHint:
    """Both hints: the later one wins where both speak, and its edits follow."""
    edits = first.edits + later.edits
    if len(edits) > MAX_EDITS:
        raise HintError(path, f": more than {MAX_EDITS} edits with the actions before it")
    return AgentHint(
        session_id=_later(later.session_id, first.session_id),
        parent_session_id=_later(later.parent_session_id, first.parent_session_id),
        cache_control=_later(later.cache_control, first.cache_control),
        manage_request=later.manage_request or first.manage_request,
        edits=edits,
        expected_resume_s=_later(later.expected_resume_s, first.expected_resume_s),
        state=_later(later.state, first.state),
    )


def _later(later: _Value | None, first: _Value | None) -> _Value | None:
    return first if later is None else later
