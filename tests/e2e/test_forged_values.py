"""With a secret, an engine takes nothing from a store that somebody without it has written."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spm.value_auth import Authenticator, Purpose
from spm.value_format import HEADER_BYTES
from tests.e2e.checked_engine import checked_engine
from tests.e2e.engine_process import EngineProcess
from tests.e2e.stock import Stock, fill, resume_until_identical
from tests.e2e.tampering import (
    Values,
    assert_refused_and_replaced,
    read_values,
    rotated,
    signed,
)
from tests.redis_acl import PASSWORD, USER, add_user, sample_rules
from tests.redis_server import EXECUTABLE, RedisServer, running_redis

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SECRET = b"of the engines, and of nobody else"
OURS = Authenticator(SECRET, Purpose.VALUES)
OTHER = Authenticator(b"of somebody who can write to Redis", Purpose.VALUES)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    if EXECUTABLE is None:
        pytest.skip("no redis-server on the path")
    with running_redis() as server:
        with server.client() as client:
            add_user(client, sample_rules())
        yield server


@pytest.fixture(scope="module")
def engine(stock: Stock, server: RedisServer) -> Iterator[EngineProcess]:
    """As the sample's user, its password and the secret in files."""
    spec = stock.engine(server.tcp_url.replace("://", f"://{USER}@"))
    assert spec.connector is not None
    remote = {
        **spec.connector["remote"],
        "password_file": _file(server.directory / "password", PASSWORD.encode()),
        "auth_key_file": _file(server.directory / "secret", SECRET),
    }
    with checked_engine(replace(spec, connector={**spec.connector, "remote": remote})) as engine:
        fill(engine, stock)
        yield engine


def _file(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    path.chmod(0o600)
    return str(path)


def _other_payloads(values: Values) -> Values:
    """Wrong KV under the right headers: would be loaded if only somebody vouched for it."""
    payloads = {key: value[HEADER_BYTES:] for key, value in rotated(values).items()}
    return {key: value[:HEADER_BYTES] + payloads[key] for key, value in values.items()}


FORGERIES: dict[str, Callable[[Values], Values]] = {
    "with a checksum": lambda values: signed(_other_payloads(values), None),
    "with another secret": lambda values: signed(_other_payloads(values), None, auth=OTHER),
    "under an old MAC": _other_payloads,
    "copied from another block": rotated,
}


def test_what_the_engine_stores_is_authenticated_with_its_secret(
    engine: EngineProcess, stock: Stock, server: RedisServer
) -> None:
    resume_until_identical(engine, stock)
    with server.client() as client:
        values = read_values(client)
    assert values
    assert signed(values, None, auth=OURS) == values


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_value_is_a_miss_and_is_replaced(
    forge: Callable[[Values], Values], engine: EngineProcess, stock: Stock, server: RedisServer
) -> None:
    """Catches a build that checks no MAC, or one of the payload alone."""
    assert_refused_and_replaced(engine, stock, server, forge)
