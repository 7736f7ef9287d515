"""Failed loads and aborts on vLLM's real schedulers, with and without asynchronous
scheduling: the answers stay right and nothing is left over."""

from collections.abc import Callable

import pytest
from vllm.v1.request import Request

from connectors.metadata import LoadFailure
from spm.keys import Rank
from tests.connectors.scheduler.scenarios import (
    LOADABLE,
    PROMPT,
    TAIL,
    Build,
    every_model,
    moved,
    parts,
    recovering_models,
    right,
    sources,
    store_prompt,
    until,
)
from tests.connectors.scheduler.simulated_engine import STEP_S, Engine
from tests.connectors.scheduler.simulated_worker import Conditions
from tracker.ids import BlockKey


@recovering_models
@pytest.mark.parametrize("why", [LoadFailure.CORRUPT, LoadFailure.STORE, LoadFailure.DEADLINE])
@pytest.mark.parametrize("position", range(10))
def test_a_block_that_fails_to_load_is_recomputed(
    build: Build, why: LoadFailure, position: int
) -> None:
    engine = build()
    store_prompt(engine)
    asked: list[BlockKey] = []

    def fails(rank: Rank, key: BlockKey) -> LoadFailure | None:
        asked.append(key)
        return why if len(asked) == position + 1 else None

    engine.conditions.fails = fails
    engine.add("second", PROMPT + TAIL, session="s")
    engine.run()
    right(engine, second=PROMPT + TAIL)
    failed = len(asked) > position
    counted = engine.counters.drain()
    assert counted["spm:loads|failed" if failed else "spm:loads|ok"] == 1
    several_groups = len(engine.scheduler.kv_cache_config.kv_cache_groups) > 1
    kept = 0 if several_groups else 4 * position
    assert counted.get("spm:loaded_tokens|remote", 0) == (kept if failed else LOADABLE)
    assert sum(sources(engine, "second").values()) == 2 * 44


@parts("sliding")
def test_a_failed_block_in_a_sliding_window_is_recomputed(build: Build) -> None:
    engine = build()
    store_prompt(engine)
    asked: list[BlockKey] = []

    def fails(rank: Rank, key: BlockKey) -> LoadFailure | None:
        asked.append(key)
        return LoadFailure.CORRUPT if len(asked) == 2 else None

    engine.conditions.fails = fails
    engine.add("second", PROMPT + TAIL)
    engine.run()
    right(engine, second=PROMPT + TAIL)


@recovering_models
def test_a_store_that_lost_everything_is_asked_once_and_filled_again(build: Build) -> None:
    engine = build()
    store_prompt(engine)
    engine.conditions.values.clear()
    engine.add("second", PROMPT + TAIL)
    engine.run()
    engine.forget_gpu()
    engine.add("third", PROMPT + TAIL, session="s")
    engine.run()
    right(engine, second=PROMPT + TAIL, third=PROMPT + TAIL)
    assert sources(engine, "third")["remote_tokens"] == LOADABLE


@recovering_models
def test_with_the_failing_policy_only_that_request_fails(build: Build) -> None:
    engine = build(policy="fail")
    store_prompt(engine)
    engine.conditions.fails = lambda rank, key: LoadFailure.STORE
    engine.add("second", PROMPT + TAIL)
    engine.add("other", [9] * 21)
    engine.run()
    right(engine, other=[9] * 21)
    assert engine.ended["second"] == "error"


@recovering_models
@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}])
def test_a_load_that_fails_on_any_rank_is_recomputed_on_all(
    build: Build, failing: set[int]
) -> None:
    engine = build(world_size=2)
    store_prompt(engine)
    delays = iter([0, 3])
    engine.conditions.load_steps = lambda: next(delays)
    engine.conditions.fails = lambda rank, key: LoadFailure.STORE if rank in failing else None
    engine.add("second", PROMPT + TAIL)
    engine.run()
    right(engine, second=PROMPT + TAIL)
    assert engine.counters.drain()["spm:loads|failed"] == 1


STAGES: dict[str, Callable[[Engine], bool]] = {
    "queued": lambda engine: True,
    "looking up": lambda engine: len(engine.lookups.queries) == 2,
    "load commanded": lambda engine: loads(engine) == 1,
    "loading": lambda engine: loads(engine) == 1 and engine.now_s > started_s(engine) + 2 * STEP_S,
    "loaded": lambda engine: bool(moved(engine)) and not loads(engine),
    "prefilling": lambda engine: doomed(engine).num_computed_tokens > 0,
    "decoding": lambda engine: len(engine.outputs["doomed"]) >= 2,
    "saving": lambda engine: engine.half.has_pending_work() and not loads(engine),
}


def loads(engine: Engine) -> int:
    return int(engine.half.gauges()["spm:loads_in_flight|"])


def doomed(engine: Engine) -> Request:
    return engine.scheduler.requests["doomed"]


def started_s(engine: Engine) -> float:
    return engine.added_s["doomed"]


@every_model
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.fault("F1", breaks="the record of a request that was aborted stays")
def test_an_abort_at_any_stage_leaves_nothing_behind(build: Build, stage: str) -> None:
    engine = build(
        conditions=Conditions(load_steps=lambda: 4, save_steps=lambda: 6), step_tokens=16
    )
    store_prompt(engine)
    if stage == "looking up":
        engine.half.manager.residency.clear()
        engine.lookups.steps = 3
    if stage == "prefilling":
        engine.conditions.values.clear()
        engine.half.manager.residency.clear()
    prompt = PROMPT + TAIL + list(range(50, 90))
    engine.add("doomed", prompt, max_tokens=20, session="s")
    until(engine, STAGES[stage])
    assert "doomed" not in engine.ended
    engine.add("other", PROMPT + TAIL)
    engine.abort("doomed")
    engine.abort("doomed")
    engine.run()
    assert engine.ended["doomed"] == "abort"
    right(engine, other=PROMPT + TAIL)


@recovering_models
def test_a_store_that_takes_nothing_is_not_offered_the_same_again_at_once(build: Build) -> None:
    engine = build()
    engine.conditions.refuses_writes = True
    store_prompt(engine)
    offered = sum(worker.num_saved for worker in engine.workers)
    assert offered > 0
    engine.conditions.values.clear()
    for name in ("second", "third"):
        engine.add(name, PROMPT)
        engine.run()
        engine.forget_gpu()
    right(engine, second=PROMPT, third=PROMPT)
    assert sum(worker.num_saved for worker in engine.workers) == offered
    engine.conditions.refuses_writes = False
    engine.now_s += 60.0
    for name in ("fourth", "fifth"):
        engine.add(name, PROMPT, session="s")
        engine.run()
        engine.forget_gpu()
    assert sources(engine, "fifth")["remote_tokens"] > 0, "back in service"
