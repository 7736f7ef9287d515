"""A Redis user with few rights: the sample's are enough and none too many, and a command that is
not permitted is a miss for whoever needs it, never an exception or a new connection."""

import logging
import time
from collections.abc import Callable, Iterator

import pytest
import redis

from connectors.stores.base import ReadRequest, StoreKey
from connectors.stores.buffers import Buffer, BufferPool
from connectors.stores.redis import RedisStore
from spm.errors import StoreUnavailableError
from tests.redis_acl import PASSWORD, SAMPLE, USER, add_user, sample_rules
from tests.redis_server import EXECUTABLE, RedisServer, running_cluster, running_redis

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="redis-server is not installed")

KEYS = [StoreKey(f"spm:acl:{at}") for at in range(3)]
STREAM = StoreKey("spm-events")
SIZE = 1000


def soon() -> float:
    return time.monotonic() + 5.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisServer]:
    with running_cluster() as server:
        yield server


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    pool = BufferPool(1 << 20)
    yield pool
    assert pool.used_bytes == 0


@pytest.fixture
def value(pool: BufferPool) -> Iterator[Buffer]:
    buffer = pool.acquire(SIZE)
    assert buffer is not None
    yield buffer
    buffer.release()


class Permitted:
    """A store whose user lacks ``denied``; KEYS[0] is stored, the others are not."""

    def __init__(self, server: RedisServer, pool: BufferPool, value: Buffer, denied: str) -> None:
        rules = sample_rules()
        if denied:
            rules.remove(f"+{denied}")
        with server.client() as client:
            client.flushall()
            add_user(client, rules)
            client.set(KEYS[0], bytes(value.view), ex=1000)
        self.value = value
        self.server = server
        self.store = RedisStore(
            f"redis://{USER}:{PASSWORD}@127.0.0.1:{server.port}", pool, ttl_s=100
        )

    def connections(self) -> int:
        with self.server.client() as client:
            return int(client.info("stats")["total_connections_received"])

    def get(self) -> list[bool]:
        found = self.store.get_many([ReadRequest(key, SIZE) for key in KEYS], soon())
        for buffer in found:
            if buffer is not None:
                buffer.release()
        return [buffer is not None for buffer in found]

    def answers(self) -> dict[str, object]:
        """Of everything a store is asked, the last what changes something."""
        store = self.store
        return {
            "get": self.get(),
            "contains": store.contains_many(KEYS, soon()),
            "get_document": store.get_document(KEYS[0], SIZE, soon()) == bytes(self.value.view),
            "capacity": store.capacity(soon()) is not None,
            "touch": store.touch_many(KEYS, soon()),
            "expire": store.expire_many(KEYS, 5, soon()),
            "put": store.put_many([(KEYS[1], self.value)], soon()),
            "put_document": store.put_document(KEYS[2], b"content", 10, soon()),
            "append": store.append_stream(STREAM, [b"event"], 100, soon()),
            "delete": store.delete_many(KEYS, soon()),
        }


ALL: dict[str, object] = {
    "get": [True, False, False],
    "contains": [True, False, False],
    "get_document": True,
    "capacity": True,
    "touch": [True, False, False],
    "expire": 1,
    "put": [True],
    "put_document": True,
    "append": 1,
    "delete": 3,
}
LOST: dict[str, dict[str, object]] = {
    "": {},
    "get": {"get": [False] * 3, "get_document": False},
    "set": {"put": [False], "put_document": False, "delete": 1},
    "exists": {"contains": [False] * 3, "expire": 0},
    "touch": {"touch": [None] * 3},
    "expire": {},
    "persist": {},
    "unlink": {"delete": 0},
    "xadd": {"append": 0},
    "info": {"capacity": False},
}
"""What is not as it should be when a command is denied."""


