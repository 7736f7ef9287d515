"""KV in another type than the model's: it comes back as it was, and is never taken for another.

On CPUs vLLM 0.32 takes ``auto`` and fp8 in its two forms; the types of GPUs are told apart by name
in the fingerprint, and by their layouts.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.checked_engine import checked_engine
from tests.e2e.conversations import assert_identical, record, record_again, replay
from tests.e2e.engine_process import EngineProcess, EngineSpec
from tests.e2e.made_models import FULL, made_model
from tests.e2e.stock import Stock, fill
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_DTYPES = ("fp8_e4m3", "fp8_e5m2")


def _stock(models: Path, dtype: str) -> Stock:
    spec = EngineSpec(
        model=str(made_model(FULL, models)), max_model_len=512, extra={"kv_cache_dtype": dtype}
    )
    with EngineProcess(spec) as engine:
        first = record(engine, sessions=2, turns=1)[0]
        return Stock(spec, first, record_again(engine, first), [])


def test_kv_comes_back_as_it_was_and_only_to_its_own_kind(models: Path, redis: RedisServer) -> None:
    stocks = [_stock(models, dtype) for dtype in _DTYPES]
    for stock in stocks:
        with checked_engine(stock.engine(redis.tcp_url)) as engine:
            turns = replay(engine, stock.first)  # after the first kind was stored
            assert_identical(turns, stock.first)
            fill(engine, stock)
            assert_identical(replay(engine, stock.again), stock.again)
            assert engine.counters()["spm:loaded_blocks|remote"] > 0
    other = replace(stocks[0].engine(redis.tcp_url), extra={})
    with checked_engine(other) as engine:
        assert engine.one(stocks[0].first[0].prompt).cached_tokens == 0
