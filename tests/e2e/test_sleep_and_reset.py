"""vLLM's sleep and its resets, at any moment: nothing of before is believed after it.

A CPU has no memory to give back: vLLM pauses, aborts, resets all caches with the connector's, and
leaves the KV pool as it was. So the tests overwrite it, as on a GPU it would be gone.
"""

import random
from typing import Any

import pytest

from tests.e2e.checked_engine import checked_engine
from tests.e2e.conversations import assert_identical, assert_same_tokens, replay
from tests.e2e.engine_process import EngineProcess
from tests.e2e.operations import ask, residency
from tests.e2e.stock import Stock, fill
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_HOST: dict[str, Any] = {"host_bytes": 1 << 28}
_STEPS = range(4)
"""After none a request is queued, after three its load has ended."""


@pytest.mark.parametrize("level", [1, 2])
def test_after_a_sleep_nothing_of_before_is_believed(
    level: int, stock: Stock, redis: RedisServer
) -> None:
    """It resets the connector's caches too: what was stored may be of other weights by now."""
    with checked_engine(stock.engine(redis.tcp_url, **_HOST)) as engine:
        for steps in _STEPS:
            fill(engine, stock)
            engine.start(stock.again[1].prompt, "asleep", steps=steps)
            engine.sleep(level)
            _assert_nothing_moves(engine, stock)
            engine.wake_up()
            engine.settle()
            engine.check_integrity()
            assert residency(engine, stock.again[0].session)["gpu"] == 0
            assert_identical(replay(engine, stock.first), stock.first)


def _assert_nothing_moves(engine: EngineProcess, stock: Stock) -> None:
    """Whatever is asked for."""
    ask(engine, stock.again[0].session, type="prefetch")
    engine.settle()
    assert residency(engine, stock.again[0].session)["gpu"] == 0


def test_a_pause_forgets_nothing(stock: Stock, redis: RedisServer) -> None:
    """Level 0: the pool stays."""
    with checked_engine(stock.engine(redis.tcp_url, **_HOST)) as engine:
        replay(engine, stock.first)
        engine.sleep(0)
        engine.wake_up()
        turns = replay(engine, stock.again)
        assert_identical(turns, stock.again)
        assert engine.counters().get("spm:loaded_blocks|host", 0) == 0


@pytest.mark.fault("F32", breaks="only the first group is loaded")
@pytest.mark.parametrize("reset_connector", [False, True])
@pytest.mark.parametrize("model", ["stock", "hybrid_stock"])
def test_a_reset_while_loads_and_saves_are_on_their_way_changes_no_token(
    model: str, reset_connector: bool, redis: RedisServer, request: pytest.FixtureRequest
) -> None:
    stock: Stock = request.getfixturevalue(model)
    rng = random.Random(3)
    with checked_engine(stock.engine(redis.tcp_url, **_HOST)) as engine:
        for steps in _STEPS:
            fill(engine, stock)
            exchange = rng.choice(stock.again)
            tokens = len(exchange.reference.token_ids)
            running = engine.start(exchange.prompt, exchange.session, tokens, steps)
            engine.drop_gpu_cache(reset_connector)  # False, if the request has blocks by now
            turn = engine.finish(running)
            assert turn.token_ids == exchange.reference.token_ids
            engine.drop_gpu_cache(reset_connector)  # with its saves on their way
            assert_same_tokens(replay(engine, stock.again), stock.again)
            engine.check_integrity()
