"""Offload and prefetch on real vLLM and real Redis: a session whose blocks were all overwritten
resumes from the GPU pool, as if nothing had happened."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.e2e.checked_engine import checked_engine
from tests.e2e.conversations import assert_identical, replay
from tests.e2e.engine_process import EngineProcess, EngineSpec
from tests.e2e.operations import (
    NOT_LOADED,
    Traffic,
    carry_out,
    loaded,
    residency,
    start_afresh,
)
from tests.e2e.stock import PARTLY_TOKENS, Stock
from tests.redis_server import EXECUTABLE, RedisServer, running_redis

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_BLOCK = 32
_POOL_BLOCKS = 96
_SESSIONS = slice(1, 3)
"""Those whose prompt holds all full blocks of the session, so that its resume needs them all."""
_BROKEN = PARTLY_TOKENS // _BLOCK
"""The first block that is not in the pool in ``Stock.partly``."""


@dataclass(frozen=True)
class Case:
    """One engine; ``stock`` names the fixture that says what stock vLLM answers."""

    stock: str
    extra: tuple[tuple[str, Any], ...] = ()
    async_scheduling: bool = False

    def spec(self, stock: Stock, url: str) -> EngineSpec:
        spec = stock.engine(url, **dict(self.extra))
        return replace(spec, num_blocks=_POOL_BLOCKS, async_scheduling=self.async_scheduling)


REMOTE_ONLY = {
    "real": Case("real_stock", extra=(("save", "sessions"),)),
    "hybrid": Case("hybrid_stock"),
}
WITH_HOST = {
    "host-async": Case(
        "stock", extra=(("host_bytes", 256 << 20), ("save", "sessions")), async_scheduling=True
    ),
}
CASES = {**REMOTE_ONLY, **WITH_HOST}


def on(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", names, indirect=True, scope="module")


@dataclass(frozen=True)
class Place:
    """One engine for all tests of a case, with a Redis of its own."""

    stock: Stock
    redis: RedisServer
    engine: EngineProcess
    traffic: Traffic


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def shared(case: Case, request: pytest.FixtureRequest) -> Iterator[Place]:
    if EXECUTABLE is None:
        pytest.skip("no redis-server on the path")
    stock: Stock = request.getfixturevalue(case.stock)
    with running_redis() as redis, checked_engine(case.spec(stock, redis.tcp_url)) as engine:
        yield Place(stock, redis, engine, Traffic())


@pytest.fixture
def place(shared: Place) -> Place:
    start_afresh(shared.engine, shared.stock)
    return shared


def _leave(place: Place) -> None:
    """Each session has a turn, is offloaded, and loses every block in the pool to others."""
    replay(place.engine, place.stock.first)
    for exchange in place.stock.first:
        done = carry_out(place.engine, exchange.session, type="offload")
        assert done["status"] == "ok"
        assert done["done_blocks"] == done["blocks"] >= 6
    assert place.engine.gauges()["spm:sam_protected_blocks|"] == 0
    place.traffic.overwrite(place.engine)
    for exchange in place.stock.first:
        where = residency(place.engine, exchange.session)
        assert (where["gpu"], where["remote"]) == (0, where["blocks"])


@on(*CASES)
def test_a_prefetched_session_is_a_gpu_hit_for_every_full_block(place: Place) -> None:
    engine = place.engine
    _leave(place)
    exchanges = place.stock.again[_SESSIONS]
    for exchange in exchanges:
        done = carry_out(engine, exchange.session, type="prefetch")
        assert done["status"] == "ok"
        assert done["done_blocks"] == done["blocks"]
    turns = replay(engine, exchanges)
    assert_identical(turns, exchanges)
    for turn, exchange in zip(turns, exchanges, strict=True):
        computed = len(exchange.prompt) + len(turn.token_ids) - 1
        assert turn.cached_tokens == computed // _BLOCK * _BLOCK, "every full block"
        assert loaded(turn) == NOT_LOADED
    engine.check_integrity()


@on(*REMOTE_ONLY)
def test_a_corrupt_value_ends_a_prefetch_and_is_never_published(place: Place) -> None:
    engine = place.engine
    _leave(place)
    exchange = place.stock.partly[_SESSIONS][0]
    with place.redis.client() as client:
        name = engine.stored_names(exchange.session)[-1][_BROKEN]
        value = bytearray(client.get(name))  # type: ignore[arg-type]
        value[-1] ^= 0x10
        client.set(name, bytes(value))
    done = carry_out(engine, exchange.session, type="prefetch")
    assert done["status"] == "partial"
    assert _BROKEN <= done["done_blocks"] < done["blocks"]
    ranges = residency(engine, exchange.session)["ranges"]
    in_pool = [r for r in ranges if "gpu" in r["tiers"]]
    turn = replay(engine, [exchange])[0]
    if "hybrid" not in place.stock.spec.model:
        assert [(r["block_start"], r["block_end"]) for r in in_pool] == [(0, _BROKEN)]
        assert_identical([turn], [exchange])
    assert turn.outcome is not None
    engine.check_integrity()
