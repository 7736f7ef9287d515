"""Connections to a Redis server, lent to one thread at a time under a deadline."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from redis import Connection
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, RedisClusterException, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from connectors.stores.base import StoreKey
from connectors.stores.redis_parser import SinkParser, parser_of
from spm.errors import ConfigError, StoreTimeoutError, StoreUnavailableError
from spm.redis_url import redacted_url
from spm.secret import SecretSource

_READ_AHEAD_BYTES = 16 * 1024


class RedisConnection(Protocol):
    """What we use of redis-py's connection classes."""

    socket_timeout: float | None
    socket_connect_timeout: float | None

    def connect(self) -> None: ...
    def disconnect(self) -> None: ...


class _Credentials(CredentialProvider):
    """The password as it is when a connection is made: replacing it needs no restart."""

    def __init__(self, username: str | None, password: SecretSource) -> None:
        self._username = username
        self._password = password

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = self._password.read().decode("utf-8", "surrogateescape")
        except ConfigError as error:
            raise AuthenticationError(str(error)) from error
        return (self._username, password) if self._username else (password,)


def options_of(url: str, password: SecretSource | None = None) -> dict[str, Any]:
    """Connection arguments in ``url``, as redis-py reads them, which has no password if there
    is a source of it. Raises ConfigError, also if the password cannot be read now.

    The cause is dropped on purpose: urllib quotes parts of the URL in its messages.
    """
    try:
        options = dict(parse_url(url))  # type: ignore[no-untyped-call]
    except ValueError:
        raise ConfigError(f"not a usable Redis URL: {redacted_url(url)}") from None
    if password is not None:
        password.read()
        options["credential_provider"] = _Credentials(options.pop("username", None), password)
    return options


@contextmanager
def translated_errors(place: str) -> Iterator[None]:
    """Turn redis-py's and the system's errors into ours."""
    try:
        yield
    except (RedisTimeoutError, TimeoutError) as error:
        raise StoreTimeoutError(f"{place}: {error}") from error
    except (RedisError, RedisClusterException, OSError, UnicodeError) as error:
        raise StoreUnavailableError(f"{place}: {error}") from error


class Connections:
    """Up to ``max_connections`` connections made from redis-py's connection arguments.

    Connects on first use and again after any failure. Any thread; a forked child starts
    with none of its parent's connections.
    """

    def __init__(
        self,
        options: dict[str, Any],
        *,
        place: str,
        connect_timeout_s: float,
        max_connections: int,
    ) -> None:
        """``place`` names the server in errors. Raises ConfigError for unknown options."""
        own = {"parser_class": SinkParser, "socket_read_size": _READ_AHEAD_BYTES, "protocol": 2}
        self._options = {**options, **own, "retry": Retry(NoBackoff(), 0)}
        self._class = self._options.pop("connection_class", Connection)
        self._place = place
        self._connect_timeout_s = connect_timeout_s
        self._slots = threading.BoundedSemaphore(max_connections)
        self._lock = threading.Lock()
        self._idle: list[RedisConnection] = []
        self._pid = os.getpid()
        self._closed = False
        try:
            self._idle.append(self._make())
        except (TypeError, ValueError, RedisError):
            raise ConfigError(f"unknown or wrong option in the URL of {place}") from None

    @contextmanager
    def lend(self, deadline_s: float) -> Iterator[SinkParser]:
        """A connected parser with its deadline set. Whatever is raised inside closes the
        connection, and redis-py's and the system's errors come out as ``StoreError``.

        Waits for a free connection, and for the connection to be made, at most until the
        deadline (``time.monotonic()``); resolving a host name is up to the system.
        """
        if not self._slots.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise StoreTimeoutError(f"{self._place}: every connection is busy")
        try:
            connection = self._take()
            try:
                with translated_errors(self._place):
                    yield self._ready(connection, deadline_s)
            except BaseException:
                connection.disconnect()
                raise
            finally:
                self._give_back(connection)
        finally:
            self._slots.release()

    def close(self) -> None:
        """Disconnect; connections still lent are closed when they come back. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()

    def _make(self) -> RedisConnection:
        connection: RedisConnection = self._class(**self._options)
        return connection

    def _take(self) -> RedisConnection:
        with self._lock:
            if self._closed:
                raise StoreUnavailableError(f"{self._place}: the store is closed")
            if self._pid != os.getpid():
                self._pid = os.getpid()
                self._idle.clear()
            return self._idle.pop() if self._idle else self._make()

    def _give_back(self, connection: RedisConnection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.disconnect()

    def _ready(self, connection: RedisConnection, deadline_s: float) -> SinkParser:
        parser = parser_of(connection)
        if parser.connected and _is_stale(parser):
            connection.disconnect()
        if not parser.connected:
            wait_s = min(self._connect_timeout_s, deadline_s - time.monotonic())
            if wait_s <= 0:
                raise StoreTimeoutError(f"{self._place}: no time left to connect")
            connection.socket_connect_timeout = wait_s
            connection.socket_timeout = wait_s
            parser.deadline_s = time.monotonic() + wait_s
            connection.connect()
        parser.deadline_s = deadline_s
        return parser


Route = tuple[Connections, Sequence[int]]
"""A server and the positions of the keys it holds."""


class Servers(Protocol):
    """Which server holds which key."""

    def route(self, keys: Sequence[StoreKey], deadline_s: float) -> list[Route]: ...

    def everyone(self, deadline_s: float) -> list[Connections]:
        """The servers that together hold all keys."""

    def suspect(self) -> None:
        """A server failed or redirected: the routes may have changed."""

    def close(self) -> None: ...


class SingleServer:
    """All keys on one server."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def route(self, keys: Sequence[StoreKey], deadline_s: float) -> list[Route]:
        return [(self._connections, range(len(keys)))]

    def everyone(self, deadline_s: float) -> list[Connections]:
        return [self._connections]

    def suspect(self) -> None:
        """Nothing to look up again."""

    def close(self) -> None:
        self._connections.close()


def _is_stale(parser: SinkParser) -> bool:
    """Whether an idle connection was closed by the server or holds unexpected bytes."""
    try:
        return parser.can_read()
    except (RedisError, OSError):
        return True
