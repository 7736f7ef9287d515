"""Hints on real vLLM: what an application says decides which blocks a small pool keeps, and
never which tokens come out."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.checked_engine import checked_engine
from tests.e2e.conversations import tokens
from tests.e2e.engine_process import EngineProcess, EngineSpec, Turn
from tests.e2e.made_models import FULL, HYBRID, REAL, made_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_BLOCK = 32
_SMALL_POOL, _BIG_POOL = {REAL: 24, HYBRID: 44, FULL: 24}, 200
"""Blocks; a small pool has room for the session and two or three others."""
_SESSION_TOKENS, _OTHER_TOKENS, _NUM_OTHERS = 230, 150, 8
_HINTS_ONLY: dict[str, Any] = {"host_bytes": 0}
_TTL_S = 300
_PROTECT = {"cache_control": {"type": "ephemeral", "ttl": _TTL_S}}


@dataclass(frozen=True)
class Script:
    """The session's two turns, the traffic of others, and stock vLLM's prefix hit."""

    spec: EngineSpec
    small_pool: int
    first: list[int]
    second: list[int]
    others: list[list[int]]
    reference: Turn
    stock_hits: list[int]
    """Cached tokens of the others and of the second turn, on stock vLLM's small pool."""

    def small(self, connector: dict[str, Any] | None = None) -> EngineSpec:
        return replace(self.spec, num_blocks=self.small_pool, connector=connector or _HINTS_ONLY)

    def press(self, engine: EngineProcess) -> list[int]:
        """Traffic without hints, more than the pool holds."""
        return [engine.one(prompt).cached_tokens for prompt in self.others]

    def resume(self, engine: EngineProcess) -> Turn:
        return engine.one(self.second, "x")


def _record(model: str, models: Path) -> Script:
    spec = EngineSpec(model=str(made_model(model, models)), max_model_len=512, num_blocks=_BIG_POOL)
    rng = random.Random(11)
    first = tokens(rng, _SESSION_TOKENS)
    others = [tokens(rng, _OTHER_TOKENS) for _ in range(_NUM_OTHERS)]
    with EngineProcess(spec) as stock:
        reply = stock.one(first)
        second = [*first, *reply.token_ids, *tokens(rng, 40)]
        reference = stock.one(second)
    assert reference.cached_tokens >= 7 * _BLOCK
    with EngineProcess(replace(spec, num_blocks=_SMALL_POOL[model])) as stock:
        stock.one(first)
        hits = [stock.one(prompt).cached_tokens for prompt in others]
        hits.append(stock.one(second).cached_tokens)
    assert hits[-1] == 0, "the traffic is meant to displace the session"
    return Script(spec, _SMALL_POOL[model], first, second, others, reference, hits)


