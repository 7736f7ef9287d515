"""TLS to a real Redis: who is trusted, who is not, and that nothing hangs or shows a secret."""

import logging
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from connectors.stores.base import ReadRequest, StoreKey
from connectors.stores.buffers import BufferPool
from connectors.stores.redis import RedisStore
from spm.errors import StoreError, StoreTimeoutError, StoreUnavailableError
from spm.secret import SecretSource
from tests.certificates import Authority, authority
from tests.redis_acl import PASSWORD, USER, add_user, sample_rules
from tests.redis_server import EXECUTABLE, RedisServer, free_port, running_cluster, running_redis

needs_redis = pytest.mark.skipif(EXECUTABLE is None, reason="redis-server is not installed")

KEYS = [StoreKey(f"spm:tls:{at}") for at in range(3)]
SIZE = 200_000


@dataclass(frozen=True)
class TlsRedis:
    """A server with a TLS port that wants client certificates, and a plain port."""

    server: RedisServer
    tls_port: int
    ours: Authority
    client_files: tuple[Path, Path]

    def url(self, host: str = "127.0.0.1", *, ca: Path | None = None, client: bool = True) -> str:
        options = [f"ssl_ca_certs={ca or self.ours.path}"]
        if client:
            options += [f"ssl_certfile={self.client_files[0]}"]
            options += [f"ssl_keyfile={self.client_files[1]}"]
        return f"rediss://{USER}@{host}:{self.tls_port}/0?{'&'.join(options)}"


@contextmanager
def running_tls(directory: Path, *, cluster: bool = False) -> Iterator[TlsRedis]:
    ours = authority(directory, "ours")
    certificate, key = ours.issue("server", "127.0.0.1")
    port = free_port()
    options = ["--tls-port", str(port), "--tls-auth-clients", "yes"]
    options += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    options += ["--tls-ca-cert-file", str(ours.path)]
    if cluster:  # else it names its plain port to everybody
        options += ["--tls-cluster", "yes"]
    with (running_cluster if cluster else running_redis)(*options) as server:
        with server.client() as client:
            add_user(client, sample_rules())
        yield TlsRedis(server, port, ours, ours.issue("client", "engine"))


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsRedis]:
    with running_tls(tmp_path_factory.mktemp("certificates")) as server:
        yield server


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    pool = BufferPool(8 << 20)
    yield pool
    assert pool.used_bytes == 0


@pytest.fixture
def password(tmp_path: Path) -> SecretSource:
    path = tmp_path / "password"
    path.write_text(PASSWORD + "\n")
    path.chmod(0o600)
    return SecretSource("remote.password", file=str(path))


def soon() -> float:
    return time.monotonic() + 5.0


def refusal(store: RedisStore, caplog: pytest.LogCaptureFixture) -> StoreError:
    """How ``store`` fails: at once, as often as it is asked, and without showing a secret."""
    caplog.set_level(logging.DEBUG)
    for _ in range(3):
        with pytest.raises(StoreUnavailableError) as caught:  # no StoreTimeoutError: no hang
            store.contains_many(KEYS, soon())
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text + repr(store)
    assert "hunter2" not in shown
    store.close()
    return caught.value


@needs_redis
def test_values_travel_through_tls_with_a_client_certificate_and_a_password(
    tls: TlsRedis, pool: BufferPool, password: SecretSource
) -> None:
    carry_values(RedisStore(tls.url(), pool, password=password), pool)


@needs_redis
@pytest.mark.parametrize("named", ["in front", "in the query"])
def test_a_cluster_is_asked_for_its_slots_through_tls_and_with_the_password_too(
    pool: BufferPool, password: SecretSource, tmp_path: Path, named: str
) -> None:
    with running_tls(tmp_path, cluster=True) as server:
        url = server.url().replace("rediss://", "rediss+cluster://")
        if named == "in the query":
            url = url.replace(f"{USER}@", "") + f"&username={USER}"
        store = RedisStore(url, pool, password=password)
        carry_values(store, pool)
        for refused in (
            server.url(ca=authority(tmp_path, "theirs").path),
            server.url(client=False),
        ):
            other = RedisStore(
                refused.replace("rediss://", "rediss+cluster://"), pool, password=password
            )
            with pytest.raises(StoreUnavailableError):
                other.contains_many(KEYS, soon())
            other.close()


