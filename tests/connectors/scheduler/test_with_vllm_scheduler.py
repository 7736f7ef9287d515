"""One thing at a time on vLLM's real schedulers, with and without asynchronous scheduling.

Every scenario ends with all requests finished, right answers, no block leaked and no
record, load or save left over: ``Engine.run`` checks it.
"""

import pytest
from vllm.v1.request import RequestStatus

from spm.residency import Tier
from tests.connectors.scheduler.scenarios import (
    LOADABLE,
    PROMPT,
    TAIL,
    Build,
    every_model,
    moved,
    parts,
    right,
    sources,
    store_prompt,
    until,
)
from tests.connectors.scheduler.simulated_engine import STEP_S
from tests.connectors.scheduler.simulated_worker import Conditions


@every_model
@pytest.mark.parametrize("tier", Tier)
def test_what_one_turn_computed_the_next_turn_loads(build: Build, tier: Tier) -> None:
    engine = build(conditions=Conditions(tier))
    store_prompt(engine)
    engine.add("second", PROMPT + TAIL, session="s")
    engine.run()
    right(engine, second=PROMPT + TAIL)
    assert sources(engine, "second") == {
        "prompt_tokens": 44,
        "gpu_tokens": 0,
        "host_tokens": 0,
        "remote_tokens": 0,
        f"{tier.value}_tokens": LOADABLE,
        "computed_tokens": 4,
    }
    counted = engine.counters.drain()
    assert counted[f"spm:loaded_tokens|{tier.value}"] == LOADABLE


@every_model
def test_only_what_the_gpu_lacks_is_loaded(build: Build) -> None:
    engine = build()
    store_prompt(engine)
    engine.add("short", PROMPT[:20])
    engine.run()
    before = moved(engine)
    engine.add("second", PROMPT + TAIL, session="s")
    engine.run()
    right(engine, second=PROMPT + TAIL)
    found = sources(engine, "second")
    assert found["gpu_tokens"] >= 16
    assert found["gpu_tokens"] + found["remote_tokens"] == LOADABLE
    assert moved(engine) > before


@every_model
def test_answers_may_come_many_steps_late(build: Build) -> None:
    engine = build(conditions=Conditions(load_steps=lambda: 9, save_steps=lambda: 5))
    engine.lookups.steps = 4
    store_prompt(engine)
    engine.half.manager.residency.clear()
    for number in range(3):
        engine.add(f"late{number}", PROMPT + TAIL)
    engine.run()
    right(engine, **{f"late{number}": PROMPT + TAIL for number in range(3)})
    assert moved(engine) > 0


@every_model
@pytest.mark.fault("F7", breaks="a lookup is waited for as long as it takes")
def test_a_lookup_without_an_answer_costs_its_deadline_and_no_more(build: Build) -> None:
    engine = build()
    engine.lookups.steps = None
    request = engine.add("alone", PROMPT)
    steps = 0
    while request.status is not RequestStatus.RUNNING:
        engine.step()
        steps += 1
        assert steps < 1000, "it waits for ever"
    assert steps == pytest.approx(0.25 / STEP_S, abs=2)
    engine.run()
    right(engine, alone=PROMPT)
    assert len(engine.lookups.queries) == 1


@every_model
def test_a_finished_request_with_its_saves_still_pending_keeps_the_engine_stepping(
    build: Build,
) -> None:
    engine = build(conditions=Conditions(save_steps=lambda: 30))
    engine.add("first", PROMPT, max_tokens=1)
    until(engine, lambda e: "first" in e.ended)
    assert engine.scheduler.has_requests()
    engine.run()
    assert engine.half.manager.residency.num_remote_keys == engine.workers[0].num_saved > 0


@every_model
def test_preempted_requests_resume_with_the_right_kv(build: Build) -> None:
    engine = build(num_blocks=40, step_tokens=32, conditions=Conditions(load_steps=lambda: 2))
    prompts = {f"r{n}": [5 + n] * 30 for n in range(5)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=50, session=name)
    seen = 0
    while engine.scheduler.has_requests():
        engine.step()
        seen = max([seen, *(r.num_preemptions for r in engine.scheduler.requests.values())])
    engine.run()
    right(engine, **prompts)
    for name in prompts:
        assert sum(sources(engine, name).values()) == 2 * 30


@parts("full", "hybrid")
def test_a_pool_too_small_for_all_does_preempt(build: Build) -> None:
    engine = build(num_blocks=40, step_tokens=32)
    requests = [engine.add(f"r{n}", [5 + n] * 30, max_tokens=50) for n in range(5)]
    engine.run()
    assert sum(request.num_preemptions for request in requests) > 0


@every_model
def test_a_prompt_is_saved_chunk_by_chunk_each_block_once(build: Build) -> None:
    engine = build(step_tokens=16)
    prompt = list(range(3, 84))
    engine.add("long", prompt, max_tokens=1)
    saved = []
    while engine.scheduler.has_requests():
        engine.step()
        saved.append(engine.workers[0].num_saved)
    assert len(set(saved)) > 3
    assert saved[-1] == len(engine.conditions.values)
    engine.forget_gpu()
    engine.add("again", prompt, max_tokens=1, session="s")
    engine.run()
    assert sources(engine, "again")["remote_tokens"] == 80
    assert engine.workers[0].num_saved == saved[-1]


@every_model
def test_two_requests_at_once_save_a_shared_prefix_once(build: Build) -> None:
    engine = build(conditions=Conditions(save_steps=lambda: 10))
    engine.add("one", PROMPT + TAIL)
    engine.add("two", PROMPT + TAIL)
    engine.run()
    assert engine.workers[0].num_saved == len(engine.conditions.values)


@every_model
def test_another_engine_on_the_same_store_loads_after_asking(build: Build) -> None:
    conditions = Conditions()
    store_prompt(build(conditions=conditions))
    other = build(conditions=conditions)
    other.lookups.steps = 2
    other.add("second", PROMPT + TAIL, session="s")
    other.run()
    right(other, second=PROMPT + TAIL)
    assert sources(other, "second")["remote_tokens"] == LOADABLE
    assert len(other.lookups.queries) == 1


@every_model
def test_what_one_rank_lost_is_absent_for_all(build: Build) -> None:
    conditions = Conditions()
    store_prompt(build(conditions=conditions, world_size=2))
    for name in [name for name in conditions.values if name.split(":")[-2] == "1"]:
        del conditions.values[name]
    other = build(conditions=conditions, world_size=2)
    other.add("second", PROMPT + TAIL)
    other.run()
    right(other, second=PROMPT + TAIL)
    assert moved(other) == 0


@every_model
@pytest.mark.fault("F34", breaks="answers from before a reset are believed after it")
def test_an_answer_from_before_a_reset_says_nothing_after_it(build: Build) -> None:
    engine = build()
    store_prompt(engine)
    engine.half.manager.residency.clear()
    engine.lookups.steps = 5
    engine.add("second", PROMPT + TAIL)
    until(engine, lambda e: len(e.lookups.queries) == 2)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run()
    right(engine, second=PROMPT + TAIL)
    assert moved(engine) == 0
    assert "spm:loads|failed" not in engine.counters.drain()


@every_model
def test_a_block_larger_than_the_bytes_in_flight_is_saved_all_the_same(build: Build) -> None:
    engine = build(save_inflight_bytes=1 << 16, value_bytes=1 << 17)
    engine.add("first", PROMPT)
    engine.run()
    assert engine.half.manager.residency.num_remote_keys == len(engine.conditions.values) > 0
