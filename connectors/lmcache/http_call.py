"""One HTTP request with an exact deadline and a bound on the answer's size."""

import contextlib
import io
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any, cast
from urllib.parse import urlsplit

from spm.errors import StoreError, StoreTimeoutError, StoreUnavailableError

_RECEIVE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said, whatever it was."""

    status: int
    body: bytes


class HttpCaller:
    """Requests to one server, each over a connection of its own: they are rare, and a server
    that was restarted leaves no stale connection behind. Any thread.
    """

    def __init__(
        self, url: str, max_answer_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``url``: ``http[s]://HOST[:PORT]``. Does not connect."""
        place = urlsplit(url)
        self._tls = ssl.create_default_context() if place.scheme == "https" else None
        self._host = place.hostname or ""
        self._port = place.port or (443 if self._tls else 80)
        self._max_answer_bytes = max_answer_bytes
        self._clock = clock

    @property
    def place(self) -> str:
        """For logs and errors."""
        return f"{self._host}:{self._port}"

    def call(self, method: str, path: str, body: Iterable[bytes], deadline_s: float) -> Answer:
        """``body``: pieces of JSON, sent as they come. ``deadline_s``: monotonic instant at
        which connecting, sending and receiving end. Raises ``StoreUnavailableError`` (no
        connection, or it broke), ``StoreTimeoutError``, or ``StoreError`` (no HTTP, too long).
        """
        pieces = [*body]
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self.place}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {sum(map(len, pieces))}\r\n\r\n"
        )
        try:
            with self._connected(deadline_s) as connection:
                for piece in (head.encode(), *pieces):
                    connection.settimeout(self._left_s(deadline_s))
                    connection.sendall(piece)
                received = self._receive(connection, deadline_s)
        except TimeoutError as error:
            raise StoreTimeoutError(f"{self.place} did not answer in time") from error
        except OSError as error:
            raise StoreUnavailableError(f"{self.place}: {error}") from error
        return self._parsed(method, received)

    @contextlib.contextmanager
    def _connected(self, deadline_s: float) -> Iterator[socket.socket]:
        address, left_s = (self._host, self._port), self._left_s(deadline_s)
        with socket.create_connection(address, timeout=left_s) as plain:
            if self._tls is None:
                yield plain
            else:
                plain.settimeout(self._left_s(deadline_s))
                with self._tls.wrap_socket(plain, server_hostname=self._host) as secured:
                    yield secured

    def _receive(self, connection: socket.socket, deadline_s: float) -> bytes:
        """All that is sent until the server closes, as it was asked to."""
        received = bytearray()
        while True:
            connection.settimeout(self._left_s(deadline_s))
            piece = connection.recv(_RECEIVE_BYTES)
            if not piece:
                return bytes(received)
            received += piece
            if len(received) > self._max_answer_bytes:
                raise StoreError(f"{self.place}: an answer over {self._max_answer_bytes} bytes")

    def _left_s(self, deadline_s: float) -> float:
        left_s = deadline_s - self._clock()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def _parsed(self, method: str, received: bytes) -> Answer:
        if not received:
            raise StoreUnavailableError(f"{self.place} closed the connection")
        response = HTTPResponse(cast("socket.socket", _Received(received)), method=method)
        try:
            response.begin()
            return Answer(response.status, response.read())
        except (HTTPException, ValueError) as error:
            raise StoreError(f"{self.place}: no HTTP answer ({type(error).__name__})") from error


class _Received:
    """What :class:`HTTPResponse` wants of a socket, over bytes that are all here."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: Any) -> io.BytesIO:  # noqa: ANN401
        return io.BytesIO(self._data)
