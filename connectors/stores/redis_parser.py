"""RESP2 over a socket with a deadline, bulk replies landing straight in their buffers.

redis-py's own parsers build a ``bytes`` object per value out of 64 KiB pieces. This one
receives a value where it belongs. It plugs into redis-py as ``parser_class`` (with
``protocol=2``), so connecting, TLS, AUTH and SELECT stay redis-py's business. All use of
redis-py's private names is in this file.
"""

import re
import ssl
import time
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from redis._parsers import BaseParser
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, ResponseError

from spm.errors import StoreTimeoutError

Sink = Callable[[int], "memoryview | None"]
"""Given a bulk reply's length: where to write it, or ``None`` to skip over it."""

_LONGEST_WAIT_S = 3600.0
_LARGEST_PLAIN_REPLY = 16 * 1024 * 1024
_ELEMENT_BYTES = 256
"""Charged to a plain reply for each element of an array, more than Python needs for one."""
_DEEPEST_ARRAY = 8
_LONGEST_ERROR = 512
_NUMBER = re.compile(rb"-?\d{1,19}")


class Bulk(Enum):
    """What became of a bulk reply that a sink was asked about."""

    LANDED = "landed"
    SKIPPED = "skipped"


class SinkParser(BaseParser):
    """Reads and writes one connection's socket; used by one thread at a time.

    ``deadline_s`` (a ``time.monotonic()`` instant) bounds every read and write:
    past it they raise :class:`StoreTimeoutError`. While it is ``None`` the connection's
    own ``socket_timeout`` holds. After any exception the stream may be in the middle of
    a reply, so whoever catches one disconnects.
    """

    def __init__(self, socket_read_size: int) -> None:
        self.deadline_s: float | None = None
        self._sock: Any = None
        self._encoder: Any = None
        self._socket_timeout_s: float | None = None
        self._window = bytearray(socket_read_size)
        self._view = memoryview(self._window)
        self._start = self._end = 0
        self._left_bytes = 0
        """What the reply being read may still have where no sink takes it."""

    @property
    def connected(self) -> bool:
        return self._sock is not None

    def on_connect(self, connection: Any) -> None:  # noqa: ANN401
        """Called by redis-py with a fresh socket."""
        self._sock = connection._sock
        self._encoder = connection.encoder
        self._socket_timeout_s = connection.socket_timeout
        self._start = self._end = 0

    def on_disconnect(self) -> None:
        """Called by redis-py; what was read ahead is void."""
        self._sock = None
        self._start = self._end = 0

    def can_read(self, timeout: float = 0) -> bool:
        """Whether bytes are waiting, within ``timeout`` seconds. Raises if the peer left."""
        if self._start < self._end:
            return True
        sock = self._open_socket()
        sock.settimeout(timeout)
        try:
            received = sock.recv_into(self._view)
        except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
            return False
        finally:
            sock.settimeout(self._socket_timeout_s)
        self._start, self._end = 0, self._checked(received)
        return True

    def read_response(self, disable_decoding: bool = False, **_unused: object) -> Any:  # noqa: ANN401
        """redis-py's entry for ordinary commands; its pub/sub arguments are not served."""
        reply = self.read()
        return reply if disable_decoding else self._decode(reply)

    def send(self, chunks: Iterable["bytes | memoryview"]) -> None:
        """Write every chunk without copying it."""
        sock = self._open_socket()
        for chunk in chunks:
            rest = memoryview(chunk)
            while rest:
                sock.settimeout(self._timeout_s())
                try:
                    rest = rest[sock.send(rest) :]
                except TimeoutError as error:
                    raise self._late(error) from error

    def read(self, sink: Sink | None = None) -> Any:  # noqa: ANN401
        """One reply: None, int, str status, bytes, list, or an error object (not raised).

        With ``sink`` the reply must be a bulk or an error, and a bulk yields :class:`Bulk`.
        Raises redis-py's ``ConnectionError`` family for errors that end the connection.
        """
        self._left_bytes = _LARGEST_PLAIN_REPLY
        return self._read_reply(sink, depth=0)

    def _read_reply(self, sink: Sink | None, depth: int) -> Any:  # noqa: ANN401
        line = self._read_line()
        self._charge(len(line) + _ELEMENT_BYTES)
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            return self._error(rest)
        if kind == b"$":
            length = _integer(rest)
            return None if length == -1 else self._read_bulk(length, sink)
        if sink is not None:
            raise InvalidResponse(f"Expected a value, got a reply of type {kind!r}")
        if kind == b"+":
            return rest
        if kind == b":":
            return _integer(rest)
        if kind == b"*" and depth < _DEEPEST_ARRAY:
            count = _integer(rest)
            return None if count < 0 else [self._read_reply(None, depth + 1) for _ in range(count)]
        raise InvalidResponse(f"Protocol error: reply of type {kind!r}")

    def _charge(self, size_bytes: int) -> None:
        """However a reply is nested, it cannot make us hold more than the largest one."""
        self._left_bytes -= size_bytes
        if self._left_bytes < 0:
            raise InvalidResponse(f"Reply of more than {_LARGEST_PLAIN_REPLY} bytes")

    def _error(self, text: bytes) -> ResponseError:
        message = text[:_LONGEST_ERROR].decode("utf-8", errors="replace")
        try:
            error: Exception = self.parse_error(message)  # type: ignore[no-untyped-call]
        except (ValueError, LookupError):  # a redirection to nowhere
            raise InvalidResponse(f"Protocol error: {message!r}") from None
        if isinstance(error, ResponseError):
            return error
        raise error

    def _read_bulk(self, length: int, sink: Sink | None) -> "bytes | Bulk":
        if length < 0:
            raise InvalidResponse(f"Protocol error: bulk of length {length}")
        if sink is None:
            self._charge(length)
            data = bytearray(length)
            self._fill(memoryview(data))
            self._read_terminator()
            return bytes(data)
        target = sink(length)
        if target is None:
            self._skip(length)
        else:
            self._fill(target)
        self._read_terminator()
        return Bulk.SKIPPED if target is None else Bulk.LANDED

    def _fill(self, target: memoryview) -> None:
        ahead = min(self._end - self._start, len(target))
        target[:ahead] = self._view[self._start : self._start + ahead]
        self._start += ahead
        while ahead < len(target):
            ahead += self._receive(target[ahead:])

    def _skip(self, length: int) -> None:
        while length > self._end - self._start:
            length -= self._end - self._start
            self._start, self._end = 0, self._receive(self._view)
        self._start += length

    def _read_terminator(self) -> None:
        if self._read_line():
            raise InvalidResponse("Protocol error: bulk reply longer than announced")

    def _read_line(self) -> bytes:
        while (at := self._window.find(b"\r\n", self._start, self._end)) < 0:
            self._read_ahead()
        line = bytes(self._view[self._start : at])
        self._start = at + 2
        return line

    def _read_ahead(self) -> None:
        """Add bytes behind an unfinished line."""
        kept = self._end - self._start
        if kept == len(self._window):
            raise InvalidResponse("Protocol error: endless line")
        self._view[:kept] = bytes(self._view[self._start : self._end])
        self._start, self._end = 0, kept
        self._end += self._receive(self._view[kept:])

    def _receive(self, target: memoryview) -> int:
        sock = self._open_socket()
        sock.settimeout(self._timeout_s())
        try:
            return self._checked(sock.recv_into(target))
        except TimeoutError as error:
            raise self._late(error) from error

    def _checked(self, received: int) -> int:
        if not received:
            raise RedisConnectionError("Connection closed by server")
        return received

    def _open_socket(self) -> Any:  # noqa: ANN401
        if self._sock is None:
            raise RedisConnectionError("Not connected")
        return self._sock

    def _timeout_s(self) -> float | None:
        if self.deadline_s is None:
            return self._socket_timeout_s
        remaining_s = self.deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise StoreTimeoutError("the deadline passed before the server had answered")
        return min(remaining_s, _LONGEST_WAIT_S)

    def _late(self, error: TimeoutError) -> Exception:
        """What a socket timeout means: redis-py's affair unless a deadline is set."""
        if self.deadline_s is None:
            return TimeoutError(*error.args)
        return StoreTimeoutError("the deadline passed before the server had answered")

    def _decode(self, reply: Any) -> Any:  # noqa: ANN401
        if isinstance(reply, list):
            return [self._decode(item) for item in reply]
        return self._encoder.decode(reply) if isinstance(reply, bytes) else reply


def parser_of(connection: Any) -> SinkParser:  # noqa: ANN401
    """The parser of a connection made with ``parser_class=SinkParser``."""
    parser = connection._parser
    assert isinstance(parser, SinkParser)
    return parser


def _integer(text: bytes) -> int:
    if not _NUMBER.fullmatch(text):
        raise InvalidResponse(f"Protocol error: {text[:32]!r} is not a number")
    return int(text)
