"""A cluster whose slots move, vanish and come back, and a server behind TLS."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis.crc import key_slot

from connectors.stores.base import ReadRequest, StoreKey
from connectors.stores.buffers import BufferPool
from connectors.stores.redis import RedisStore
from spm.errors import StoreUnavailableError
from tests.redis_server import (
    EXECUTABLE,
    RedisServer,
    free_port,
    running_cluster,
    running_redis,
)

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="redis-server is not installed")

SIZE = 5000
KEYS = [StoreKey(f"cluster:{at}") for at in range(4)]
READS = [ReadRequest(key, SIZE) for key in KEYS]


def soon() -> float:
    return time.monotonic() + 5.0


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    pool = BufferPool(1_000_000)
    yield pool
    assert pool.used_bytes == 0


def put_all(store: RedisStore, pool: BufferPool) -> list[bool]:
    buffers = [pool.acquire(SIZE) for _ in KEYS]
    items = [(key, buffer) for key, buffer in zip(KEYS, buffers, strict=True) if buffer]
    try:
        return store.put_many(items, soon())
    finally:
        for _, buffer in items:
            buffer.release()


def hits(store: RedisStore) -> list[bool]:
    found = store.get_many(READS, soon())
    for buffer in found:
        if buffer is not None:
            buffer.release()
    return [buffer is not None for buffer in found]


def move_slot(slot: int, source: RedisServer, target: RedisServer) -> None:
    """Hand an empty slot over and wait until both nodes say so."""
    with source.client() as old, target.client() as new:
        new_id = new.cluster("MYID")
        for client in (new, old):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", new_id)


@contextmanager
def running_pair() -> Iterator[tuple[RedisServer, RedisServer]]:
    """A cluster of two nodes, the first of which serves every slot."""
    with running_cluster() as first, running_redis("--cluster-enabled", "yes") as second:
        with first.client() as client:
            client.cluster("MEET", "127.0.0.1", second.port)
            while len(client.cluster("NODES")) < 2:
                time.sleep(0.02)
        with second.client() as client:
            while client.cluster("INFO")["cluster_state"] != "ok":
                time.sleep(0.02)
        yield first, second


def test_a_moved_slot_is_a_miss_once_and_then_followed(pool: BufferPool) -> None:
    with running_pair() as (first, second):
        store = RedisStore(first.cluster_url, pool)
        assert hits(store) == [False] * 4
        move_slot(key_slot(KEYS[1].encode()), first, second)
        assert put_all(store, pool) == [True, False, True, True]
        assert put_all(store, pool) == [True] * 4
        assert hits(store) == [True] * 4
        second.stop()
        assert hits(store) == [True, False, True, True], "one node down costs its keys only"
        store.close()
        with pytest.raises(StoreUnavailableError, match="closed"):
            hits(store)


def test_how_full_a_cluster_is_is_the_sum_over_its_nodes(pool: BufferPool) -> None:
    with running_pair() as (first, second), first.client() as one, second.client() as two:
        move_slot(key_slot(KEYS[1].encode()), first, second)
        store = RedisStore(first.cluster_url, pool)
        one.config_set("maxmemory", 30_000_000)
        told = store.capacity(soon())
        assert told is not None
        assert told.limit_bytes is None, "the second node has no limit"
        two.config_set("maxmemory", 20_000_000)
        told = store.capacity(soon())
        used = [client.info("memory")["used_memory"] for client in (one, two)]
        assert told is not None
        assert told.limit_bytes == 50_000_000
        assert max(used) * 1.3 < told.used_bytes < sum(used) * 1.3
        second.stop()
        told = store.capacity(soon())
        assert told is not None
        assert told.limit_bytes == 30_000_000, "of those that answer"
        first.stop()
        with pytest.raises(StoreUnavailableError):
            store.capacity(soon())
        store.close()


def test_down_at_start_and_not_a_cluster(pool: BufferPool) -> None:
    down = RedisStore(f"redis+cluster://:s3cret@127.0.0.1:{free_port()}", pool)
    with pytest.raises(StoreUnavailableError) as caught:
        hits(down)
    assert "cret" not in f"{caught.value} {caught.value.__cause__} {down!r}"
    with running_redis() as single, pytest.raises(StoreUnavailableError):
        hits(RedisStore(single.cluster_url, pool))


def test_unserved_slots_are_unavailable(pool: BufferPool) -> None:
    with running_cluster() as server, server.client() as client:
        store = RedisStore(server.cluster_url, pool)
        assert put_all(store, pool) == [True] * 4
        client.execute_command("CLUSTER", "DELSLOTSRANGE", 0, 16383)
        for _ in range(2):
            with pytest.raises(StoreUnavailableError):
                put_all(store, pool)
        store.close()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Key and self-signed certificate for 127.0.0.1, in one file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    cert.write_bytes(key.read_bytes() + cert.read_bytes())
    return cert


def test_values_travel_through_tls(pool: BufferPool, certificate: Path) -> None:
    tls_port = free_port()
    options = ["--tls-port", str(tls_port), "--tls-auth-clients", "no"]
    for name in ("cert-file", "key-file", "ca-cert-file"):
        options += [f"--tls-{name}", str(certificate)]
    with running_redis(*options):
        trusting = RedisStore(f"rediss://127.0.0.1:{tls_port}?ssl_ca_certs={certificate}", pool)
        assert put_all(trusting, pool) == [True] * 4
        assert hits(trusting) == [True] * 4
        trusting.close()
        with pytest.raises(StoreUnavailableError):
            hits(RedisStore(f"rediss://127.0.0.1:{tls_port}", pool))
