"""What every store must do, whatever is behind it.

Redis is real. fakeredis's TCP server is no substitute on this path: it answers GET with
simple strings (``+...``) instead of bulk replies unless the value happens to hold CR or LF.
"""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from connectors.stores.base import MAX_DOCUMENT_BYTES, KVStore, ReadRequest, StoreKey
from connectors.stores.buffers import Buffer, BufferPool
from connectors.stores.faulty import FaultyStore
from connectors.stores.memory import MemoryStore
from connectors.stores.redis import RedisStore
from connectors.stores.tiered import TieredStore
from spm.breaker import CircuitBreaker
from spm.fault_plan import FaultPlan, FaultsConfig
from spm.secret import SecretSource
from tests.processes import wait_until
from tests.redis_acl import PASSWORD, USER, add_user, sample_rules
from tests.redis_server import EXECUTABLE, RedisServer, running_cluster, running_redis

MiB = 1024 * 1024
POOL_BYTES = 256 * MiB
KINDS = [
    "memory",
    "redis-tcp",
    "redis-unix",
    "redis-cluster",
    "tiered",
    "faulty-at-rest",
    "redis-acl",
    "redis-cluster-acl",
]


def soon() -> float:
    return time.monotonic() + 10.0


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture(scope="module")
def redis_cluster() -> Iterator[RedisServer]:
    with running_cluster() as server:
        yield server


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    pool = BufferPool(POOL_BYTES)
    yield pool
    pool.check_integrity()
    assert pool.used_bytes == 0


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, pool: BufferPool) -> Iterator[KVStore]:
    if EXECUTABLE is None and request.param != "memory":
        pytest.skip("redis-server is not installed")
    store = make(request.param, pool, request.getfixturevalue)
    yield store
    store.check_integrity()
    store.close()


def make(kind: str, pool: BufferPool, fixture: Callable[[str], object]) -> KVStore:
    if kind == "memory":
        return MemoryStore(pool, POOL_BYTES)
    server = fixture("redis_cluster" if "cluster" in kind else "redis_server")
    assert isinstance(server, RedisServer)
    with server.client() as client:
        client.flushall()
    if kind == "redis-cluster":
        return RedisStore(server.cluster_url, pool)
    if kind.endswith("-acl"):
        return as_sample_user(
            server, server.cluster_url if "cluster" in kind else server.tcp_url, pool
        )
    remote = RedisStore(server.unix_url if kind == "redis-unix" else server.tcp_url, pool)
    if kind == "faulty-at-rest":
        return FaultyStore(remote, FaultPlan(FaultsConfig(share=0)), pool)
    if kind != "tiered":
        return remote
    breaker = CircuitBreaker(failures=3, backoff_s=1.0, backoff_cap_s=5.0)
    return TieredStore(MemoryStore(pool, 4 * MiB), remote, breaker)


def as_sample_user(server: RedisServer, url: str, pool: BufferPool) -> KVStore:
    """With no more rights than the sample configuration gives, and a password from a file."""
    with server.client() as client:
        add_user(client, sample_rules())
    path = server.directory / "password"
    path.write_text(PASSWORD)
    path.chmod(0o600)
    source = SecretSource("remote.password", file=str(path))
    return RedisStore(url.replace("://", f"://{USER}@"), pool, password=source)


def key(name: str) -> StoreKey:
    return StoreKey(f"spm:contract:{name}")


