"""Models and servers for the end-to-end tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.made_models import FULL, HYBRID, REAL
from tests.e2e.stock import Stock, record_stock
from tests.redis_server import EXECUTABLE, RedisServer, running_redis


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where made models are kept for this run."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A real Redis server of the test's own."""
    if EXECUTABLE is None:
        pytest.skip("no redis-server on the path")
    with running_redis() as server:
        yield server


@pytest.fixture(scope="session")
def stock(models: Path) -> Stock:
    """One KV cache group."""
    return record_stock(FULL, models)


@pytest.fixture(scope="session")
def hybrid_stock(models: Path) -> Stock:
    """Two KV cache groups."""
    return record_stock(HYBRID, models)


@pytest.fixture(scope="session")
def real_stock(models: Path) -> Stock:
    """The real small model."""
    return record_stock(REAL, models)
