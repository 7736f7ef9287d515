"""Real vLLM over a Redis into which every kind of fault is put, by configuration."""

import pytest

from tests.e2e.checked_engine import checked_engine
from tests.e2e.conversations import assert_same_tokens, replay
from tests.e2e.stock import Stock, fill
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_ROUNDS = 8


def _faulty(stock: Stock, redis: RedisServer, **faults: object) -> dict[str, object]:
    remote = stock.engine(redis.tcp_url).connector
    assert remote is not None
    return {"remote": {**remote["remote"], "faults": faults}}


def test_all_kinds_at_once_change_no_token(stock: Stock, redis: RedisServer) -> None:
    faults = _faulty(stock, redis, seed=1, share=0.08, delay_s=0.05, slow_start_s=0.5)
    with checked_engine(stock.engine(redis.tcp_url, **faults)) as engine:
        fill(engine, stock)
        for _ in range(_ROUNDS):
            assert_same_tokens(replay(engine, stock.again), stock.again)
            engine.settle()
            assert engine.drop_gpu_cache()
        counters = engine.counters()
        assert counters.get("spm:loads|ok", 0) > 0
        assert counters.get("spm:loads|failed", 0) > 0


def test_a_lying_store_is_a_miss(stock: Stock, redis: RedisServer) -> None:
    faults = _faulty(stock, redis, kinds="short_read,flipped_bit", share=1.0)
    with checked_engine(stock.engine(redis.tcp_url, **faults)) as engine:
        fill(engine, stock)
        assert_same_tokens(replay(engine, stock.again), stock.again)
        counters = engine.counters()
        assert counters.get("spm:load_failed_blocks|corrupt", 0) > 0
        assert counters.get("spm:loaded_blocks|remote", 0) == 0
