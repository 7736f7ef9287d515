"""Two engines and one Redis: what one began the other goes on with, and neither deletes what
the other still keeps."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.e2e.checked_engine import checked_engine
from tests.e2e.conversations import assert_identical, replay
from tests.e2e.engine_process import EngineProcess, EngineSpec
from tests.e2e.operations import NOT_LOADED, carry_out, end_session, loaded, residency
from tests.e2e.stock import Stock
from tests.redis_server import EXECUTABLE, RedisServer, running_redis

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_GRACE_S = 2
_EXTRA: dict[str, Any] = {
    "save": "sessions",
    "keep_alive": {"interval_s": 1, "delete_grace_s": _GRACE_S},
}
_PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    if EXECUTABLE is None:
        pytest.skip("no redis-server on the path")
    with running_redis() as server:
        yield server


@pytest.fixture(scope="module")
def first(hybrid_stock: Stock, server: RedisServer) -> Iterator[EngineProcess]:
    """The engine on which the sessions began."""
    with checked_engine(hybrid_stock.engine(server.tcp_url, **_EXTRA)) as engine:
        replay(engine, hybrid_stock.first)
        engine.settle()
        yield engine


Change = Callable[[EngineSpec], EngineSpec]


def _with(**connector: Any) -> Change:  # noqa: ANN401
    return lambda spec: replace(spec, connector={**(spec.connector or {}), **connector})


_OTHERS: dict[str, Change] = {
    "dtype": lambda spec: replace(spec, extra={"dtype": "bfloat16"}),
    "namespace": _with(namespace="another"),
}


@pytest.mark.parametrize("change", _OTHERS.values(), ids=_OTHERS)
def test_an_engine_of_another_kind_finds_nothing(
    change: Change, first: EngineProcess, hybrid_stock: Stock, server: RedisServer
) -> None:
    exchange = hybrid_stock.first[1]
    assert residency(first, exchange.session)["remote"] > 0
    with checked_engine(change(hybrid_stock.engine(server.tcp_url, **_EXTRA))) as other:
        answer = other.manage(op="get_session", session_id=exchange.session)
        assert answer["status"] == "not_found"
        assert carry_out(other, exchange.session, type="prefetch")["status"] == "not_found"
        assert other.one(exchange.prompt, exchange.session).cached_tokens == 0


@pytest.mark.fault("F27", breaks="names depend on the process")
def test_a_session_goes_on_on_another_engine_and_outlives_its_first(
    first: EngineProcess, hybrid_stock: Stock, server: RedisServer
) -> None:
    mine, kept = hybrid_stock.first[1].session, hybrid_stock.first[2].session
    resumed = hybrid_stock.again[2:]
    spec = replace(hybrid_stock.engine(server.tcp_url, **_EXTRA), own_interpreter=True)
    with checked_engine(spec) as second:
        found = second.manage(op="get_session", session_id=kept)["session"]
        where = found["residency"]
        assert found["origin"] == "manifest"
        assert where["remote"] == found["blocks"] == residency(first, kept)["blocks"] > 0
        assert (where["gpu"], second.gauges()["spm:sessions|"]) == (0, 0)

        done = carry_out(second, kept, type="prefetch")
        assert done["status"] == "ok"
        assert done["done_blocks"] == done["blocks"] > 0
        turns = replay(second, resumed)
        assert_identical(turns, resumed)
        assert loaded(turns[0]) == NOT_LOADED
        found = second.manage(op="get_session", session_id=kept)["session"]
        assert found["origin"] == "local"

        _assert_a_lease(first, second, server, mine, kept)
        assert second.drop_gpu_cache()
        turns = replay(second, resumed)
        assert_identical(turns, resumed)
        assert loaded(turns[0]) == (0, turns[0].cached_tokens)


def _assert_a_lease(
    first: EngineProcess, second: EngineProcess, server: RedisServer, mine: str, kept: str
) -> None:
    """What the first engine gives up stays as long as the second one wants it."""
    held = _names(second, kept)
    alone = _names(first, mine) - held
    assert held >= _names(first, kept)
    assert held
    assert alone
    for session in (mine, kept):
        assert end_session(first, session)["ended"] == [session]
    give_up_s = time.monotonic() + _PATIENCE_S
    with server.client() as client:
        while client.exists(*alone):
            assert time.monotonic() < give_up_s
            time.sleep(0.1)
        time.sleep(_GRACE_S)
        assert client.exists(*held) == len(held)
        assert min(client.ttl(name) for name in held) > _GRACE_S, "its lifetime was restored"


def _names(engine: EngineProcess, session: str) -> set[str]:
    return {name for names in engine.stored_names(session) for name in names}
