"""What a Redis server is asked about keys: existence, lifetimes, documents, logs."""

import logging
from collections.abc import Callable, Iterable, Sequence

from redis.exceptions import (
    ClusterDownError,
    NoPermissionError,
    ReadOnlyError,
    ResponseError,
)

from connectors.stores.base import (
    MAX_DOCUMENT_BYTES,
    KVStore,
    StoreCapabilities,
    StoreCapacity,
    StoreKey,
)
from connectors.stores.redis_connections import Route, Servers
from connectors.stores.redis_memory import MAX_INFO_BYTES, capacity_in, total_capacity
from connectors.stores.redis_parser import Bulk, SinkParser
from spm.errors import StoreError, StoreRefusedError, StoreUnavailableError

logger = logging.getLogger(__name__)
_CAPABILITIES = StoreCapabilities(
    remote=True,
    delete=True,
    touch=True,
    exact_ttl=True,
    documents=True,
    streams=True,
    capacity=True,
)
_NO_CONDITION = "wrong number of arguments for 'expire'"
"""What a Redis before version 7 says to EXPIRE with LT."""
_MOST_DENIALS_LOGGED = 32


class RedisKeys(KVStore):
    """The half of a Redis store that moves no values. One pipelined round trip a batch and
    server; any thread.

    Presence is decided by EXISTS and TOUCH alone. TOUCH refreshes what LRU and LFU eviction
    look at, EXISTS does not. A server's error reply to one key is no answer for that key, and
    so is a command that our user is not permitted, which is logged once; a server that cannot be
    used at all raises ``StoreUnavailableError``, and one that is a replica and refuses to change
    anything ``StoreRefusedError``: the connection is made anew, as another may be the master now.
    """

    def __init__(self, servers: Servers, place: str, ttl_s: int | None) -> None:
        """Takes over ``servers``. ``place`` names them in errors."""
        self._servers = servers
        self._place = place
        self._ttl_s = ttl_s or 0
        self._denials: set[str] = set()
        self._expires_conditionally = True
        """False: a Redis before version 7, which cannot be told only to shorten a life."""

    @property
    def capabilities(self) -> StoreCapabilities:
        return _CAPABILITIES

    def contains_many(self, keys: Sequence[StoreKey], deadline_s: float) -> list[bool]:
        head = command(b"EXISTS", 1)
        replies = self._ask_each(keys, deadline_s, lambda name, _: head + name)
        return [reply == 1 for reply in replies]

    def delete_many(self, keys: Sequence[StoreKey], deadline_s: float) -> int:
        head = command(b"UNLINK", 1)
        replies = self._ask_each(keys, deadline_s, lambda name, _: head + name)
        return sum(reply == 1 for reply in replies)

    def touch_many(
        self, keys: Sequence[StoreKey], deadline_s: float, ttl_s: Sequence[int] | None = None
    ) -> list[bool | None]:
        touch, expire, persist = command(b"TOUCH", 1), command(b"EXPIRE", 2), command(b"PERSIST", 1)
        seconds = bulk(b"%d" % self._ttl_s)

        def encode(name: bytes, at: int) -> bytes:
            if not self._ttl_s:
                return b"%b%b%b%b" % (touch, name, persist, name)
            longer = ttl_s is not None and ttl_s[at] > self._ttl_s
            life = bulk(b"%d" % ttl_s[at]) if longer and ttl_s else seconds
            return b"%b%b%b%b%b" % (touch, name, expire, name, life)

        replies = self._ask_each(keys, deadline_s, encode, answers=2)
        return [reply == 1 if isinstance(reply, int) else None for reply in replies]

    def expire_many(self, keys: Sequence[StoreKey], ttl_s: int, deadline_s: float) -> int:
        conditionally = self._expires_conditionally
        exists, expire = command(b"EXISTS", 1), command(b"EXPIRE", 3 if conditionally else 2)
        life = bulk(b"%d" % ttl_s) + (bulk(b"LT") if conditionally else b"")
        replies = self._ask_each(
            keys,
            deadline_s,
            lambda name, _: b"%b%b%b%b%b" % (exists, name, expire, name, life),
            answers=2,
        )
        if conditionally and not self._expires_conditionally:  # learned from the replies
            return self.expire_many(keys, ttl_s, deadline_s)
        return sum(reply == 1 for reply in replies)

    def put_document(self, key: StoreKey, content: bytes, ttl_s: int, deadline_s: float) -> bool:
        if len(content) > MAX_DOCUMENT_BYTES:
            return False
        life = bulk(b"EX") + bulk(b"%d" % ttl_s) if ttl_s else b""
        head = command(b"SET", 4 if ttl_s else 2)
        (reply,) = self._ask_each(
            [key], deadline_s, lambda name, _: head + name + bulk(content) + life
        )
        return reply == b"OK"

    def get_document(self, key: StoreKey, max_bytes: int, deadline_s: float) -> bytes | None:
        content: object = None

        def work(parser: SinkParser, _: Sequence[int]) -> None:
            nonlocal content
            parser.send([command(b"GET", 1) + bulk(key.encode())])
            content = self._checked(_read_at_most(parser, max_bytes))

        failure = self._visit([key], deadline_s, work)
        if failure is not None:
            raise failure
        return content if isinstance(content, bytes) else None

    def append_stream(
        self, key: StoreKey, entries: Sequence[bytes], max_length: int, deadline_s: float
    ) -> int:
        words = (
            bulk(b"MAXLEN") + bulk(b"~") + bulk(b"%d" % max_length) + bulk(b"*") + bulk(b"event")
        )
        head = command(b"XADD", 7)
        replies = self._ask_each(
            [key] * len(entries),
            deadline_s,
            lambda name, at: b"%b%b%b%b" % (head, name, words, bulk(entries[at])),
        )
        return sum(isinstance(reply, bytes) for reply in replies)

    def capacity(self, deadline_s: float) -> StoreCapacity | None:
        """Memory of all servers that tell it, other users' values included. A server that does
        not let itself be asked is one that does not say."""
        said: list[StoreCapacity] = []
        answered = 0

        def work(parser: SinkParser, _: Sequence[int]) -> None:
            nonlocal answered
            parser.send([command(b"INFO", 1) + bulk(b"memory")])
            info = _read_at_most(parser, MAX_INFO_BYTES)
            answered += 1
            told = capacity_in(info) if isinstance(info, bytes) else None
            if told is not None:
                said.append(told)

        servers = self._servers.everyone(deadline_s)
        failure = self._visit_each([(server, ()) for server in servers], deadline_s, work)
        if failure is not None and not answered:
            raise failure
        return total_capacity(said)

    def close(self) -> None:
        self._servers.close()

    def check_integrity(self) -> None:
        """Connections are the only state; they are checked when lent."""

    def _visit(
        self,
        keys: Sequence[StoreKey],
        deadline_s: float,
        work: Callable[[SinkParser, Sequence[int]], None],
    ) -> StoreError | None:
        """Do ``work`` with each server that holds some of ``keys``; the last failure."""
        routes = self._servers.route(keys, deadline_s) if keys else ()
        return self._visit_each(routes, deadline_s, work)

    def _visit_each(
        self,
        routes: Iterable[Route],
        deadline_s: float,
        work: Callable[[SinkParser, Sequence[int]], None],
    ) -> StoreError | None:
        failure: StoreError | None = None
        for connections, positions in routes:
            try:
                with connections.lend(deadline_s) as parser:
                    work(parser, positions)
            except StoreError as error:
                self._servers.suspect()
                failure = error
        return failure

    def _ask_each(
        self,
        keys: Sequence[StoreKey],
        deadline_s: float,
        encode: Callable[[bytes, int], bytes],
        answers: int = 1,
    ) -> list[object]:
        """Key by key, the first of ``answers`` replies to what ``encode(name, position)``
        asks; None where nobody answered. Raises ``StoreError`` if nobody answered at all."""
        replies: list[object] = [None] * len(keys)
        answered = 0

        def work(parser: SinkParser, positions: Sequence[int]) -> None:
            nonlocal answered
            parser.send([b"".join(encode(bulk(keys[at].encode()), at) for at in positions)])
            for at in positions:
                first = self._checked(parser.read())
                for _ in range(answers - 1):
                    self._checked(parser.read())
                replies[at] = first
                answered += 1

        failure = self._visit(keys, deadline_s, work)
        if failure is not None and not answered:
            raise failure
        return replies

    def _checked(self, reply: object) -> object:
        """The reply, unless it says that this server is of no use now."""
        if isinstance(reply, NoPermissionError):
            self._note_denied(reply)
        elif isinstance(reply, ResponseError):
            self._servers.suspect()
            if isinstance(reply, ReadOnlyError):
                raise StoreRefusedError(f"{self._place}: {reply}") from reply
            if isinstance(reply, ClusterDownError):
                raise StoreUnavailableError(f"{self._place}: {reply}") from reply
            if _NO_CONDITION in str(reply):
                self._note_old()
        return reply

    def _note_denied(self, denial: NoPermissionError) -> None:
        """One log line a kind of denial: the same happens again with every key."""
        text = str(denial)
        if text not in self._denials and len(self._denials) < _MOST_DENIALS_LOGGED:
            self._denials.add(text)
            logger.warning("%s: our user's ACL lacks something: %s", self._place, text)

    def _note_old(self) -> None:
        """From now on a lease that is shorter than what is left of a life may lengthen it; it
        still ends, as it should, and a value somebody keeps alive is touched as before."""
        if self._expires_conditionally:
            self._expires_conditionally = False
            logger.warning(
                "%s: Redis 7 or newer is needed to shorten lifetimes only; deletes may take up "
                "to the whole delete_grace_s again",
                self._place,
            )


def _read_at_most(parser: SinkParser, max_bytes: int) -> object:
    """One bulk reply; None if there is no such value or it is longer, an error as it is."""
    content = bytearray()

    def place(length: int) -> memoryview | None:
        if length > max_bytes:
            return None
        content.extend(bytes(length))
        return memoryview(content)

    reply = parser.read(place)
    if reply is Bulk.LANDED:
        return bytes(content)
    return None if reply is Bulk.SKIPPED else reply


def bulk(data: bytes) -> bytes:
    """One word on the wire."""
    return b"$%d\r\n%b\r\n" % (len(data), data)


def command(name: bytes, arguments: int) -> bytes:
    """The start of a command that ``arguments`` bulks follow."""
    return b"*%d\r\n%b" % (1 + arguments, bulk(name))
