"""A store that is slower than computing, or left alone, on vLLM's real schedulers: it may cost
the first requests a bounded wait, then nothing, and it is used again when it is better."""

from spm.breaker import BreakerState
from spm.keys import block_key_of
from spm.metrics import Counters
from tests.connectors.scheduler.scenarios import (
    LOADABLE,
    PROMPT,
    TAIL,
    Build,
    parts,
    recovering_models,
    right,
    store_prompt,
)
from tests.connectors.scheduler.simulated_engine import STEP_S, Engine
from tests.connectors.scheduler.simulated_worker import Conditions

COMPUTE_S = 0.3
"""What the prompt takes to compute, as far as the engine knows."""
SLOW_STEPS = 200
"""Of a load: two seconds."""
BOUND_S = COMPUTE_S + 6 * STEP_S
"""The longest a request may wait for a load in vain: as long as computing takes."""
TURNS = 30


def engine_beside(build: Build, load_steps: int) -> Engine:
    """The prompt is stored, computing is measured, and loads take so many steps."""
    conditions = Conditions(step_s=STEP_S)
    engine = build(conditions=conditions)
    assert engine.half.pooling is not None
    store_prompt(engine)
    rate = engine.half.pooling.rate
    rate.note_step(10 * LOADABLE)
    engine.now_s += 10 * COMPUTE_S
    rate.note_end()
    conditions.load_steps = lambda: load_steps
    return engine


def turn(engine: Engine, name: str) -> float:
    """A request that could be loaded; returns how long it took, in the engine's seconds."""
    engine.forget_gpu()
    request = engine.add(name, PROMPT + TAIL, max_tokens=1)
    started_s = engine.now_s
    while request.request_id not in engine.ended:
        engine.step()
        assert engine.now_s - started_s < 100.0
    took_s = engine.now_s - started_s
    engine.run()
    right(engine, **{name: PROMPT + TAIL})
    return took_s


def loads(engine: Engine) -> int:
    return len(engine.commanded)


def counted(counters: Counters, key: str) -> float:
    return dict(counters.drain()).get(key, 0.0)


@recovering_models
def test_a_slow_store_costs_at_most_one_bounded_wait_and_then_only_tries(build: Build) -> None:
    """Catches a time to first token that is twice what it is without the store, for ever."""
    alone_s = turn(engine_beside(build, SLOW_STEPS), "cold")  # one load is given up by then
    engine = engine_beside(build, SLOW_STEPS)
    assert alone_s <= BOUND_S
    first_s = turn(engine, "first")
    assert first_s <= BOUND_S
    assert loads(engine) == 1
    before = engine.now_s
    tries = 0
    for number in range(TURNS):
        commanded = loads(engine)
        took_s = turn(engine, f"turn{number}")
        tries += loads(engine) - commanded
        assert took_s <= (BOUND_S if loads(engine) > commanded else 6 * STEP_S)
    assert tries <= 2, f"{tries} tries in {engine.now_s - before} s"
    assert counted(engine.counters, "spm:remote_skipped|slow") == TURNS - tries


@recovering_models
def test_a_store_that_is_fast_again_is_used_again(build: Build) -> None:
    engine = engine_beside(build, SLOW_STEPS)
    turn(engine, "first")
    turn(engine, "skipped")
    assert loads(engine) == 1
    engine.conditions.load_steps = lambda: 1
    engine.now_s += 15.0
    turn(engine, "tries")
    assert loads(engine) == 2
    for number in range(3):
        turn(engine, f"again{number}")
    assert loads(engine) == 5


@parts("full")
def test_prompts_that_nobody_stored_do_not_keep_it_from_being_used_again(build: Build) -> None:
    """Catches trials that are used up by prompts of which there is nothing to load."""
    engine = engine_beside(build, SLOW_STEPS)
    turn(engine, "first")
    turn(engine, "skipped")
    assert loads(engine) == 1
    engine.conditions.load_steps = lambda: 1
    started_s = engine.now_s
    for number in range(90):
        if number % 10 == 9:
            turn(engine, f"stored{number}")
        else:
            prompt = [100 + 7 * number + at for at in range(len(PROMPT) + 1)]
            engine.add(f"fresh{number}", prompt, max_tokens=1)
            engine.run()
            engine.forget_gpu()
        engine.now_s += 1.0
        if loads(engine) > 1:
            break
    assert loads(engine) == 2
    assert engine.now_s - started_s < 30.0


@recovering_models
def test_a_fast_store_is_always_loaded_from(build: Build) -> None:
    engine = engine_beside(build, 2)
    for number in range(10):
        turn(engine, f"turn{number}")
    assert loads(engine) == 10
    assert counted(engine.counters, "spm:remote_skipped|slow") == 0


@parts("full")
def test_what_is_in_the_host_tier_is_loaded_however_slow_the_remote_is(build: Build) -> None:
    engine = engine_beside(build, SLOW_STEPS)
    turn(engine, "first")
    [worker], [first] = engine.workers, engine.commanded
    near = [move.key for move in first.moves[:5]]
    for name, content in engine.conditions.values.items():
        if block_key_of(name) in near:
            worker._keep(name, block_key_of(name), content)
    turn(engine, "tells that they are there")
    engine.conditions.load_steps = lambda: 0
    turn(engine, "second")
    assert [move.key for move in engine.commanded[-1].moves] == near
    assert loads(engine) == 2


@recovering_models
def test_while_workers_leave_the_store_alone_no_request_waits_for_it(build: Build) -> None:
    """Catches a load planned from memory that every worker refuses, and costs a step."""
    engine = engine_beside(build, 2)
    engine.conditions.breaker = BreakerState.OPEN
    turn(engine, "finds out")
    queries, commanded = len(engine.lookups.queries), loads(engine)
    for number in range(5):
        turn(engine, f"turn{number}")
    engine.add("cold", list(range(50, 90)), max_tokens=1)
    engine.run()
    assert (len(engine.lookups.queries), loads(engine)) == (queries, commanded)
    remote = engine.manage("status")["engine"]["tiers"]["remote"]
    assert remote["breaker"] == "open"
    assert remote["breakers"] == {"scheduler": "closed", "worker": "open"}
    assert engine.half.gauges()["spm:breaker_state|worker,open"] == 1
    engine.conditions.breaker = BreakerState.CLOSED
    engine.step()
    turn(engine, "learns that it is back")
    turn(engine, "uses it")
    assert loads(engine) > commanded
    assert engine.half.gauges()["spm:breaker_state|worker,closed"] == 1


@recovering_models
def test_while_the_scheduler_leaves_the_store_alone_no_request_waits_for_it(build: Build) -> None:
    engine = engine_beside(build, 2)
    queries = len(engine.lookups.queries)
    engine.keeper.breaker_state = BreakerState.OPEN
    for number in range(5):
        turn(engine, f"turn{number}")
    assert (len(engine.lookups.queries), loads(engine)) == (queries, 0)
    assert engine.manage("status")["engine"]["tiers"]["remote"]["breaker"] == "open"
    engine.keeper.breaker_state = BreakerState.CLOSED
    turn(engine, "back")
    assert loads(engine) == 1
