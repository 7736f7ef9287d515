"""What can be asked of a server: each function builds one request and says how to read its
answer. Pure; the clients only carry calls back and forth.
"""

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from spm.agent_hint import HintError, parse_session_id
from spm.client.errors import InvalidArgumentError
from spm.client.fields import Fields
from spm.client.operation_results import (
    EditsResult,
    EndResult,
    Operation,
    parse_edits,
    parse_end,
    parse_operation,
)
from spm.client.session_results import Session, SessionPage, parse_page, parse_session
from spm.client.status_results import ServerStatus, parse_status

DEFAULT_PAGE = 100
_OPERATION_HEADER = "X-Operation-Id"
_OPERATION = re.compile(r"[A-Za-z0-9_.-]{1,64}")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request below the server's address, and ``parse`` for the JSON object it answers.

    ``body`` is JSON.
    """

    method: str
    path: str
    parse: Callable[[Fields], T]
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None


@dataclass(frozen=True, slots=True)
class SessionEdit:
    """``offload``, ``prefetch`` or ``evict`` a session, or its blocks [block_start, block_end).

    ``target`` is for a prefetch: ``gpu`` (also None) or ``host``.
    """

    type: str
    block_start: int | None = None
    block_end: int | None = None
    target: str | None = None

    def to_wire(self) -> dict[str, Any]:
        """As the server reads it."""
        wire = {
            "type": self.type,
            "block_start": self.block_start,
            "block_end": self.block_end,
            "target": self.target,
        }
        return {key: value for key, value in wire.items() if value is not None}


def status() -> Call[ServerStatus]:
    """Engines, tiers, queues."""
    return Call("GET", "/v1/spm/status", parse_status)


def sessions(limit: int = DEFAULT_PAGE, after: str | None = None) -> Call[SessionPage]:
    """Up to ``limit`` sessions whose id is above ``after``."""
    params = {"limit": str(limit)} | ({} if after is None else {"after": after})
    return Call("GET", "/v1/sessions", lambda answer: parse_page(answer, after), params)


def get_session(session_id: str) -> Call[Session]:
    """One session and where its blocks are."""
    return Call("GET", _session_path(session_id), parse_session)


def edit(
    session_id: str,
    edits: Sequence[SessionEdit] = (),
    *,
    ttl_s: float | None = None,
    state: str | None = None,
    expected_resume_s: float | None = None,
    operation_id: str | None = None,
) -> Call[EditsResult]:
    """Edits and retention; at least one of them."""
    body: dict[str, Any] = retention(ttl_s, state, expected_resume_s)
    if edits:
        body["edits"] = [one.to_wire() for one in edits]
    if not body:
        raise InvalidArgumentError("nothing to do: give edits, ttl_s, state or expected_resume_s")
    path = f"{_session_path(session_id)}/edits"
    headers = {**_operation_headers(operation_id), "Content-Type": "application/json"}
    return Call("POST", path, parse_edits, headers=headers, body=_json(body))


def prefetch(
    session_id: str,
    block_start: int | None = None,
    block_end: int | None = None,
    target: str = "gpu",
) -> Call[EditsResult]:
    """Load what is missing of a session, or of a range of its blocks."""
    return edit(session_id, [SessionEdit("prefetch", block_start, block_end, target)])


def offload(
    session_id: str, block_start: int | None = None, block_end: int | None = None
) -> Call[EditsResult]:
    """Store, then release."""
    return edit(session_id, [SessionEdit("offload", block_start, block_end)])


def evict(
    session_id: str, block_start: int | None = None, block_end: int | None = None
) -> Call[EditsResult]:
    """Give up."""
    return edit(session_id, [SessionEdit("evict", block_start, block_end)])


def end_session(
    session_id: str, tree: bool = False, operation_id: str | None = None
) -> Call[EndResult]:
    """End a session; with ``tree`` its descendants too."""
    params = {"tree": "true"} if tree else {}
    headers = _operation_headers(operation_id)
    return Call("DELETE", _session_path(session_id), parse_end, params, headers)


def operation(operation_id: str) -> Call[Operation]:
    """What has become of an operation."""
    return Call("GET", f"/v1/operations/{_segment(operation_id)}", parse_operation)


def retention(
    ttl_s: float | None, state: str | None, expected_resume_s: float | None
) -> dict[str, Any]:
    """The fields of a hint that say how to keep a session; what is None is left out."""
    said: dict[str, Any] = {}
    if ttl_s is not None:
        said["cache_control"] = {"type": "ephemeral", "ttl": ttl_s}
    if state is not None:
        said["state"] = state
    if expected_resume_s is not None:
        said["expected_resume_s"] = expected_resume_s
    return said


def _session_path(session_id: str) -> str:
    try:
        return f"/v1/sessions/{_segment(parse_session_id(session_id))}"
    except HintError as error:
        raise InvalidArgumentError(str(error)) from error


def _segment(text: str) -> str:
    # A dot too, because "." and ".." are taken out of paths.
    return quote(text, safe="").replace(".", "%2E")


def _operation_headers(operation_id: str | None) -> dict[str, str]:
    given = uuid.uuid4().hex if operation_id is None else operation_id
    if not _OPERATION.fullmatch(given):
        raise InvalidArgumentError(
            "operation_id: 1 to 64 letters, digits, '_', '.' or '-' are needed"
        )
    return {_OPERATION_HEADER: given}


def _json(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"this cannot be said in JSON: {error}") from error
