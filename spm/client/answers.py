"""HTTP answers as JSON objects or as errors, and the HTTP library's errors as ours. No I/O."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import httpx

from spm.client.errors import (
    AuthenticationError,
    HttpStatusError,
    InvalidRequestError,
    NotFoundError,
    ProtocolError,
    RejectedError,
    ServerTimeoutError,
    ServerUnreachableError,
    UnavailableError,
    UnsupportedError,
)
from spm.client.fields import Fields

LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=3.0)
"""vLLM closes a connection that was idle for 5 s: ours is given up before, so that no request
meets the closing.
"""
MAX_MESSAGE_CHARS = 500
_NO_ROUTES = "no session routes there: is the URL right, and does vLLM run with VLLM_PLUGINS=spm?"
_KINDS: dict[int, type[HttpStatusError]] = {
    400: InvalidRequestError,
    401: AuthenticationError,
    403: AuthenticationError,
    404: NotFoundError,
    413: InvalidRequestError,
    415: InvalidRequestError,
    429: RejectedError,
    501: UnsupportedError,
}


@contextmanager
def translated(shown_url: str) -> Iterator[None]:
    """Around the sending of one request: raises this package's errors instead of httpx's."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise ServerTimeoutError(f"no answer from {shown_url} in time") from error
    except httpx.TransportError as error:
        reason = str(error) or type(error).__name__
        raise ServerUnreachableError(f"cannot reach {shown_url}: {reason}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ProtocolError(f"the answer of {shown_url} cannot be read: {error}") from error


def read_answer(response: httpx.Response) -> Fields:
    """The JSON object of a success; raises :class:`HttpStatusError` or :class:`ProtocolError`."""
    if not response.is_success:
        raise _refusal(response)
    try:
        document = json.loads(response.content)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("the answer is not JSON: is this vLLM's address?") from error
    return Fields(document, "answer")


def _refusal(response: httpx.Response) -> HttpStatusError:
    body = _object(response)
    said = body.get("error")
    error: Mapping[str, Any] = said if isinstance(said, Mapping) else {"message": said}
    status, param = _text(error.get("status")), _text(error.get("param"))
    code = response.status_code
    message = _text(error.get("message")) or f"the server answered HTTP {code} {_phrase(code)}"
    if code == HTTPStatus.NOT_FOUND and status is None:
        # Not said by our routes, which always give a status: the path itself is unknown.
        return UnsupportedError(code, _NO_ROUTES, body=body)
    kind = _KINDS.get(code, UnavailableError if code >= 500 else HttpStatusError)
    refusal = kind(code, message[:MAX_MESSAGE_CHARS], status=status, param=param, body=body)
    if isinstance(refusal, RejectedError):
        refusal.retry_after_s = _retry_after_s(response.headers)
    return refusal


def _object(response: httpx.Response) -> Mapping[str, Any]:
    try:
        document = json.loads(response.content)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, Mapping) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _phrase(code: int) -> str:
    return HTTPStatus(code).phrase if code in HTTPStatus._value2member_map_ else ""


def _retry_after_s(headers: httpx.Headers) -> float | None:
    """Seconds only: the form with a date needs clocks that agree."""
    given = headers.get("retry-after", "")
    return float(given) if given.isascii() and given.isdigit() and len(given) <= 6 else None
