"""The body of ``POST /v1/sessions/{id}/edits`` as a validated hint."""

import json
from dataclasses import dataclass
from typing import Any

from spm.agent_hint import HintError, parse_agent_hint
from spm.config import SamConfig
from spm.http.errors import RequestError
from spm.http.ids import checked_operation_id, checked_session_id
from spm.http.rewriting import refuse_ranges

_ROOT = "body"
_EDITS = "edits"
_OPERATION = "operation_id"
_HINT_KEYS = ("parent_session_id", "cache_control", "state", "expected_resume_s")
_KEYS = (_EDITS, *_HINT_KEYS, _OPERATION)


@dataclass(frozen=True, slots=True)
class EditRequest:
    """``operation_id`` is None when the body has none."""

    hint: dict[str, Any]
    operation_id: str | None


def parse_edit_request(session_id: str, body: bytes, sam: SamConfig) -> EditRequest:
    """Raises :class:`RequestError` 400 naming the field of the body that is at fault."""
    fields = _fields(body)
    hint: dict[str, Any] = {"session_id": checked_session_id(session_id, "session_id")}
    hint |= {key: fields[key] for key in _HINT_KEYS if key in fields}
    if _EDITS in fields:
        hint["context_management"] = {_EDITS: fields[_EDITS]}
    try:
        parse_agent_hint(hint, _ROOT)
        if not sam.ranges:
            refuse_ranges(hint, _ROOT)
    except HintError as error:
        raise _named_as_in_the_body(error.field, str(error)) from error
    except RequestError as error:
        raise _named_as_in_the_body(str(error.param), error.message) from error
    given = fields.get(_OPERATION)
    return EditRequest(hint, None if given is None else checked_operation_id(given, _OPERATION))


def _fields(body: bytes) -> dict[str, Any]:
    """The body's fields, nulls left out as everywhere in a hint."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _bad("the body is not valid JSON") from error
    if not isinstance(document, dict):
        raise _bad("the body has to be a JSON object")
    unknown = next((key for key in document if key not in _KEYS), None)
    if unknown is not None:
        shown = unknown[:64].encode("ascii", "backslashreplace").decode()
        raise _bad(f"{shown}: unknown key; known: {sorted(_KEYS)}", shown)
    fields = {key: value for key, value in document.items() if value is not None}
    if fields.keys() <= {_OPERATION}:
        raise _bad(f"nothing to do: give one of {sorted((_EDITS, *_HINT_KEYS))}")
    return fields


def _named_as_in_the_body(field: str, message: str) -> RequestError:
    """A hint keeps its edits one level deeper than this body does."""
    name = field.removeprefix(f"{_ROOT}.").removeprefix("context_management.")
    return _bad(name + message.removeprefix(field), name)


def _bad(message: str, param: str | None = None) -> RequestError:
    return RequestError(400, message, param=param, status="failed")
