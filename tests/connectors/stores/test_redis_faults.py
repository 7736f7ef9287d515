"""Redis that is down, slow, full, closed in the middle or talking nonsense."""

import logging
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from connectors.stores.base import ReadRequest, StoreCapacity, StoreKey
from connectors.stores.buffers import Buffer, BufferPool
from connectors.stores.factory import create_remote_store
from connectors.stores.redis import RedisStore
from spm.errors import ConfigError, StoreRefusedError, StoreTimeoutError, StoreUnavailableError
from tests.connectors.stores.scripted_server import Hangup, ScriptedServer, replying, silent
from tests.redis_server import EXECUTABLE, free_port, running_redis

SIZE = 5000
KEYS = [StoreKey(f"fault:{at}") for at in range(3)]
READS = [ReadRequest(key, SIZE) for key in KEYS]
VALUE = b"$5000\r\n" + b"v" * SIZE + b"\r\n"

needs_redis = pytest.mark.skipif(EXECUTABLE is None, reason="redis-server is not installed")


def within(seconds: float) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    pool = BufferPool(64 * 1024 * 1024)
    yield pool
    pool.check_integrity()
    assert pool.used_bytes == 0


@pytest.fixture
def value(pool: BufferPool) -> Iterator[Buffer]:
    buffer = pool.acquire(SIZE)
    assert buffer is not None
    buffer.view[:] = b"v" * SIZE
    yield buffer
    buffer.release()


def test_silent_server_is_a_timeout(pool: BufferPool, value: Buffer) -> None:
    with ScriptedServer(silent) as server:
        store = RedisStore(server.url, pool)
        for call in (
            lambda: store.get_many(READS, within(0.1)),
            lambda: store.put_many([(KEYS[0], value)], within(0.1)),
            lambda: store.contains_many(KEYS, within(0.1)),
            lambda: store.touch_many(KEYS, within(0.1)),
            lambda: store.delete_many(KEYS, within(0.1)),
            lambda: store.expire_many(KEYS, 10, within(0.1)),
            lambda: store.put_document(KEYS[0], b"content", 10, within(0.1)),
            lambda: store.get_document(KEYS[0], 100, within(0.1)),
            lambda: store.append_stream(KEYS[0], [b"event"], 100, within(0.1)),
            lambda: store.capacity(within(0.1)),
        ):
            start_s = time.monotonic()
            with pytest.raises(StoreTimeoutError):
                call()
            assert time.monotonic() - start_s < 0.4
        store.close()


def test_silence_during_the_handshake_is_a_timeout(pool: BufferPool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = RedisStore(f"redis://127.0.0.1:{listener.getsockname()[1]}", pool)
        with pytest.raises(StoreTimeoutError):
            store.get_many(READS, within(0.1))


def test_full_socket_is_a_timeout(pool: BufferPool) -> None:
    def stuck(client: socket.socket, data: bytes) -> None:
        time.sleep(0.5)
        raise Hangup

    large = pool.acquire(48 * 1024 * 1024)
    assert large is not None
    with ScriptedServer(stuck) as server, pytest.raises(StoreTimeoutError):
        RedisStore(server.url, pool).put_many([(KEYS[0], large)], within(0.2))
    large.release()


def test_dripping_server_does_not_stretch_the_deadline(pool: BufferPool) -> None:
    def drip(client: socket.socket, data: bytes) -> None:
        for at in range(len(VALUE)):
            client.sendall(VALUE[at : at + 1])
            time.sleep(0.005)

    with ScriptedServer(drip) as server:
        start_s = time.monotonic()
        with pytest.raises(StoreTimeoutError):
            RedisStore(server.url, pool).get_many(READS, within(0.2))
        assert time.monotonic() - start_s < 0.5


@pytest.mark.parametrize("cut", [1, 4, 7, 200, SIZE + 8])
def test_connection_closed_in_the_first_reply(pool: BufferPool, cut: int) -> None:
    def hang_up(client: socket.socket, data: bytes) -> None:
        client.sendall(VALUE[:cut])
        raise Hangup

    with ScriptedServer(hang_up) as server, pytest.raises(StoreUnavailableError):
        RedisStore(server.url, pool).get_many(READS, within(2.0))


def test_values_that_arrived_before_a_failure_are_returned(pool: BufferPool) -> None:
    def half(client: socket.socket, data: bytes) -> None:
        client.sendall(VALUE + VALUE[:300])
        raise Hangup

    with ScriptedServer(half) as server:
        first, *others = RedisStore(server.url, pool).get_many(READS, within(2.0))
        assert first is not None
        assert bytes(first.view) == b"v" * SIZE
        assert others == [None, None]
        first.release()


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"$abc\r\n",
        b"$-7\r\n",
        b"*1\r\n" * 5000,
        b":1\r\n",
        b"x" * 70_000,
        VALUE[:-2] + b"too long\r\n",
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"-NOAUTH Authentication required.\r\n",
        b"-CLUSTERDOWN The cluster is down\r\n",
    ],
)
def test_nonsense_and_useless_servers_are_unavailable(pool: BufferPool, reply: bytes) -> None:
    with ScriptedServer(replying(reply)) as server:
        store = RedisStore(server.url, pool)
        with pytest.raises(StoreUnavailableError):
            store.get_many(READS, within(2.0))
        store.close()


