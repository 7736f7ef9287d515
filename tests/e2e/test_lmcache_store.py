"""LMCache as the store, on a real server, a real Redis and real vLLM: the same tokens and
bit-equal logprobs as stock vLLM's own prefix hits, wherever a session comes back from.

Chunks are as long as blocks here, so that every hit of stock vLLM's can be had of LMCache.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.e2e.checked_engine import checked_engine
from tests.e2e.conversations import (
    Exchange,
    assert_identical,
    assert_same_tokens,
    record,
    record_again,
    replay,
    tokens,
)
from tests.e2e.engine_process import EngineProcess, EngineSpec, Turn
from tests.e2e.lmcache_site import BLOCK, LMCacheSite, running_site
from tests.e2e.made_models import FULL, made_model
from tests.e2e.stock import PARTLY_TOKENS

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_SMALL_POOL = 24
"""Blocks; room for one session and a half."""
_ANSWER_TOKENS = 150
_ABORT_AFTER_STEPS = range(9)


@dataclass(frozen=True)
class Recorded:
    """What stock vLLM answers, prefilling in several steps."""

    spec: EngineSpec
    turns: list[list[Exchange]]
    again: list[Exchange]
    """The second and third turn of each session once more."""
    partly: list[Exchange]
    """The third where only the first ``PARTLY_TOKENS`` of each were in the pool."""
    long_answers: list[Turn]
    """To the first three prompts, each alone."""


@pytest.fixture(scope="module")
def recorded(models: Path) -> Recorded:
    spec = EngineSpec(
        model=str(made_model(FULL, models)), max_model_len=512, max_num_batched_tokens=64
    )
    with EngineProcess(replace(spec, num_blocks=300)) as engine:
        turns = record(engine, sessions=7, turns=3)
        again = record_again(engine, turns[1] + turns[2])
        long_answers = [engine.one(e.prompt, None, _ANSWER_TOKENS) for e in turns[0][:3]]
        assert engine.drop_gpu_cache()
        for exchange in turns[2]:  # one token more, as vLLM always computes the last one
            engine.one(exchange.prompt[: PARTLY_TOKENS + 1])
        return Recorded(spec, turns, again, record_again(engine, turns[2]), long_answers)


@pytest.fixture(scope="module")
def site() -> Iterator[LMCacheSite]:
    with running_site(chunk_tokens=BLOCK) as site:
        yield site


@pytest.fixture(scope="module")
def engine(recorded: Recorded, site: LMCacheSite) -> Iterator[EngineProcess]:
    """It has had all of the conversation, and its pool holds little of it."""
    spec = site.engine(replace(recorded.spec, num_blocks=_SMALL_POOL))
    with checked_engine(spec) as engine:
        _check_conversation(engine, recorded)
        yield engine


def _check_conversation(engine: EngineProcess, recorded: Recorded) -> None:
    """Cold, then evicted by the others and back from the server's memory."""
    for exchanges in recorded.turns:
        turns = replay(engine, exchanges)
        assert_identical(turns, exchanges)
    _assert_loaded(turns, recorded.turns[2])
    assert engine.gauges()["spm:sessions|"] == 7


def _assert_loaded(turns: list[Turn], exchanges: list[Exchange]) -> None:
    """At least half of what these prompts hit was loaded."""
    hit_tokens = sum(exchange.reference.cached_tokens for exchange in exchanges)
    outcomes = [turn.outcome for turn in turns if turn.outcome is not None]
    assert len(outcomes) == len(turns)
    assert sum(outcome["remote_tokens"] for outcome in outcomes) >= hit_tokens / 2


def _sessions(exchanges: list[Exchange]) -> list[str]:
    return [exchange.session for exchange in exchanges]


def test_a_conversation_comes_back_from_memory_and_from_redis(
    engine: EngineProcess, recorded: Recorded, site: LMCacheSite
) -> None:
    site.wait_until_stored(engine, *_sessions(recorded.turns[2]))
    site.leave_nothing_but_l2(engine)
    turns = replay(engine, recorded.again)
    assert_identical(turns, recorded.again)
    _assert_loaded(turns, recorded.again)


