"""The main promise: more than twenty multi-turn prompts give exactly what stock vLLM gives
for its own prefix hits, whichever tier the session comes back from."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.checked_engine import checked_engine
from tests.e2e.conversations import (
    Exchange,
    assert_identical,
    record,
    record_again,
    replay,
)
from tests.e2e.engine_process import EngineProcess, EngineSpec
from tests.e2e.made_models import FULL, HYBRID, REAL, made_model
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_HOST_BYTES = 512 << 20
_BIG_POOL_TOKENS = 8_000
_MAX_MODEL_LEN = 512


@dataclass(frozen=True)
class Case:
    """One engine configuration; ``small_pool_tokens`` has room for one session and a bit."""

    name: str
    model: str = FULL
    block_size: int = 32
    small_pool_tokens: int = 640
    engine: tuple[tuple[str, Any], ...] = ()
    restarts: bool = False
    """Also with the first engine gone; to the store that is one more second engine."""

    def spec(self, models: Path, pool_tokens: int, connector: dict[str, Any] | None) -> EngineSpec:
        """The engine of this case with a pool of its own size."""
        return EngineSpec(
            model=str(made_model(self.model, models)),
            connector=connector,
            block_size=self.block_size,
            num_blocks=pool_tokens // self.block_size,
            max_model_len=_MAX_MODEL_LEN,
            **dict(self.engine),
        )


CASES = [
    Case("block-32", restarts=True),
    Case("block-128", block_size=128, small_pool_tokens=1024),
    Case("two-groups", model=HYBRID, small_pool_tokens=1280, restarts=True),
    Case("real-model", model=REAL),
    Case("chunked-prefill", engine=(("max_num_batched_tokens", 64),)),
    Case("async-scheduling", engine=(("async_scheduling", True),)),
    Case("tensor-parallel-2", engine=(("tensor_parallel_size", 2),)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_and_logprobs_are_those_of_a_gpu_hit(
    case: Case, models: Path, redis: RedisServer
) -> None:
    with EngineProcess(case.spec(models, _BIG_POOL_TOKENS, None)) as stock:
        recorded = record(stock, sessions=7, turns=3)
        resumed = record_again(stock, recorded[1] + recorded[2])
    assert sum(map(len, recorded)) >= 20
    remote = {"kind": "redis", "url": redis.tcp_url}

    both_tiers = {"host_bytes": _HOST_BYTES, "remote": remote}
    first_spec = case.spec(models, case.small_pool_tokens, both_tiers)
    with checked_engine(first_spec) as engine:
        for exchanges in recorded:  # cold, then evicted by the others and back from the host
            assert_identical(replay(engine, exchanges), exchanges)
        _assert_loaded(engine, recorded[1] + recorded[2], "host")
        assert engine.gauges()["spm:sessions|"] == 7

        only_remote = {"host_bytes": 0, "remote": remote}
        second_spec = case.spec(models, case.small_pool_tokens, only_remote)
        with checked_engine(second_spec) as second:  # while the first is still running
            assert_identical(replay(second, resumed, with_sessions=False), resumed)
            _assert_loaded(second, resumed, "remote")
            assert second.gauges()["spm:sessions|"] == 0

    if case.restarts:
        with checked_engine(replace(first_spec, own_interpreter=True)) as engine:
            assert_identical(replay(engine, resumed), resumed)
            _assert_loaded(engine, resumed, "remote", "host")


def _assert_loaded(engine: EngineProcess, exchanges: list[Exchange], *tiers: str) -> None:
    """At least half of what these prompts hit came from ``tiers``, some of it from each;
    the rest was still in the pool."""
    hit_tokens = sum(exchange.reference.cached_tokens for exchange in exchanges)
    engine.settle()
    loaded = [engine.counters().get(f"spm:loaded_tokens|{tier}", 0) for tier in tiers]
    assert all(loaded)
    assert sum(loaded) >= hit_tokens / 2