def test_deep_nonsense_in_an_ordinary_reply(pool: BufferPool) -> None:
    with (
        ScriptedServer(replying(b"*1\r\n" * 5000)) as server,
        pytest.raises(StoreUnavailableError),
    ):
        RedisStore(server.url, pool).contains_many(KEYS, within(2.0))


def test_read_only_server_refuses_all_writes(pool: BufferPool, value: Buffer) -> None:
    reply = b"-READONLY You can't write against a read only replica.\r\n"
    with ScriptedServer(replying(reply)) as server, pytest.raises(StoreRefusedError):
        RedisStore(server.url, pool).put_many([(KEYS[0], value)], within(2.0))


@needs_redis
def test_a_replica_can_be_read_and_refuses_what_would_change_it(
    pool: BufferPool, value: Buffer
) -> None:
    """Catches a replica that counts as failing, which would stop the reads too."""
    with running_redis() as server, server.client() as client:
        client.set(KEYS[0], bytes(value.view))
        client.execute_command("REPLICAOF", "127.0.0.1", free_port())
        store = RedisStore(server.tcp_url, pool, ttl_s=100)
        writes: list[Callable[[], object]] = [
            lambda: store.put_many([(KEYS[0], value)], within(5.0)),
            lambda: store.touch_many(KEYS, within(5.0)),
            lambda: store.expire_many(KEYS, 5, within(5.0)),
            lambda: store.put_document(KEYS[0], b"content", 10, within(5.0)),
            lambda: store.append_stream(KEYS[0], [b"event"], 10, within(5.0)),
            lambda: store.delete_many(KEYS, within(5.0)),
        ]
        for write in writes:
            with pytest.raises(StoreRefusedError):
                write()
            assert store.contains_many(KEYS, within(5.0)) == [True] + [False] * (len(KEYS) - 1)
        client.config_set("replica-serve-stale-data", "no")
        with pytest.raises(StoreUnavailableError, match="MASTER is down"):
            store.contains_many(KEYS, within(5.0))
        store.close()


def test_error_for_one_key_is_a_miss_of_that_key(pool: BufferPool) -> None:
    with ScriptedServer(replying(b"-WRONGTYPE no string\r\n" + VALUE + b"$-1\r\n")) as server:
        store = RedisStore(server.url, pool)
        missed, found, absent = store.get_many(READS, within(2.0))
        assert (missed, absent) == (None, None)
        assert found is not None
        found.release()
        store.close()


def test_a_late_reply_never_answers_the_next_call(pool: BufferPool) -> None:
    def late_once(client: socket.socket, data: bytes) -> None:
        if server.connections == 1:
            time.sleep(0.15)
            client.sendall(VALUE * 3)
        else:
            client.sendall(b"$-1\r\n" * 3)

    with ScriptedServer(late_once) as server:
        store = RedisStore(server.url, pool)
        with pytest.raises(StoreTimeoutError):
            store.get_many(READS, within(0.1))
        time.sleep(0.1)
        assert store.get_many(READS, within(2.0)) == [None] * 3
        assert server.connections == 2
        store.close()


