"""Ids that come with a request: of operations, and of sessions."""

import re
import uuid

from starlette.datastructures import Headers

from spm.agent_hint import HintError, parse_session_id
from spm.http.errors import RequestError

OPERATION_HEADER = "X-Operation-Id"
_OPERATION = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def operation_id(headers: Headers) -> str:
    """The client's id for what it asks, so that a repeat has no second effect, or a new one."""
    given = headers.get(OPERATION_HEADER)
    return uuid.uuid4().hex if given is None else checked_operation_id(given, OPERATION_HEADER)


def checked_operation_id(given: object, param: str) -> str:
    """``given`` if it is an operation id, else :class:`RequestError` 400."""
    if not isinstance(given, str) or not _OPERATION.fullmatch(given):
        raise RequestError(
            400,
            f"{param}: 1 to 64 letters, digits, '_', '.' or '-' are needed",
            param=param,
            status="failed",
        )
    return given


def checked_session_id(given: object, param: str) -> str:
    """``given`` if it is a session id, else :class:`RequestError` 400."""
    try:
        return parse_session_id(given, param)
    except HintError as error:
        raise RequestError(400, str(error), param=error.field, status="failed") from error