def carry_values(store: RedisStore, pool: BufferPool) -> None:
    """There and back."""
    value = pool.acquire(SIZE)
    assert value is not None
    value.view[:] = bytes(range(250)) * (SIZE // 250)
    assert store.put_many([(key, value) for key in KEYS[:2]], soon()) == [True, True]
    found = store.get_many([ReadRequest(key, SIZE) for key in KEYS], soon())
    assert [buffer and bytes(buffer.view) for buffer in found] == [bytes(value.view)] * 2 + [None]
    for buffer in (value, *found):
        if buffer is not None:
            buffer.release()
    store.close()


@needs_redis
@pytest.mark.parametrize("fault", ["no certificate", "other authority", "system's authorities"])
def test_who_is_not_trusted_is_refused(
    tls: TlsRedis,
    pool: BufferPool,
    password: SecretSource,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    fault: str,
) -> None:
    if fault == "no certificate":
        url = tls.url(client=False)
    elif fault == "other authority":
        url = tls.url(ca=authority(tmp_path, "theirs").path)
    else:
        url = f"rediss://{USER}@127.0.0.1:{tls.tls_port}"
    refusal(RedisStore(url, pool, password=password), caplog)


@needs_redis
def test_a_certificate_for_another_host_is_refused(
    tls: TlsRedis, pool: BufferPool, password: SecretSource, caplog: pytest.LogCaptureFixture
) -> None:
    """``localhost`` leads to the same server, but its certificate is for 127.0.0.1."""
    error = refusal(RedisStore(tls.url("localhost"), pool, password=password), caplog)
    assert "localhost" in str(error)


@needs_redis
def test_a_file_that_is_not_there_is_a_failure_and_no_exception_of_another_kind(
    tls: TlsRedis, pool: BufferPool, password: SecretSource, caplog: pytest.LogCaptureFixture
) -> None:
    refusal(RedisStore(tls.url(ca=Path("/nowhere")), pool, password=password), caplog)


@needs_redis
def test_plain_and_encrypted_do_not_meet(
    tls: TlsRedis, pool: BufferPool, password: SecretSource, caplog: pytest.LogCaptureFixture
) -> None:
    plain = f"redis://{USER}@127.0.0.1:{tls.tls_port}"
    refusal(RedisStore(plain, pool, password=password), caplog)
    encrypted = tls.url().replace(f":{tls.tls_port}", f":{tls.server.port}")
    store = RedisStore(encrypted, pool, password=password, connect_timeout_s=0.3)
    for _ in range(2):
        with pytest.raises(StoreError):
            store.contains_many(KEYS, soon())
    store.close()


def test_a_server_that_never_shakes_hands_is_given_up_at_the_connect_timeout(
    pool: BufferPool,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"rediss://127.0.0.1:{listener.getsockname()[1]}"
        store = RedisStore(url, pool, connect_timeout_s=0.05)
        with pytest.raises(StoreTimeoutError):
            store.contains_many(KEYS, time.monotonic() + 60.0)
        store.close()


@needs_redis
@pytest.mark.parametrize("encrypted", [True, False])
def test_a_wrong_password_is_refused_and_a_replaced_one_is_taken_without_a_restart(
    tls: TlsRedis,
    pool: BufferPool,
    password: SecretSource,
    caplog: pytest.LogCaptureFixture,
    encrypted: bool,
) -> None:
    url = tls.url() if encrypted else f"redis://{USER}@127.0.0.1:{tls.server.port}"
    path = Path(password.file)
    path.write_text("hunter2-but-wrong")
    error = refusal(RedisStore(url, pool, password=password), caplog)
    assert "password" in str(error)
    store = RedisStore(url, pool, password=password)
    path.write_text(PASSWORD)
    assert store.contains_many(KEYS[2:], soon()) == [False]
    store.close()
    late = RedisStore(url, pool, password=password)
    path.unlink()
    with pytest.raises(StoreUnavailableError, match="password_file: No such file"):
        late.contains_many(KEYS, soon())
    late.close()