def test_unexpected_bytes_on_an_idle_connection_are_not_a_reply(pool: BufferPool) -> None:
    with ScriptedServer(replying(b"$-1\r\n" * 3 + VALUE)) as server:
        store = RedisStore(server.url, pool)
        for _ in range(3):
            assert store.get_many(READS, within(2.0)) == [None] * 3
        assert server.connections == 3
        store.close()


def test_busy_connections_are_waited_for_until_the_deadline(pool: BufferPool) -> None:
    with ScriptedServer(silent) as server:
        store = RedisStore(server.url, pool, max_connections=1)

        def occupy() -> None:
            with pytest.raises(StoreTimeoutError):
                store.contains_many(KEYS, within(0.4))

        thread = threading.Thread(target=occupy)
        thread.start()
        while not server.connections:
            time.sleep(0.005)
        with pytest.raises(StoreTimeoutError, match="busy"):
            store.contains_many(KEYS, within(0.05))
        thread.join()


def test_past_deadline_sends_nothing(pool: BufferPool) -> None:
    with ScriptedServer(silent) as server:
        with pytest.raises(StoreTimeoutError):
            RedisStore(server.url, pool).contains_many(KEYS, within(-1.0))
        assert server.connections == 0


@needs_redis
def test_down_at_start_and_restarted_later(pool: BufferPool, value: Buffer) -> None:
    with running_redis() as server:
        server.stop()
        store = RedisStore(server.tcp_url, pool)
        with pytest.raises(StoreUnavailableError):
            store.get_many(READS, within(2.0))
        server.start()
        assert store.put_many([(KEYS[0], value)], within(2.0)) == [True]
        server.stop()
        with pytest.raises(StoreUnavailableError):
            store.put_many([(KEYS[0], value)], within(2.0))
        server.start()
        assert store.get_many(READS, within(2.0)) == [None] * 3, "it came back empty"
        store.close()
        with pytest.raises(StoreUnavailableError, match="closed"):
            store.get_many(READS, within(2.0))


