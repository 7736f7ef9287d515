"""Stock vLLM's answers, and the same model behind Redis alone, ready for damage."""

from dataclasses import dataclass, replace
from pathlib import Path

from tests.e2e.conversations import (
    Exchange,
    assert_identical,
    assert_same_tokens,
    record,
    record_again,
    replay,
)
from tests.e2e.engine_process import EngineProcess, EngineSpec
from tests.e2e.made_models import made_model

_PATIENCE = {  # short waits, and no store is given up for long
    "load_deadline_s": 1.0,
    "batch_deadline_s": 0.5,
    "lookup_deadline_s": 0.25,
    "save_deadline_s": 1.0,
}
_EAGER = {"failures": 1000, "backoff_s": 0.01, "backoff_cap_s": 0.05}
_MANY_TRIES = 200
PARTLY_TOKENS = 96


@dataclass(frozen=True)
class Stock:
    """What stock vLLM answers: to a conversation, and to its last prompts once more."""

    spec: EngineSpec
    first: list[Exchange]
    again: list[Exchange]
    partly: list[Exchange]
    """The same again, where only the first ``PARTLY_TOKENS`` of each were in the pool."""

    def engine(self, url: str, **extra: object) -> EngineSpec:
        """The same model behind Redis alone."""
        remote = {"kind": "redis", "url": url, "connect_timeout_s": 0.25, "breaker": _EAGER}
        connector = {"host_bytes": 0, "remote": remote, **_PATIENCE, **extra}
        return replace(self.spec, connector=connector)


def record_stock(model: str, models: Path) -> Stock:
    spec = EngineSpec(model=str(made_model(model, models)), max_model_len=512)
    with EngineProcess(spec) as engine:
        first = record(engine, sessions=3, turns=1)[0]
        again = record_again(engine, first)
        assert engine.drop_gpu_cache()
        for exchange in first:  # one token more, as vLLM always computes the last one
            engine.one(exchange.prompt[: PARTLY_TOKENS + 1])
        return Stock(spec, first, again, record_again(engine, first))


def fill(engine: EngineProcess, stock: Stock) -> None:
    """Everything computed once and stored; nothing left in the GPU pool."""
    replay(engine, stock.first)
    engine.settle()
    assert engine.drop_gpu_cache()


def resume_until_identical(engine: EngineProcess, stock: Stock) -> None:
    """Service is back when a resume gives the full hit again."""
    for _ in range(_MANY_TRIES):
        engine.settle()
        assert engine.drop_gpu_cache()
        turns = replay(engine, stock.again)
        assert_same_tokens(turns, stock.again)
        if all(
            t.cached_tokens == e.reference.cached_tokens
            for t, e in zip(turns, stock.again, strict=True)
        ):
            assert_identical(turns, stock.again)
            return
    raise AssertionError("the store is back and is not used")