def on(*models: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("script", models, indirect=True, scope="module")


@pytest.fixture(scope="module")
def script(request: pytest.FixtureRequest, models: Path) -> Script:
    return _record(request.param, models)


@pytest.fixture(scope="module")
def small_engine(script: Script) -> Iterator[EngineProcess]:
    with checked_engine(script.small()) as engine:
        yield engine


@pytest.fixture
def engine(small_engine: EngineProcess) -> EngineProcess:
    """One engine for all tests of a model, as if it were new."""
    for session in "xy":
        small_engine.manage(op="end_session", session_id=session, operation_id=str(random.random()))
    small_engine.settle()
    assert small_engine.drop_gpu_cache()
    small_engine.one([5])  # the step in which the reset is noticed
    assert small_engine.gauges()["spm:sam_records|"] == 0
    return small_engine


def _assert_hit(turn: Turn, script: Script) -> None:
    assert turn.cached_tokens == script.reference.cached_tokens
    assert turn.token_ids == script.reference.token_ids
    assert turn.logprobs == script.reference.logprobs


@on(REAL, HYBRID)
def test_a_protected_session_is_still_a_gpu_hit_after_pressure(
    script: Script, engine: EngineProcess
) -> None:
    turn = engine.one(script.first, "x", hint=_PROTECT)
    assert turn.outcome is not None
    assert (turn.outcome["class"], turn.outcome["ttl_s"]) == ("soon", _TTL_S)
    script.press(engine)
    session = engine.manage(op="get_session", session_id="x")["session"]
    assert session["residency"]["gpu"] == session["blocks"] > 0
    assert 0 < session["ttl_left_s"] <= _TTL_S
    _assert_hit(script.resume(engine), script)
    assert engine.counters().get("spm:hints|late", 0) == 0


@on(REAL, HYBRID)
def test_without_hints_the_pool_behaves_as_stock(script: Script, engine: EngineProcess) -> None:
    engine.one(script.first)
    hits = script.press(engine)
    hits.append(engine.one(script.second).cached_tokens)
    assert hits == script.stock_hits
    assert engine.gauges()["spm:sam_records|"] == 0


@on(REAL)
def test_after_the_ttl_it_behaves_as_stock(script: Script, engine: EngineProcess) -> None:
    engine.one(script.first, "x", hint=_PROTECT)
    assert engine.gauges()["spm:sam_protected_blocks|"] > 0
    engine.let_time_pass(_TTL_S + 1)
    hits = script.press(engine)
    assert engine.gauges()["spm:sam_protected_blocks|"] == 0
    turn = engine.one(script.second)
    assert [*hits, turn.cached_tokens] == script.stock_hits
    assert turn.token_ids == script.reference.token_ids


@on(REAL, HYBRID)
def test_what_is_finished_goes_first(script: Script, engine: EngineProcess) -> None:
    older = script.others[0]
    engine.one(older)
    engine.one(script.first, "x", hint={"state": "finished"})
    assert engine.gauges()["spm:sam_blocks|finished"] > 0
    # Stock vLLM would now take never used blocks, then those of ``older``.
    engine.one(script.others[1])
    assert engine.one(older).cached_tokens >= 4 * _BLOCK
    turn = script.resume(engine)
    assert turn.cached_tokens < script.reference.cached_tokens
    assert turn.token_ids == script.reference.token_ids


@on(REAL)
def test_what_a_finished_session_shares_stays(script: Script, engine: EngineProcess) -> None:
    engine.one(script.first, "x", hint=_PROTECT)
    engine.one(script.first[:200] + script.others[0][:50], "y", hint=_PROTECT)
    engine.one(script.first[:200] + script.others[1][:50], "y", hint={"state": "finished"})
    script.press(engine)
    _assert_hit(script.resume(engine), script)


@on(REAL)
def test_a_management_request_acts_without_the_model(script: Script, engine: EngineProcess) -> None:
    engine.one(script.first, "x", hint={})
    hint = {"session_id": "x", **_PROTECT}
    answer = engine.manage(op="apply", operation_id="retain", hint=hint)
    assert (answer["status"], answer["retention"]["class"]) == ("ok", "soon")
    script.press(engine)
    _assert_hit(script.resume(engine), script)
    hint = {"session_id": "x", "context_management": {"edits": [{"type": "evict"}]}}
    answer = engine.manage(op="apply", operation_id="evict", hint=hint)
    assert answer["edits"][0]["status"] == "ok"
    assert engine.gauges()["spm:sam_blocks|finished"] > 0
    assert engine.manage(op="apply", operation_id="evict", hint=hint)["duplicate"]
    script.press(engine)
    assert engine.one(script.second).cached_tokens < script.reference.cached_tokens


@on(REAL)
def test_hints_and_a_host_tier_work_together(script: Script) -> None:
    with checked_engine(script.small({"host_bytes": 256 << 20})) as engine:
        engine.one(script.first, "x", hint=_PROTECT)
        script.press(engine)
        turn = script.resume(engine)
        _assert_hit(turn, script)
        assert turn.outcome is not None
        assert turn.outcome["gpu_tokens"] == turn.cached_tokens, "nothing had to be loaded"
        engine.manage(op="end_session", session_id="x", tree=False, operation_id="1")
        script.press(engine)
        turn = engine.one(script.second, "x")
        assert turn.token_ids == script.reference.token_ids
        assert turn.cached_tokens >= script.reference.cached_tokens
        assert turn.outcome is not None
        assert turn.outcome["host_tokens"] > 0


@on(FULL)
def test_everything_protected_for_an_hour_delays_nobody(script: Script) -> None:
    """Same order of completion, same preemptions, same tokens as stock vLLM."""
    prompts = script.others * 2
    spec = replace(script.small(), max_num_seqs=4)
    with EngineProcess(replace(spec, connector=None)) as stock:
        expected = stock.generate(prompts, None, 24)
        preemptions = stock.preemptions()
    hint = {"cache_control": {"ttl": 3600}, "expected_resume_s": 1}
    with checked_engine(spec) as engine:
        sessions: list[str | None] = [f"s{n}" for n in range(len(prompts))]
        turns = engine.generate(prompts, sessions, 24, hint=hint)
        assert engine.preemptions() == preemptions
        assert engine.counters().get("spm:hints|late", 0) == 0
    assert [t.finish_rank for t in turns] == [t.finish_rank for t in expected]
    assert [t.token_ids for t in turns] == [t.token_ids for t in expected]