def test_another_engine_beside_the_first_finds_all_of_it(
    engine: EngineProcess, recorded: Recorded, site: LMCacheSite
) -> None:
    spec = replace(recorded.spec, num_blocks=_SMALL_POOL, own_interpreter=True)
    site.wait_until_stored(engine, *_sessions(recorded.turns[2]))
    with checked_engine(site.engine(spec)) as second:
        turns = replay(second, recorded.again, with_sessions=False)
        assert_identical(turns, recorded.again)
        assert second.gauges()["spm:sessions|"] == 0


def test_a_request_may_be_aborted_at_any_step(
    engine: EngineProcess, recorded: Recorded, site: LMCacheSite
) -> None:
    exchange = recorded.again[-1]
    rng = random.Random(23)
    for steps in _ABORT_AFTER_STEPS:  # while computing in chunks and saving
        engine.abort_after_steps(tokens(rng, 230), "aborted", steps)
        engine.check_integrity()
    site.wait_until_stored(engine, exchange.session)
    site.leave_nothing_but_l2(engine)
    for steps in _ABORT_AFTER_STEPS:  # while being looked up, loaded, computed
        engine.settle()
        assert engine.drop_gpu_cache()
        engine.abort_after_steps(exchange.prompt, "aborted", steps)
        engine.check_integrity()
    assert_identical(replay(engine, recorded.again), recorded.again)


def test_preemption_in_a_small_pool_changes_no_token(
    engine: EngineProcess, recorded: Recorded
) -> None:
    """Three requests whose answers do not fit together: vLLM preempts and resumes them."""
    prompts = [exchange.prompt for exchange in recorded.turns[0][:3]]
    before = engine.preemptions()
    turns = engine.generate(prompts, ["a", "b", "c"], _ANSWER_TOKENS)
    assert [t.token_ids for t in turns] == [t.token_ids for t in recorded.long_answers]
    assert engine.preemptions() > before


def test_two_cache_salts_never_share(engine: EngineProcess, site: LMCacheSite) -> None:
    """LMCache keeps them apart; a salt that it does not take stays outside."""
    prompt = tokens(random.Random(29), 230)
    hit_tokens = len(prompt) // BLOCK * BLOCK
    before = site.stored()
    first = engine.one(prompt, "salted", cache_salt="tenant-a")
    site.wait_until_stored(engine, "salted")
    site.leave_nothing_but_l2(engine)
    assert engine.one(prompt, cache_salt="tenant-b").cached_tokens == 0
    assert engine.one(prompt).cached_tokens == 0
    engine.settle()
    assert engine.drop_gpu_cache()
    again = engine.one(prompt, "salted", cache_salt="tenant-a")
    assert (again.cached_tokens, again.token_ids) == (hit_tokens, first.token_ids)
    salted = site.stored() - before
    assert {name.split("@")[4] for name in salted if name.count("@") == 4} >= {"tenant-a"}

    refused = "tenant/a"  # LMCache raises if it gets it
    for _ in range(2):
        engine.settle()
        assert engine.drop_gpu_cache()
        assert engine.one(prompt, cache_salt=refused).cached_tokens == 0
    assert engine.counters()["spm:bypassed_requests|cache_salt"] == 2
    assert len([line for line in engine.warnings() if "cache_salt" in line]) == 1


def test_what_redis_lost_in_part_is_hit_as_far_as_it_goes(
    engine: EngineProcess, recorded: Recorded, site: LMCacheSite
) -> None:
    """Each session's chain has a hole behind its first chunks."""
    site.wait_until_stored(engine, *_sessions(recorded.turns[2]))
    site.leave_nothing_but_l2(engine)
    chains = [engine.stored_names(session)[0] for session in _sessions(recorded.turns[2])]
    with site.redis.client() as client:
        client.delete(*[names[PARTLY_TOKENS // BLOCK] for names in chains])
    for exchange in recorded.partly:
        engine.settle()
        assert engine.drop_gpu_cache()
        assert_identical(replay(engine, [exchange]), [exchange])
    # Whole again; what was generated then was now computed as a prompt: not to the last bit.
    site.wait_until_stored(engine, *_sessions(recorded.turns[2]))
    site.leave_nothing_but_l2(engine)
    turns = replay(engine, recorded.again)
    assert_same_tokens(turns, recorded.again)
    hits = [exchange.reference.cached_tokens for exchange in recorded.again]
    assert [turn.cached_tokens for turn in turns] == hits
