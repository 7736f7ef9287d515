"""What can go wrong between a client and its server, split by what the caller does next.

No message contains an API key or a header's value. Messages of a server may quote what it was
sent, session ids included.
"""

from collections.abc import Mapping
from typing import Any

from spm.errors import SpmError


class SpmClientError(SpmError):
    """Base of everything the clients raise on purpose.

    ``may_retry``: the same call may work later; repeating it with the same operation id is
    harmless.
    """

    may_retry = False


class InvalidArgumentError(SpmClientError, ValueError):
    """An argument cannot be sent; nothing was."""


class ClientClosedError(SpmClientError):
    """The client was used after it was closed; nothing was sent."""


class ServerUnreachableError(SpmClientError):
    """No connection, or it broke: the server may or may not have done what it was asked."""

    may_retry = True


class ServerTimeoutError(ServerUnreachableError):
    """No answer in time: the server may still do what it was asked."""


class ProtocolError(SpmClientError):
    """An answer that is not understood: is it this package's server, of this version?"""


class WaitTimeoutError(SpmClientError):
    """An operation was not done in time; it goes on."""

    may_retry = True


class HttpStatusError(SpmClientError):
    """The server refused. ``code`` is HTTP's, ``body`` its JSON object (empty if it has none).

    ``status`` is the outcome in the management routes' own words, ``param`` the field at fault.
    """

    def __init__(
        self,
        code: int,
        message: str,
        *,
        status: str | None = None,
        param: str | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status
        self.param = param
        self.body = dict(body or {})


class InvalidRequestError(HttpStatusError):
    """400, 413, 415: the request is wrong; ``param`` says where."""


class AuthenticationError(HttpStatusError):
    """401, 403: no API key, or a wrong one."""


class NotFoundError(HttpStatusError):
    """404: no such session or operation of this tenant."""


class RejectedError(HttpStatusError):
    """429: over a bound of the server; nothing was done.

    ``retry_after_s``: when the server says to try again; None: it does not say.
    """

    may_retry = True
    retry_after_s: float | None = None


class UnsupportedError(HttpStatusError):
    """501, or a server without the session routes: it will not work later either."""


class UnavailableError(HttpStatusError):
    """5xx: the engine is down, failed or did not answer in time."""

    may_retry = True
