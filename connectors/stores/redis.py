"""Redis (or anything that speaks its protocol) as the remote tier."""

import logging
from collections.abc import Iterator, Sequence

from redis.exceptions import AskError, NoPermissionError, ResponseError, TryAgainError

from connectors.stores.base import ReadRequest, StoreKey
from connectors.stores.buffers import Buffer, BufferPool
from connectors.stores.redis_connections import (
    Connections,
    Servers,
    SingleServer,
    options_of,
)
from connectors.stores.redis_keys import RedisKeys, bulk, command
from connectors.stores.redis_parser import SinkParser
from spm.redis_url import redacted_url
from spm.secret import SecretSource

logger = logging.getLogger(__name__)

_NO_REFUSALS = (AskError, TryAgainError, NoPermissionError)
"""Redirections (MovedError is an AskError), and what is logged elsewhere."""
_DEFAULT_CONNECTIONS = 8
_READ_WINDOW_BYTES = 16 * 1024 * 1024
_GET = command(b"GET", 1)


class RedisStore(RedisKeys):
    """Values under their keys, one pipelined round trip a batch and server.

    A server's error reply to one key (out of memory, moved, wrong type, not permitted) is a
    miss or False for that key. A server that cannot be used at all (down, loading, wrong
    password) raises ``StoreUnavailableError``, one that is read-only ``StoreRefusedError`` for
    what it refuses. Any thread; at most ``max_connections`` calls a server run at once, others
    wait within their deadline.
    """

    def __init__(
        self,
        url: str,
        pool: BufferPool,
        *,
        connect_timeout_s: float = 1.0,
        ttl_s: int | None = None,
        password: SecretSource | None = None,
        max_connections: int = _DEFAULT_CONNECTIONS,
    ) -> None:
        """Does not connect. ``url``: ``redis://``, ``rediss://``, ``unix://`` as redis-py
        takes them, or ``redis+cluster://``, ``rediss+cluster://`` naming one node.
        ``ttl_s``: seconds a value lives after it was written or touched; None or 0: for
        ever. ``password``: where it is, if not in the URL. Raises ConfigError."""
        servers = _servers_of(url, password, connect_timeout_s, max_connections)
        super().__init__(servers, redacted_url(url), ttl_s)
        self._pool = pool
        self._life = bulk(b"EX") + bulk(b"%d" % ttl_s) if ttl_s else b""
        self._refusing_writes = False

    def __repr__(self) -> str:
        return f"RedisStore({self._place})"

    def get_many(self, reads: Sequence[ReadRequest], deadline_s: float) -> list[Buffer | None]:
        found: list[Buffer | None] = [None] * len(reads)

        def work(parser: SinkParser, positions: Sequence[int]) -> None:
            self._read_values(parser, reads, positions, found)

        failure = self._visit([read.key for read in reads], deadline_s, work)
        if failure is not None and not any(found):
            raise failure
        return found

    def put_many(self, items: Sequence[tuple[StoreKey, Buffer]], deadline_s: float) -> list[bool]:
        stored = [False] * len(items)

        def work(parser: SinkParser, positions: Sequence[int]) -> None:
            parser.send(self._encoded_writes([items[at] for at in positions]))
            refusal: ResponseError | None = None
            for at in positions:
                reply = self._checked(parser.read())
                stored[at] = reply == b"OK"
                if isinstance(reply, ResponseError) and not isinstance(reply, _NO_REFUSALS):
                    refusal = reply
            self._note_refusal(refusal)

        failure = self._visit([key for key, _ in items], deadline_s, work)
        if failure is not None and not any(stored):
            raise failure
        return stored

    def _read_values(
        self,
        parser: SinkParser,
        reads: Sequence[ReadRequest],
        positions: Sequence[int],
        found: list[Buffer | None],
    ) -> None:
        """Read a stream of values, asking for more while earlier ones arrive.

        What is asked for and not yet read stays within a window, because the server
        copies every reply it owes into its own memory before it sends the first one.
        """
        asked = ahead_bytes = 0
        for done, at in enumerate(positions):
            requests = b""
            if ahead_bytes <= _READ_WINDOW_BYTES // 2:
                while asked < len(positions) and (
                    asked == done or ahead_bytes < _READ_WINDOW_BYTES
                ):
                    read = reads[positions[asked]]
                    requests += _GET + bulk(read.key.encode())
                    ahead_bytes += read.size_bytes
                    asked += 1
            parser.send([requests])
            found[at] = self._read_value(parser, reads[at].size_bytes)
            ahead_bytes -= reads[at].size_bytes

    def _read_value(self, parser: SinkParser, size_bytes: int) -> Buffer | None:
        buffer: Buffer | None = None

        def sink(length: int) -> memoryview | None:
            nonlocal buffer
            if length == size_bytes:
                buffer = self._pool.acquire(size_bytes)
            return buffer.view if buffer is not None else None

        try:
            self._checked(parser.read(sink))
        except BaseException:
            if buffer is not None:
                buffer.release()
            raise
        return buffer

    def _encoded_writes(
        self, items: Sequence[tuple[StoreKey, Buffer]]
    ) -> Iterator[bytes | memoryview]:
        """SET commands; values are passed on as they are, only the words around them joined."""
        head = command(b"SET", 4 if self._life else 2)
        tail = b"\r\n" + self._life
        pending = b""
        for key, buffer in items:
            yield b"%b%b%b$%d\r\n" % (pending, head, bulk(key.encode()), buffer.size_bytes)
            yield buffer.view
            pending = tail
        yield pending

    def _note_refusal(self, refusal: ResponseError | None) -> None:
        """One log line when the server begins to refuse writes, none while it goes on."""
        if refusal is not None and not self._refusing_writes:
            logger.warning("%s refuses writes: %s", self._place, refusal)
        self._refusing_writes = refusal is not None


def _servers_of(
    url: str, password: SecretSource | None, connect_timeout_s: float, max_connections: int
) -> Servers:
    scheme, separator, rest = url.partition("+cluster://")
    if separator:
        from connectors.stores.redis_cluster import ClusterServers

        return ClusterServers(
            f"{scheme}://{rest}",
            password=password,
            connect_timeout_s=connect_timeout_s,
            max_connections=max_connections,
        )
    return SingleServer(
        Connections(
            options_of(url, password),
            place=redacted_url(url),
            connect_timeout_s=connect_timeout_s,
            max_connections=max_connections,
        )
    )
