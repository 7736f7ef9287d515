"""Redis that is stopped in its tracks: once that is found out, no request waits for it."""

import signal

import pytest

from tests.e2e.checked_engine import checked_engine
from tests.e2e.conversations import assert_same_tokens, replay
from tests.e2e.engine_process import EngineProcess, EngineSpec
from tests.e2e.stock import Stock, fill, resume_until_identical
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_BREAKER = {"failures": 2, "backoff_s": 0.05, "backoff_cap_s": 10.0}
_SIDES = ("scheduler", "worker")
_ROUNDS = 3
_MANY_TRIES = 50


def _engine(stock: Stock, url: str) -> EngineSpec:
    remote = {"kind": "redis", "url": url, "connect_timeout_s": 0.25, "breaker": _BREAKER}
    return stock.engine(url, remote=remote)


def _signal(redis: RedisServer, number: signal.Signals) -> None:
    assert redis.process is not None
    redis.process.send_signal(number)


def _breakers(engine: EngineProcess) -> dict[str, str]:
    """By side."""
    sides = engine.manage(op="status")["engine"]["tiers"]["remote"]["breakers"]
    assert isinstance(sides, dict)
    return sides


def _waits(engine: EngineProcess) -> float:
    """Lookups and loads so far: what a request can wait for."""
    kinds = ("spm:lookups|", "spm:loads|")
    return sum(n for key, n in engine.counters().items() if key.startswith(kinds))


def _cold(round_number: int) -> list[int]:
    """A prompt that nobody has seen."""
    return [3 + (7 * round_number + 11 * at) % 90 for at in range(200)]


@pytest.mark.parametrize("model", ["stock", "hybrid_stock"])
def test_while_redis_is_frozen_no_request_waits_and_then_it_is_used_again(
    model: str, redis: RedisServer, request: pytest.FixtureRequest
) -> None:
    """Catches a half-open breaker that makes a request its probe, and hits that are planned
    from memory while the workers' breaker is open."""
    stock: Stock = request.getfixturevalue(model)
    with checked_engine(_engine(stock, redis.tcp_url)) as engine:
        fill(engine, stock)
        _signal(redis, signal.SIGSTOP)
        try:
            assert_same_tokens(replay(engine, stock.again), stock.again)
            engine.settle()
            assert set(_breakers(engine).values()) != {"closed"}, "one side is enough"
            waits = _waits(engine)
            for number in range(_ROUNDS):
                assert engine.drop_gpu_cache()
                assert_same_tokens(replay(engine, stock.again), stock.again)
                engine.one(_cold(number))
            assert _waits(engine) == waits
            assert engine.counters()["spm:remote_skipped|breaker"] >= 2 * _ROUNDS
            gauges = engine.gauges()
            assert sum(gauges[f"spm:breaker_state|{side},closed"] for side in _SIDES) < 2
        finally:
            _signal(redis, signal.SIGCONT)
        resume_until_identical(engine, stock)
        engine.settle()
        assert _breakers(engine) == {"scheduler": "closed", "worker": "closed"}
        counters = engine.counters()
        assert sum(counters.get(f"spm:breaker_openings|{side}", 0) for side in _SIDES) >= 1


def test_new_prompts_stop_asking_a_store_that_is_frozen(stock: Stock, redis: RedisServer) -> None:
    """Catches a side that finds out for itself what the other side knows of."""
    with checked_engine(_engine(stock, redis.tcp_url)) as engine:
        _signal(redis, signal.SIGSTOP)
        try:
            for number in range(_MANY_TRIES):
                engine.one(_cold(number))
                if _breakers(engine)["scheduler"] != "closed":
                    break
            asked = _waits(engine)
            assert asked <= 2 * _BREAKER["failures"]
            for number in range(_MANY_TRIES, _MANY_TRIES + _ROUNDS):
                engine.one(_cold(number))
            assert _waits(engine) == asked
        finally:
            _signal(redis, signal.SIGCONT)