@needs_redis
def test_full_server_refuses_and_still_serves(
    pool: BufferPool, value: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    with running_redis("--maxmemory-policy", "noeviction") as server:
        store = RedisStore(server.tcp_url, pool)
        assert store.put_many([(KEYS[0], value)], within(2.0)) == [True]
        with server.client() as client:
            client.config_set("maxmemory", 1)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                refused = store.put_many([(KEYS[1], value), (KEYS[2], value)], within(2.0))
                assert refused == [False, False]
        assert len(caplog.records) == 1
        first, *_ = store.get_many(READS, within(2.0))
        assert first is not None
        first.release()
        store.close()


def test_a_touch_without_an_answer_is_not_gone(pool: BufferPool) -> None:
    """Two replies a key; the server leaves after the third."""
    with ScriptedServer(replying(b":1\r\n:1\r\n:0\r\n")) as server:
        store = RedisStore(server.url, pool)
        assert store.touch_many(KEYS, within(0.2)) == [True, None, None]
        store.close()


def test_an_error_reply_to_a_touch_is_not_gone(pool: BufferPool) -> None:
    with ScriptedServer(replying(b"-ERR no\r\n:1\r\n:0\r\n:0\r\n:1\r\n:0\r\n")) as server:
        store = RedisStore(server.url, pool)
        assert store.touch_many(KEYS, within(2.0)) == [None, False, True]
        store.close()


def test_a_long_document_is_skipped_without_keeping_it(pool: BufferPool) -> None:
    piece, pieces = bytes(65_536), 512

    def long_value(client: socket.socket, data: bytes) -> None:
        client.sendall(b"$%d\r\n" % (len(piece) * pieces))
        for _ in range(pieces):
            client.sendall(piece)
        client.sendall(b"\r\n")

    with ScriptedServer(long_value) as server:
        store = RedisStore(server.url, pool)
        tracemalloc.start()
        assert store.get_document(KEYS[0], 1000, within(10.0)) is None
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 2 * 1024 * 1024
        store.close()


@pytest.mark.parametrize(
    "reply",
    [
        b"-NOPERM this user has no permissions to run the 'info' command\r\n",
        b"-ERR unknown command 'INFO'\r\n",
        b"$-1\r\n",
        b"$12\r\n# Memory\r\nab\r\n",
        b"$70000\r\nused_memory:1\r\n" + b"x" * 69_985 + b"\r\n",
    ],
)
def test_a_server_that_does_not_say_how_full_it_is(pool: BufferPool, reply: bytes) -> None:
    with ScriptedServer(replying(reply)) as server:
        store = RedisStore(server.url, pool)
        for _ in range(2):
            assert store.capacity(within(2.0)) is None
        assert server.connections == 1, "no error"
        store.close()


@pytest.mark.parametrize("reply", [b"-LOADING wait\r\n", b":1\r\n", b"-NOAUTH who?\r\n"])
def test_a_useless_server_is_no_server_that_does_not_say(pool: BufferPool, reply: bytes) -> None:
    with ScriptedServer(replying(reply)) as server, pytest.raises(StoreUnavailableError):
        RedisStore(server.url, pool).capacity(within(2.0))


@needs_redis
def test_how_full_a_server_is_if_it_may_be_asked(pool: BufferPool) -> None:
    with running_redis() as server, server.client() as client:
        store = RedisStore(server.tcp_url, pool)
        client.config_set("maxmemory", 50_000_000)
        told = store.capacity(within(2.0))
        assert told is not None
        assert told == StoreCapacity(told.used_bytes, 50_000_000)
        assert 0.5 < told.used_bytes / client.info("memory")["used_memory"] < 2
        client.acl_setuser(
            "shy",
            enabled=True,
            passwords="+pw",
            keys="*",
            categories=["+@all"],
            commands=["-info"],
        )
        shy = RedisStore(f"redis://shy:pw@127.0.0.1:{server.port}", pool)
        assert shy.capacity(within(2.0)) is None
        assert shy.contains_many(KEYS, within(2.0)) == [False] * 3
        for opened in (store, shy):
            opened.close()


@needs_redis
def test_lifetime_is_set_and_touching_renews_it(pool: BufferPool, value: Buffer) -> None:
    with running_redis() as server, server.client() as client:
        store = RedisStore(server.tcp_url, pool, ttl_s=100)
        store.put_many([(KEYS[0], value), (KEYS[1], value)], within(2.0))
        assert [0 < client.ttl(key) <= 100 for key in KEYS[:2]] == [True, True]
        client.expire(KEYS[0], 5)
        assert store.touch_many(KEYS, within(2.0)) == [True, True, False]
        assert 90 < client.ttl(KEYS[0]) <= 100
        assert store.touch_many(KEYS[:2], within(2.0), ttl_s=[50, 500]) == [True, True]
        assert 90 < client.ttl(KEYS[0]) <= 100
        assert 490 < client.ttl(KEYS[1]) <= 500
        eternal = RedisStore(server.tcp_url, pool, ttl_s=0)
        eternal.put_many([(KEYS[0], value)], within(2.0))
        assert client.ttl(KEYS[0]) == -1
        client.expire(KEYS[0], 5)
        assert eternal.touch_many(KEYS[:1], within(2.0), ttl_s=[50]) == [True]
        assert client.ttl(KEYS[0]) == -1, "a store that sets no lifetime takes one back"
        store.close()
        eternal.close()


@needs_redis
def test_told_to_expire_a_life_gets_shorter_never_longer(pool: BufferPool, value: Buffer) -> None:
    with running_redis() as server, server.client() as client:
        store = RedisStore(server.tcp_url, pool)
        store.put_many([(KEYS[0], value), (KEYS[1], value)], within(2.0))
        client.expire(KEYS[1], 5)
        assert client.ttl(KEYS[0]) == -1
        assert store.expire_many(KEYS, 60, within(2.0)) == 2
        assert 50 < client.ttl(KEYS[0]) <= 60
        assert client.ttl(KEYS[1]) <= 5
        assert store.expire_many(KEYS, 600, within(2.0)) == 2
        assert 50 < client.ttl(KEYS[0]) <= 60
        store.close()


@needs_redis
def test_documents_and_logs_are_what_others_read(pool: BufferPool) -> None:
    with running_redis() as server, server.client() as client:
        store = RedisStore(server.tcp_url, pool)
        assert store.put_document(KEYS[0], b"content", 100, within(2.0))
        assert client.get(KEYS[0]) == b"content"
        assert 90 < client.ttl(KEYS[0]) <= 100
        entries = [b"event %d" % at for at in range(5000)]
        assert store.append_stream(KEYS[1], entries, 1000, within(2.0)) == 5000
        assert 1000 <= client.xlen(KEYS[1]) <= 1200
        ((_, newest),) = client.xrevrange(KEYS[1], count=1)
        assert newest == {b"event": b"event 4999"}
        assert store.get_document(KEYS[1], 100, within(2.0)) is None, "no document"
        assert store.append_stream(KEYS[0], [b"event"], 100, within(2.0)) == 0, "no log"
        store.close()


@needs_redis
def test_touching_refreshes_what_eviction_looks_at(pool: BufferPool, value: Buffer) -> None:
    with running_redis() as server, server.client() as client:
        store = RedisStore(server.tcp_url, pool)
        store.put_many([(KEYS[0], value)], within(2.0))
        client.restore(KEYS[0], 0, client.dump(KEYS[0]), replace=True, idletime=500)
        assert store.contains_many(KEYS[:1], within(2.0)) == [True]
        assert client.object("idletime", KEYS[0]) >= 500
        assert store.touch_many(KEYS[:1], within(2.0)) == [True]
        assert client.object("idletime", KEYS[0]) <= 1
        store.close()


@needs_redis
def test_password_works_and_never_shows(pool: BufferPool) -> None:
    with running_redis() as server, server.client() as client:
        client.config_set("requirepass", "s3cret/?@")
        place = f"127.0.0.1:{server.port}"
        right = RedisStore(f"redis://:s3cret%2F%3F%40@{place}/2", pool)
        assert right.contains_many(KEYS, within(2.0)) == [False] * 3
        assert "cret" not in repr(right)
        right.close()
        for wrong_url in (f"redis://:wr0ng@{place}", f"redis://{place}"):
            wrong = RedisStore(wrong_url, pool)
            with pytest.raises(StoreUnavailableError) as caught:
                wrong.contains_many(KEYS, within(2.0))
            assert "wr0ng" not in f"{caught.value} {caught.value.__cause__} {wrong!r}"
        unix = RedisStore(f"{server.unix_url}?password=s3cret/?%40&db=1", pool)
        assert unix.contains_many(KEYS, within(2.0)) == [False] * 3
        assert "cret" not in repr(unix)
        unix.close()


@pytest.mark.parametrize(
    "url",
    [
        "http://user:s3cret@host",
        "redis://:s3cret/x@host:1",
        "redis://:s3cret?x@host:port",
        "redis://host?db=s3cret",
        "redis://host?password=s3cret&bogus=1",
        "redis+cluster://host/3?password=s3cret",
        "unix+cluster:///s3cret@/tmp/redis.sock",
    ],
)
def test_unusable_url_is_a_config_error_without_its_secrets(pool: BufferPool, url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RedisStore(url, pool)
    assert "cret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_factory_names_the_kinds_it_knows(pool: BufferPool) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match="memory, redis"):
        create_remote_store("memcached", pool=pool, url=url, connect_timeout_s=1.0, ttl_s=None)
    for kind in ("memory", "redis"):
        store = create_remote_store(kind, pool=pool, url=url, connect_timeout_s=1.0, ttl_s=60)
        assert store.capabilities.remote == (kind == "redis")
        store.close()
