"""The parser alone, fed by a socket that cuts the stream wherever it likes."""

import time
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from connectors.stores.base import ReadRequest, StoreKey
from connectors.stores.buffers import BufferPool
from connectors.stores.redis import RedisStore
from connectors.stores.redis_parser import Bulk, SinkParser
from spm.errors import StoreTimeoutError
from tests.redis_server import EXECUTABLE, RedisServer, running_redis

needs_redis = pytest.mark.skipif(EXECUTABLE is None, reason="redis-server is not installed")
WINDOW_BYTES = 64


class ChunkedSocket:
    """Delivers ``data`` in pieces of the given sizes, over and over."""

    def __init__(self, data: bytes, piece_sizes: list[int]) -> None:
        self._data = data
        self._sizes = piece_sizes
        self._turn = 0

    def settimeout(self, timeout_s: float | None) -> None:
        assert timeout_s is None or timeout_s > 0

    def recv_into(self, target: memoryview) -> int:
        size = min(len(target), self._sizes[self._turn % len(self._sizes)], len(self._data))
        self._turn += 1
        target[:size] = self._data[:size]
        self._data = self._data[size:]
        return size


def parser_for(sock: object) -> SinkParser:
    parser = SinkParser(socket_read_size=WINDOW_BYTES)
    parser.on_connect(SimpleNamespace(_sock=sock, encoder=None, socket_timeout=1.0))
    return parser


BULKS = st.one_of(st.none(), st.binary(max_size=300))


@given(
    st.lists(st.tuples(BULKS, st.booleans()), max_size=12),
    st.lists(st.integers(1, 200), min_size=1, max_size=6),
)
def test_any_cut_of_the_stream_gives_the_same_values(
    bulks: list[tuple[bytes | None, bool]], piece_sizes: list[int]
) -> None:
    stream = b"".join(
        b"$-1\r\n" if data is None else b"$%d\r\n%b\r\n" % (len(data), data) for data, _ in bulks
    )
    parser = parser_for(ChunkedSocket(stream + b":7\r\n", piece_sizes))
    for data, wanted in bulks:
        landed = bytearray(len(data or b""))
        reply = parser.read(lambda length, w=wanted, t=landed: memoryview(t) if w else None)  # type: ignore[misc]
        assert reply is (None if data is None else Bulk.LANDED if wanted else Bulk.SKIPPED)
        if reply is Bulk.LANDED:
            assert bytes(landed) == data
    assert parser.read() == 7, "the stream is still in step"


def test_past_the_deadline_nothing_is_read() -> None:
    parser = parser_for(ChunkedSocket(b":7\r\n", [4]))
    parser.deadline_s = time.monotonic() - 1.0
    with pytest.raises(StoreTimeoutError):
        parser.read()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@needs_redis
def test_redis_py_works_on_it(server: RedisServer) -> None:
    connections = redis.ConnectionPool(
        port=server.port, parser_class=SinkParser, protocol=2, decode_responses=True
    )
    with redis.Redis(connection_pool=connections) as client:
        client.hset("hash", mapping={"field": "value"})
        assert client.hgetall("hash") == {"field": "value"}
        client.set("text", "x" * 100_000)
        assert client.get("text") == "x" * 100_000
        assert client.get("absent") is None
        with pytest.raises(redis.ResponseError, match="wrong kind"):
            client.get("hash")
        pipeline = client.pipeline()
        pipeline.incr("n").incr("n")
        assert pipeline.execute() == [1, 2]


@needs_redis
def test_large_values_are_copied_by_nobody(server: RedisServer) -> None:
    size = 3 * 1024 * 1024
    pool = BufferPool(64 * 1024 * 1024)
    store = RedisStore(server.tcp_url, pool)
    names = [StoreKey(f"copy{at}") for at in range(4)]
    buffers = [pool.acquire(size) for _ in names]
    items = [(name, buffer) for name, buffer in zip(names, buffers, strict=True) if buffer]
    tracemalloc.start()
    stored = store.put_many(items, time.monotonic() + 10.0)
    for _, buffer in items:
        buffer.release()
    reads = [ReadRequest(name, size) for name in names]
    found = store.get_many(reads, time.monotonic() + 10.0)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert stored == [True] * 4
    assert all(found)
    assert peak_bytes < size / 4, "neither a value nor a pipeline was assembled"
    for hit in found:
        if hit is not None:
            hit.release()
    store.close()
    assert pool.used_bytes == 0
