"""Offload and prefetch on real vLLM and real Redis: a session whose blocks were all overwritten
resumes from the GPU pool, as if nothing had happened."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.e2e.checked_engine import checked_engine
from tests.e2e.conversations import assert_identical, assert_same_tokens, replay
from tests.e2e.engine_process import EngineProcess, EngineSpec
from tests.e2e.made_models import HYBRID
from tests.e2e.operations import (
    NOT_LOADED,
    Traffic,
    carry_out,
    leave,
    loaded,
    residency,
    start_afresh,
)
from tests.e2e.stock import PARTLY_TOKENS, Stock
from tests.redis_server import EXECUTABLE, RedisServer, running_redis

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_BLOCK = 32
_POOL_BLOCKS = 64
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


@on(*CASES)
@pytest.mark.fault("F10", breaks="an idle engine does not step for a prefetch")
@pytest.mark.fault("F30", breaks="a prefetch that is done is not noticed")
def test_a_prefetched_session_is_a_gpu_hit_for_every_full_block(place: Place) -> None:
    engine = place.engine
    leave(engine, place.stock, place.traffic)
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
    leave(engine, place.stock, place.traffic)
    exchange = place.stock.partly[_SESSIONS][0]
    with place.redis.client() as client:
        name = engine.stored_names(exchange.session)[-1][_BROKEN]
        value = bytearray(client.get(name))
        value[-1] ^= 0x10
        client.set(name, bytes(value))
    done = carry_out(engine, exchange.session, type="prefetch")
    assert done["status"] == "partial"
    assert _BROKEN <= done["done_blocks"] < done["blocks"]
    pooled = [r for r in residency(engine, exchange.session)["ranges"] if "gpu" in r["tiers"]]
    turn = replay(engine, [exchange])[0]
    assert_same_tokens([turn], [exchange])
    assert turn.outcome is not None
    if place.stock.spec.model.endswith(HYBRID):  # a window's blocks are of no use in part
        assert loaded(turn) == NOT_LOADED
    else:
        assert [(r["block_start"], r["block_end"]) for r in pooled] == [(0, _BROKEN)]
        assert turn.outcome["gpu_tokens"] == exchange.reference.cached_tokens
        assert turn.logprobs == exchange.reference.logprobs
    engine.check_integrity()
