"""Redis URLs in settings: they may hold a password, so they are never quoted whole."""

import re
from urllib.parse import parse_qs

from spm.config_parsing import shown
from spm.errors import ConfigError

_SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster")
_PLACE = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]*)(:\d+)?(/[^#]*)?")


def redacted_url(url: str) -> str:
    """Scheme, host and path of any text that should be a URL."""
    scheme, _, rest = url.partition("://")
    user, _, place = rest.rpartition("@")
    place = place.partition("?")[0]
    if scheme not in _SCHEMES or "?" in user or not _PLACE.fullmatch(place):
        return "(unreadable URL)"
    return f"{scheme}://{place}"


def check_redis_url(name: str, url: str) -> None:
    """The scheme decides the client. Raises :class:`ConfigError`."""
    scheme, separator, _ = url.partition("://")
    if scheme not in _SCHEMES or not separator:
        quoted = shown(scheme, text=True) if separator else "''"
        raise ConfigError(f"{name} has scheme {quoted}: one of {list(_SCHEMES)}")


def holds_password(url: str) -> bool:
    """Whether a password is in any place where one may be: ``user:password@`` or the query."""
    rest = url.partition("://")[2]
    return ":" in rest.rpartition("@")[0] or "password" in parse_qs(rest.partition("?")[2], True)