@pytest.mark.parametrize("denied", LOST)
def test_a_command_that_is_denied_is_a_miss_and_nothing_more(
    server: RedisServer,
    pool: BufferPool,
    value: Buffer,
    denied: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Catches a build that takes NOPERM for a server that is gone: it would connect anew for
    each call, and its circuit breaker would give up what is permitted too."""
    caplog.set_level(logging.WARNING)
    permitted = Permitted(server, pool, value, denied)
    assert permitted.answers() == {**ALL, **LOST[denied]}
    before = permitted.connections()
    for _ in range(5):
        permitted.answers()
    assert permitted.connections() - before <= 1, "only our own look"
    lines = [record.message for record in caplog.records]
    assert len(lines) == (1 if denied not in ("", "persist", "info") else 0), lines
    assert PASSWORD not in caplog.text
    permitted.store.close()


def test_without_lifetimes_touching_needs_persist(
    server: RedisServer, pool: BufferPool, value: Buffer
) -> None:
    permitted = Permitted(server, pool, value, "persist")
    permitted.store.close()
    with server.client() as client:
        for denied, left in (("", -1), ("persist", 1000)):
            client.set(KEYS[0], b"x", ex=1000)
            add_user(client, [one for one in sample_rules() if one != f"+{denied}"])
            url = f"redis://{USER}:{PASSWORD}@127.0.0.1:{server.port}"
            store = RedisStore(url, pool, ttl_s=None)
            assert store.touch_many(KEYS, soon()) == [True, False, False]
            assert client.ttl(KEYS[0]) in (left, left - 1)
            store.close()


def test_another_database_needs_select(server: RedisServer, pool: BufferPool) -> None:
    with server.client() as client:
        for denied, works in (("", True), ("select", False)):
            add_user(client, [one for one in sample_rules() if one != f"+{denied}"])
            store = RedisStore(f"redis://{USER}:{PASSWORD}@127.0.0.1:{server.port}/1", pool)
            if works:
                assert store.contains_many(KEYS, soon()) == [False] * 3
            else:
                with pytest.raises(StoreUnavailableError):
                    store.contains_many(KEYS, soon())
            store.close()


@pytest.mark.parametrize("needed", ["cluster|slots", "command"])
def test_what_only_a_cluster_needs(cluster: RedisServer, pool: BufferPool, needed: str) -> None:
    with cluster.client() as client:
        for denied in ("", needed):
            add_user(client, [one for one in sample_rules() if one != f"+{denied}"])
            place = f"127.0.0.1:{cluster.port}"
            store = RedisStore(f"redis+cluster://{USER}:{PASSWORD}@{place}", pool)
            if denied:
                with pytest.raises(StoreUnavailableError):
                    store.contains_many(KEYS, soon())
            else:
                assert store.contains_many(KEYS, soon()) == [False] * 3
            store.close()


def test_what_the_sample_does_not_permit(server: RedisServer) -> None:
    with server.client() as admin:
        add_user(admin, sample_rules())
        admin.set("other:1", b"x")
    client = redis.Redis(port=server.port, username=USER, password=PASSWORD, protocol=2)
    denied: list[Callable[[], object]] = [
        lambda: client.get("other:1"),
        lambda: client.set("other:1", b"x"),
        lambda: client.xadd("spm-other", {"event": b"x"}),
        lambda: client.keys("*"),
        lambda: client.scan(0),
        lambda: client.flushall(),
        lambda: client.config_get("*"),
        lambda: client.acl_list(),
        lambda: client.eval("return 1", 0),
        lambda: client.publish("spm:x", b"x"),
        lambda: client.execute_command("CLUSTER", "RESET"),  # type: ignore[no-untyped-call]
    ]
    for attempt in denied:
        with pytest.raises(redis.exceptions.NoPermissionError):
            attempt()
    client.close()


def test_the_sample_with_its_users_starts_and_lets_nobody_else_in(pool: BufferPool) -> None:
    """The whole file, the # of its user lines taken away."""
    lines = [line.removeprefix("#") if line.startswith("#user") else line
             for line in SAMPLE.read_text().splitlines()]  # fmt: skip
    with running_redis() as server:  # for its directory, and a port that is free again
        server.stop()
        path = server.directory / "redis.conf"
        path.write_text("\n".join(lines).replace("CHANGE-ME", PASSWORD))
        server.options = ()
        server.configuration = path
        server.start()
        store = RedisStore(f"redis://{USER}:{PASSWORD}@127.0.0.1:{server.port}", pool)
        assert store.put_document(KEYS[0], b"content", 10, soon())
        assert store.get_document(KEYS[0], SIZE, soon()) == b"content"
        store.close()
        nobody = RedisStore(server.tcp_url, pool)
        with pytest.raises(StoreUnavailableError):
            nobody.contains_many(KEYS, soon())
        nobody.close()
