"""Where a server is and what every request to it carries."""

import re
from collections.abc import Mapping

import httpx

from spm.client.errors import InvalidArgumentError

DEFAULT_TIMEOUT_S = 15.0
"""Longest wait for a connection, and for an answer; a server gives up after 10 s."""

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[!-~]([ -~]*[!-~])?")
_API_PATH = "/v1"


class Endpoint:
    """The address without a trailing ``/v1`` (so that the `openai` client's own will do).

    ``shown_url`` is the address as messages may show it, without a user or password.
    """

    def __init__(
        self, base_url: str, api_key: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """Raises :class:`InvalidArgumentError`, which quotes no key and no header's value."""
        self.url = base_url.rstrip("/").removesuffix(_API_PATH)
        self.shown_url = _shown(self.url)
        self.headers: dict[str, str] = {}
        for name, value in (headers or {}).items():
            if not _HEADER_NAME.fullmatch(name):
                raise InvalidArgumentError(f"headers: {name!r} is no name of a header")
            self.headers[name] = _header_value(value, f"headers[{name!r}]")
        if api_key:
            self.headers["Authorization"] = f"Bearer {_header_value(api_key, 'api_key')}"


def _header_value(value: str, name: str) -> str:
    # Checked here because the HTTP library's own message would quote it.
    if not _HEADER_VALUE.fullmatch(value):
        raise InvalidArgumentError(
            f"{name}: visible ASCII characters are needed (the value is not shown)"
        )
    return value


def _shown(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InvalidArgumentError("base_url: not a URL") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidArgumentError("base_url: http://host:port or https://host:port is needed")
    if parsed.query or parsed.fragment:
        raise InvalidArgumentError("base_url: no query and no fragment can be part of it")
    return f"{parsed.scheme}://{parsed.netloc.decode('ascii')}{parsed.path.rstrip('/')}"
