"""Whatever happens to Redis, requests finish with the right tokens and the engine goes on."""

import itertools
from dataclasses import replace

import pytest

from tests.e2e.checked_engine import checked_engine
from tests.e2e.conversations import assert_same_tokens, replay
from tests.e2e.stock import Stock, fill, resume_until_identical
from tests.e2e.wire import Relay, Wire
from tests.redis_server import RedisServer, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_VALUE_BYTES = 512 + 131_072  # header, and 32 tokens of the made model's KV


# In a lookup's answers, in a header, at a payload's edges, in the middle of later values.
_OFFSETS = (0, 3, 41, 500, _VALUE_BYTES // 2, _VALUE_BYTES, int(3.5 * _VALUE_BYTES))


@pytest.mark.parametrize("model", ["stock", "hybrid_stock"])
def test_the_wire_may_break_at_any_byte_of_a_load(
    model: str, redis: RedisServer, request: pytest.FixtureRequest
) -> None:
    stock: Stock = request.getfixturevalue(model)
    breaks = itertools.product((Wire.CUT, Wire.FREEZE), _OFFSETS)
    with Relay(redis.port) as relay, checked_engine(stock.engine(relay.url)) as engine:
        fill(engine, stock)
        for exchange, (mode, offset) in zip(itertools.cycle(stock.again), breaks, strict=False):
            relay.set(mode, offset)
            assert_same_tokens(replay(engine, [exchange]), [exchange])
            relay.set(Wire.FLOW)
            engine.settle()
            assert engine.drop_gpu_cache()
        counters = engine.counters()
        assert counters.get("spm:loads|failed", 0) > 0
        assert counters.get("spm:lookups|failed", 0) > 0
        resume_until_identical(engine, stock)


def test_others_go_on_while_a_load_hangs(stock: Stock, redis: RedisServer) -> None:
    with Relay(redis.port) as relay, checked_engine(stock.engine(relay.url)) as engine:
        fill(engine, stock)
        engine.one(stock.again[1].prompt)  # in the GPU pool: needs nothing from the store
        relay.set(Wire.FREEZE, 4096)
        hanging, other = engine.generate([stock.again[0].prompt, stock.again[1].prompt])
        assert (other.finish_rank, hanging.finish_rank) == (0, 1)
        relay.set(Wire.FLOW)


@pytest.mark.fault("F5", breaks="an answer is looked up among the requests of this step")
@pytest.mark.fault("F22", breaks="the load of a request that was aborted is not answered")
def test_a_request_may_go_while_its_load_hangs(stock: Stock, redis: RedisServer) -> None:
    with Relay(redis.port) as relay, checked_engine(stock.engine(relay.url)) as engine:
        fill(engine, stock)
        relay.set(Wire.FREEZE, 4096)
        engine.abort_after_steps(stock.again[0].prompt, "gone", 50)
        assert engine.gauges()["spm:loads_in_flight|"] == 1
        engine.check_integrity()
        relay.set(Wire.FLOW)
        resume_until_identical(engine, stock)


@pytest.mark.fault("F13", breaks="what a lookup found is taken to be there")
def test_redis_killed_and_restarted_empty_is_filled_and_used_again(
    stock: Stock, redis: RedisServer
) -> None:
    with checked_engine(stock.engine(redis.tcp_url)) as engine:
        fill(engine, stock)
        redis.stop()
        assert_same_tokens(replay(engine, stock.again), stock.again)
        redis.start()
        resume_until_identical(engine, stock)


@pytest.mark.fault("F6", breaks="the store is waited for at the start")
def test_redis_that_was_never_there_is_used_once_it_comes(stock: Stock, redis: RedisServer) -> None:
    late = replace(redis, port=free_port(), process=None)
    with checked_engine(stock.engine(late.tcp_url)) as engine:
        assert_same_tokens(replay(engine, stock.again), stock.again)
        late.start()
        try:
            resume_until_identical(engine, stock)
        finally:
            late.stop()
