"""That both stores write and read the same values. No times are looked at."""

from collections.abc import Iterator

import pytest

pytest.importorskip("lmcache.lmcache_redis")

from benchmarks.lmcache_throughput import Ours, Theirs, Values, clients_for, make_values, measure
from connectors.stores.buffers import BufferPool
from spm.errors import BadValueError
from tests.redis_server import EXECUTABLE, RedisServer, running_redis

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="redis-server is not installed")
COUNT = 5
SIZE = 70_000


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as running:
        yield running


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool(100 * COUNT * SIZE)


@pytest.fixture
def values(pool: BufferPool) -> Values:
    return make_values(pool, "test", COUNT, SIZE, seed=1)


def test_theirs_reads_what_ours_wrote(
    server: RedisServer, pool: BufferPool, values: Values
) -> None:
    ours = Ours(server.tcp_url, pool, values, 1, 2)
    theirs = Theirs(server.tcp_url, values, 2)

    ours.put()
    theirs.get()

    assert [bytes(target) for target in theirs.targets] == [
        bytes(buffer.view) for buffer in values.buffers
    ]
    ours.close()
    theirs.close()


def test_ours_finds_good_what_theirs_wrote_and_notices_damage(
    server: RedisServer, pool: BufferPool, values: Values
) -> None:
    ours = Ours(server.tcp_url, pool, values, 1, 2, checked=True)
    theirs = Theirs(server.tcp_url, values, 2)

    theirs.put()
    ours.get()
    with server.client() as client:
        client.setrange("test:3", SIZE - 1, bytes([values.buffers[3].view[-1] ^ 1]))
        with pytest.raises(BadValueError):
            ours.get()

    ours.close()
    theirs.close()


def test_a_value_that_is_not_there_is_noticed(
    server: RedisServer, pool: BufferPool, values: Values
) -> None:
    ours = Ours(server.tcp_url, pool, values, 1, 2)
    ours.put()
    with server.client() as client:
        client.delete("test:3")

    with pytest.raises(AssertionError):
        ours.get()

    ours.close()


def test_every_client_is_timed_equally_often(
    server: RedisServer, pool: BufferPool, values: Values
) -> None:
    clients = clients_for(server.tcp_url, pool, values)

    times = measure(clients, 3, seed=1)

    assert {name: len(series) for name, series in times.items()} == {
        f"{name} {kind}": 3 for name in clients for kind in ("put", "get")
    }
    for client in clients.values():
        client.close()