def filled(pool: BufferPool, size_bytes: int, seed: int = 1) -> Buffer:
    buffer = pool.acquire(size_bytes)
    assert buffer is not None
    pattern = bytes((seed * 31 + i) % 251 for i in range(min(size_bytes, 997)))
    buffer.view[:] = (pattern * (size_bytes // len(pattern) + 1))[:size_bytes]
    return buffer


def put(store: KVStore, pool: BufferPool, *values: tuple[StoreKey, int, int]) -> list[bool]:
    """Write (key, size, seed) triples and give the buffers back."""
    items = [(name, filled(pool, size_bytes, seed)) for name, size_bytes, seed in values]
    stored = store.put_many(items, soon())
    for _, buffer in items:
        buffer.release()
    return stored


def read(store: KVStore, *reads: tuple[StoreKey, int]) -> list[bytes | None]:
    """Read (key, size) pairs as bytes and give the buffers back."""
    found = store.get_many([ReadRequest(name, size) for name, size in reads], soon())
    values = [bytes(buffer.view) if buffer is not None else None for buffer in found]
    for buffer in found:
        if buffer is not None:
            buffer.release()
    return values


def expected(pool: BufferPool, size_bytes: int, seed: int) -> bytes:
    buffer = filled(pool, size_bytes, seed)
    data = bytes(buffer.view)
    buffer.release()
    return data


def test_values_of_all_sizes_come_back(store: KVStore, pool: BufferPool) -> None:
    sizes = [1, 2, 16_383, 16_384, 16_385, 70_000, 2_949_120, 3 * MiB + 7]
    names = [key(f"size{size}") for size in sizes]
    values = [(name, size, at) for at, (name, size) in enumerate(zip(names, sizes, strict=True))]
    assert put(store, pool, *values) == [True] * len(sizes)
    found = read(store, *zip(names, sizes, strict=True))
    for at, size in enumerate(sizes):
        assert found[at] == expected(pool, size, at), f"{size} bytes"


def test_more_than_a_read_window_comes_back_in_order(store: KVStore, pool: BufferPool) -> None:
    size = 3 * MiB
    names = [key(f"window{at}") for at in range(12)]
    put(store, pool, *((name, size, at) for at, name in enumerate(names)))
    found = read(store, *((name, size) for name in names))
    assert [value and value[:64] for value in found] == [
        expected(pool, 64, at) for at in range(len(names))
    ]


@pytest.mark.fault("F18", breaks="a batch closes up over what is missing")
def test_holes_never_shift_positions(store: KVStore, pool: BufferPool) -> None:
    put(store, pool, (key("h1"), 5000, 1), (key("h3"), 5000, 3))
    found = read(store, *((key(f"h{at}"), 5000) for at in range(5)))
    assert [value is not None for value in found] == [False, True, False, True, False]
    assert found[1] == expected(pool, 5000, 1)
    assert found[3] == expected(pool, 5000, 3)


@pytest.mark.parametrize("wrong_size", [1, 99_999, 100_001, 3 * MiB])
def test_wrong_length_is_a_miss_and_the_next_value_is_right(
    store: KVStore, pool: BufferPool, wrong_size: int
) -> None:
    put(store, pool, (key("w1"), 100_000, 1), (key("w2"), 100_000, 2))
    found = read(store, (key("w1"), wrong_size), (key("w2"), 100_000), (key("w1"), 100_000))
    assert found == [None, expected(pool, 100_000, 2), expected(pool, 100_000, 1)]


def test_same_key_twice_in_one_batch(store: KVStore, pool: BufferPool) -> None:
    put(store, pool, (key("twice"), 5000, 1), (key("twice"), 5000, 2))
    assert read(store, (key("twice"), 5000), (key("twice"), 5000)) == [expected(pool, 5000, 2)] * 2


def test_writing_again_replaces(store: KVStore, pool: BufferPool) -> None:
    put(store, pool, (key("r"), 5000, 1))
    put(store, pool, (key("r"), 6000, 2))
    assert read(store, (key("r"), 5000), (key("r"), 6000)) == [None, expected(pool, 6000, 2)]


def test_contains_touch_delete(store: KVStore, pool: BufferPool) -> None:
    put(store, pool, (key("c1"), 100, 1), (key("c3"), 100, 3))
    names = [key(f"c{at}") for at in range(4)]
    assert store.contains_many(names, soon()) == [False, True, False, True]
    assert store.touch_many(names, soon()) == [False, True, False, True]
    assert store.delete_many(names, soon()) == 2
    assert store.delete_many(names, soon()) == 0
    assert store.contains_many(names, soon()) == [False] * 4
    assert read(store, *((name, 100) for name in names)) == [None] * 4


def test_empty_batches(store: KVStore) -> None:
    assert store.get_many([], soon()) == []
    assert store.put_many([], soon()) == []
    assert store.contains_many([], soon()) == []
    assert store.touch_many([], soon()) == []
    assert store.delete_many([], soon()) == 0
    assert store.expire_many([], 10, soon()) == 0
    assert store.append_stream(key("none"), [], 100, soon()) == 0


def test_told_to_expire_and_touched_a_value_stays(store: KVStore, pool: BufferPool) -> None:
    names = [key(f"e{at}") for at in range(3)]
    put(store, pool, (names[0], 100, 1), (names[2], 100, 3))
    exact = store.capabilities.exact_ttl
    assert store.expire_many(names, 1, soon()) == (2 if exact else 0)
    assert store.touch_many([names[0]], soon()) == [True]
    assert store.contains_many(names, soon()) == [True, False, True]
    if exact:
        wait_until(lambda: not remote_has(store, names[2]), "the end of a value's life")
    assert store.touch_many(names, soon(), ttl_s=[5, 5, 5])[0] is True


def remote_has(store: KVStore, name: StoreKey) -> bool:
    if isinstance(store, TieredStore):
        assert store._remote is not None
        store = store._remote
    return store.contains_many([name], soon())[0]


@pytest.mark.parametrize("size", [0, 1, 16_384, 70_000])
def test_documents_come_back_unless_they_are_too_long(store: KVStore, size: int) -> None:
    assert store.capabilities.documents
    name, content = key(f"document{size}"), bytes(at % 251 for at in range(size))
    assert store.get_document(name, 100_000, soon()) is None
    assert store.put_document(name, b"older", 100, soon())
    assert store.put_document(name, content, 100, soon())
    assert store.get_document(name, size, soon()) == content
    if size:
        assert store.get_document(name, size - 1, soon()) is None
    assert store.get_document(name, 100_000, soon()) == content
    assert store.delete_many([name], soon()) == 1
    assert store.get_document(name, 100_000, soon()) is None


def test_a_document_over_the_bound_is_refused(store: KVStore) -> None:
    name = key("huge")
    assert not store.put_document(name, bytes(MAX_DOCUMENT_BYTES + 1), 100, soon())
    assert store.get_document(name, 2 * MAX_DOCUMENT_BYTES, soon()) is None


def test_documents_live_as_long_as_they_were_told_to(store: KVStore) -> None:
    assert store.put_document(key("short"), b"s", 1, soon())
    assert store.put_document(key("endless"), b"e", 0, soon())
    wait_until(lambda: store.get_document(key("short"), 10, soon()) is None, "the document's end")
    assert store.get_document(key("endless"), 10, soon()) == b"e"


def test_a_log_keeps_about_its_newest_entries(store: KVStore) -> None:
    entries = [b"event %d" % at for at in range(1000)]
    appended = store.append_stream(key("log"), entries, 100, soon())
    assert appended == (1000 if store.capabilities.streams else 0)
    assert store.append_stream(key("log"), [b"", b"last"], 100, soon()) == min(2, appended)


def test_how_full_a_store_is_grows_with_what_is_stored(store: KVStore, pool: BufferPool) -> None:
    assert store.capabilities.capacity
    before = store.capacity(soon())
    put(store, pool, (key("weight"), 8 * MiB, 1))
    after = store.capacity(soon())
    assert before is not None
    assert after is not None
    assert after.used_bytes - before.used_bytes > 4 * MiB
    assert after.limit_bytes == (POOL_BYTES if isinstance(store, MemoryStore) else None)


def test_no_staging_memory_is_a_miss(store: KVStore, pool: BufferPool) -> None:
    put(store, pool, (key("n1"), 5 * MiB, 1), (key("n2"), 5000, 2))
    if isinstance(store, MemoryStore):
        pytest.skip("a memory store needs no staging")
    hog = pool.acquire(POOL_BYTES - 2 * MiB)
    assert hog is not None
    found = read(store, (key("n1"), 5 * MiB), (key("n2"), 5000))
    hog.release()
    assert found == [None, expected(pool, 5000, 2)]
    assert read(store, (key("n1"), 5 * MiB)) == [expected(pool, 5 * MiB, 1)]


def test_threads_read_and_write_at_once(store: KVStore, pool: BufferPool) -> None:
    wrong: list[str] = []

    def work(seed: int) -> None:
        name, size = key(f"thread{seed}"), 40_000 + seed
        for _ in range(15):
            put(store, pool, (name, size, seed))
            others = [(key(f"thread{at}"), 40_000 + at) for at in range(4)]
            found = read(store, *others)
            if found[seed] != expected(pool, size, seed):
                wrong.append(f"thread {seed}")
            wrong.extend(
                f"{seed} saw {at}"
                for at, value in enumerate(found)
                if value is not None and value != expected(pool, 40_000 + at, at)
            )

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_closed_store_is_closed_twice(store: KVStore, pool: BufferPool) -> None:
    put(store, pool, (key("closed"), 100, 1))
    store.close()
    store.close()
