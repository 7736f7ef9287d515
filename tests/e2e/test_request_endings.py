"""Aborts, preemption and requests without a session: nothing is left, nothing is wrong."""

from dataclasses import replace

import pytest

from tests.e2e.checked_engine import checked_engine
from tests.e2e.conversations import assert_identical, assert_same_tokens, replay
from tests.e2e.engine_process import EngineProcess
from tests.e2e.stock import Stock, fill
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_ABORT_AFTER_STEPS = range(9)


@pytest.mark.fault("F1", breaks="the record of a request that was aborted stays")
@pytest.mark.parametrize("model", ["stock", "hybrid_stock"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_request_may_be_aborted_at_any_step(
    async_scheduling: bool, model: str, redis: RedisServer, request: pytest.FixtureRequest
) -> None:
    stock: Stock = request.getfixturevalue(model)
    spec = replace(
        stock.engine(redis.tcp_url), async_scheduling=async_scheduling, max_num_batched_tokens=64
    )
    with checked_engine(spec) as engine:
        for steps in _ABORT_AFTER_STEPS:  # while computing in chunks and saving
            engine.abort_after_steps(stock.first[0].prompt[steps:], "aborted", steps)
            engine.check_integrity()
        fill(engine, stock)
        for steps in _ABORT_AFTER_STEPS:  # while being looked up, loaded, computed
            engine.abort_after_steps(stock.again[1].prompt, "aborted", steps)
            engine.check_integrity()
            assert engine.drop_gpu_cache()
        assert engine.counters()["spm:loaded_blocks|remote"] > 0
        assert_same_tokens(replay(engine, stock.again), stock.again)


@pytest.mark.fault("F2", breaks="every allocation is taken to be for a load that was planned")
def test_preemption_in_a_tiny_pool_changes_no_token(stock: Stock, redis: RedisServer) -> None:
    """Three requests whose answers do not fit together: vLLM preempts and resumes them."""
    prompts = [exchange.prompt for exchange in stock.first]
    answer_tokens = 150
    with EngineProcess(stock.spec) as engine:
        expected = [engine.one(prompt, None, answer_tokens) for prompt in prompts]
    # One request's longest: 234 tokens and its answer, 12 blocks; the null block; a few more.
    spec = replace(stock.engine(redis.tcp_url, host_bytes=1 << 28), num_blocks=20)
    with checked_engine(spec) as engine:
        turns = engine.generate(prompts, ["a", "b", "c"], answer_tokens)
        assert [turn.token_ids for turn in turns] == [turn.token_ids for turn in expected]
        assert engine.preemptions() > 0
        assert engine.counters()["spm:loaded_blocks|host"] > 0


def test_without_a_session_nothing_is_tracked_and_all_is_the_same(
    stock: Stock, redis: RedisServer
) -> None:
    with checked_engine(stock.engine(redis.tcp_url, host_bytes=1 << 28)) as engine:
        assert_identical(replay(engine, stock.first, with_sessions=False), stock.first)
        engine.settle()
        assert engine.drop_gpu_cache()
        turns = replay(engine, stock.again, with_sessions=False)
        assert_identical(turns, stock.again)
        assert [turn.outcome for turn in turns] == [None] * len(turns)
        assert engine.gauges()["spm:sessions|"] == 0
        assert engine.gauges()["spm:session_keys|"] == 0


def test_only_sessions_are_saved_when_asked_for(stock: Stock, redis: RedisServer) -> None:
    with checked_engine(stock.engine(redis.tcp_url, save="sessions")) as engine:
        replay(engine, stock.first[:1], with_sessions=False)
        engine.settle()
        assert engine.counters().get("spm:saved_blocks|remote", 0) == 0
        replay(engine, stock.first[1:2], with_sessions=True)
        engine.settle()
        assert engine.counters()["spm:saved_blocks|remote"] > 0


@pytest.mark.fault("F14", breaks="a reference to what was read is kept")
def test_a_response_says_where_its_prompt_came_from(stock: Stock, redis: RedisServer) -> None:
    with checked_engine(stock.engine(redis.tcp_url)) as engine:
        fill(engine, stock)
        exchange = stock.again[0]
        turn = engine.one(exchange.prompt, exchange.session)
        loaded = exchange.reference.cached_tokens
        assert turn.outcome == {
            "session_id": exchange.session,
            "class": "associated",
            "ttl_s": 0.0,
            "prompt_tokens": len(exchange.prompt),
            "gpu_tokens": 0,
            "host_tokens": 0,
            "remote_tokens": loaded,
            "computed_tokens": len(exchange.prompt) - loaded,
        }


@pytest.mark.fault("F34", breaks="an engine's values have the same names before and after a reset")
def test_a_reset_with_the_connector_makes_stored_values_unreachable(
    stock: Stock, redis: RedisServer
) -> None:
    """New weights, say: what was stored before must not come back."""
    with checked_engine(stock.engine(redis.tcp_url, host_bytes=1 << 28)) as engine:
        fill(engine, stock)
        assert engine.drop_gpu_cache(reset_connector=True)
        turns = replay(engine, stock.first)
        assert_identical(turns, stock.first)
