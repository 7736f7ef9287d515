"""What a review of prefetch, offload and their neighbours found."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.v1.core.sched.interface import PauseState

from connectors.metadata import NO_BLOCK_ID, LoadFailure, StepCommands
from connectors.plugin import spm_manage
from spm.residency import Tier
from tests.connectors.scheduler.scenarios import Build, parts, right
from tests.connectors.scheduler.simulated_engine import Engine
from tests.connectors.scheduler.simulated_worker import Conditions
from tests.connectors.scheduler.test_session_operations import (
    PROMPT,
    SESSION,
    overwrite,
    resumed,
    turn,
)

full = parts("full")


def steps_until_ended(engine: Engine, name: str, limit: int = 300) -> int:
    for number in range(limit):
        if name in engine.ended:
            return number
        engine.step()
    raise AssertionError(f"{name} has not ended after {limit} steps")


@full
def test_a_prefetch_that_finds_no_room_leaves_nothing_in_flight(build: Build) -> None:
    """hand_out() gives up a run that the queue has let go already, and never tells the queue
    that it ended: it is in flight for ever, and so is every later prefetch of the same blocks."""
    engine = build(num_blocks=41, extra={"prefetch_reserve_share": 0.5})
    turn(engine)
    overwrite(engine)
    engine.add("other", [55, *range(3, 43)])
    engine.step()  # the store is asked about it: it takes 11 blocks in the next step
    engine.edit("s", {"type": "prefetch"})
    for _ in range(60):
        engine.step()
    assert engine.operation()["done"]
    queues = engine.manage("status")["engine"]["queues"]
    assert queues["prefetch"] == {"waiting": 0, "in_flight": 0, "in_flight_bytes": 0}
    engine.edit("s", {"type": "prefetch"}, operation="second")
    engine.run()
    assert engine.operation("second")["status"] == "ok"


@full
def test_blocks_of_a_given_up_prefetch_come_back_under_pressure(build: Build) -> None:
    """relieve() looks only while a prefetch goes on; loads of one that its session's end, an
    evict or a request gave up keep their blocks until the store answers."""
    conditions = Conditions()
    engine = build(conditions=conditions, num_blocks=41, extra={"prefetch_reserve_share": 0.0})
    turn(engine)
    overwrite(engine)
    conditions.load_steps = lambda: 150
    engine.edit("s", {"type": "prefetch"})
    engine.step()
    engine.step()
    engine.manage("end_session", session_id="s", tree=False, operation_id="end")
    engine.add("big", [99, *range(3, 3 + 120)])
    assert steps_until_ended(engine, "big") < 50
    engine.run()


@full
def test_a_request_that_skips_the_prefix_cache_is_not_starved(build: Build) -> None:
    """One with prompt_logprobs never asks the half, so that nobody sees it wait for blocks."""
    conditions = Conditions()
    engine = build(conditions=conditions, num_blocks=41, extra={"prefetch_reserve_share": 0.0})
    turn(engine)
    overwrite(engine)
    conditions.load_steps = lambda: 150
    engine.edit("s", {"type": "prefetch"})
    engine.step()
    engine.step()
    engine.add("big", [99, *range(3, 3 + 120)]).skip_reading_prefix_cache = True
    assert steps_until_ended(engine, "big") < 50
    engine.run()


@full
def test_a_request_does_not_wait_for_what_is_no_hit_when_it_arrives(build: Build) -> None:
    """Blocks far behind the local hit: the request waits for them and loads them again."""
    conditions = Conditions()
    engine = build(conditions=conditions)
    turn(engine)
    overwrite(engine)
    conditions.load_steps = lambda: 100
    engine.edit("s", {"type": "prefetch", "block_start": 8, "block_end": 16})
    engine.step()
    engine.step()
    conditions.load_steps = lambda: 0
    prompt = resumed(engine)
    engine.add("again", prompt, session="s")
    assert steps_until_ended(engine, "again") < 40
    engine.run()
    right(engine, again=prompt)


@full
def test_a_full_step_is_no_pressure_on_the_pool(build: Build) -> None:
    """Without chunked prefill a prompt that does not fit into the step is asked about and gets
    no blocks; the pool has plenty."""
    conditions = Conditions()
    engine = build(conditions=conditions, num_blocks=200)
    turn(engine)
    engine.forget_gpu()
    engine.scheduler.scheduler_config.enable_chunked_prefill = False
    conditions.load_steps = lambda: 6
    engine.edit("s", {"type": "prefetch"})
    engine.step()
    engine.step()
    for number in range(3):
        engine.add(f"other{number}", [50 + number, *range(3, 43)])
    engine.run()
    assert engine.operation()["status"] == "ok"


@full
def test_a_prefetch_delays_a_reset_by_a_step_and_nothing_of_it_survives(build: Build) -> None:
    """Blocks that are being filled cannot be given back at once: vLLM's answer is False, as it
    is while a request runs. Asked again, it is reset."""
    conditions = Conditions()
    engine = build(conditions=conditions, num_blocks=96)
    turn(engine)
    engine.forget_gpu()
    conditions.load_steps = lambda: 30
    engine.edit("s", {"type": "prefetch"})
    engine.step()
    engine.step()
    assert not engine.scheduler.requests
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.step()
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run()
    prompt = resumed(engine)
    engine.add("again", prompt, session="s")
    engine.run()
    right(engine, again=prompt)
    assert engine.local_hits["again"] == 0


@full
def test_nothing_is_loaded_into_the_pool_of_a_sleeping_engine(build: Build) -> None:
    """sleep() waits for pending work and then unmaps the KV cache; management still wakes the
    engine, and has_pending_push_work makes it step."""
    engine = build()
    turn(engine)
    engine.forget_gpu()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    core = SimpleNamespace(
        scheduler=engine.scheduler, is_sleeping=lambda: True, is_scheduler_paused=lambda: True
    )
    hint = {"session_id": "s", "context_management": {"edits": [{"type": "prefetch"}]}}
    request = {"v": 1, "op": "apply", "tenant": "default", "hint": hint, "operation_id": "op"}
    spm_manage(cast("Any", core), request)
    targets: list[int] = []
    for _ in range(5):
        if not engine.scheduler.has_requests():
            break
        step = engine.scheduler.schedule()
        commands = step.kv_connector_metadata
        assert isinstance(commands, StepCommands)
        targets += [m.block_id for load in commands.loads for m in load.moves]
    assert [i for i in targets if i != NO_BLOCK_ID] == []


@full
def test_a_rewound_session_prefetches_only_its_newest_chain(build: Build) -> None:
    """A turn that left the old path and is shorter: what lay behind is of no use to it."""
    engine = build(num_blocks=96)
    turn(engine)
    short = [*PROMPT[:8], 150, 151, 152, 153, 154, 155, 156, 157]
    engine.add("rewound", short, session="s")
    engine.run()
    overwrite(engine)
    engine.edit("s", {"type": "prefetch"})
    engine.run()
    assert engine.operation()["edits"][0]["blocks"] <= 5


@full
def test_pressure_on_the_gpu_pool_does_not_end_a_prefetch_into_the_host(build: Build) -> None:
    conditions = Conditions(keeps_host=True)
    engine = build(conditions=conditions, num_blocks=41)
    turn(engine)
    overwrite(engine)
    for key in engine.half.manager.tracker.keys_of(SESSION):
        engine.workers[0].lose_host(key)
    engine.add("news", [9, 9, 9, 9, 9])
    engine.run()
    conditions.load_steps = lambda: 12
    engine.edit("s", {"type": "prefetch", "target": "host"})
    engine.step()
    conditions.load_steps = lambda: 0
    engine.add("one", [99, *range(3, 3 + 100)])
    engine.add("two", [98, *range(3, 3 + 100)])
    engine.run()
    assert engine.operation()["status"] == "ok"


@parts("hybrid")
@pytest.mark.parametrize("free", [38, 45, 51])
def test_a_store_that_goes_down_does_not_hang_a_full_engine(build: Build, free: int) -> None:
    """Loads fail as a whole. vLLM promotes the first request, frees its blocks, finds no room to
    compute all of it and looks no further: those behind it keep theirs, and nothing ever moves."""
    conditions = Conditions(tier=Tier.HOST)
    engine = build(conditions=conditions, num_blocks=100)
    heads = {f"r{n}": [50 + n, *range(3, 39 + 28 * (n == 3))] for n in range(4)}
    for name, prompt in heads.items():
        engine.add(f"store {name}", prompt)
        engine.run()
        engine.forget_gpu()
    pool = engine.scheduler.kv_cache_manager.block_pool
    others = pool.get_new_blocks(99 - free)
    conditions.load_steps = lambda: 5
    conditions.fails = lambda rank, key: LoadFailure.STORE
    prompts = {n: [*head, *([9] if n == "r3" else range(80, 110))] for n, head in heads.items()}
    for name, prompt in prompts.items():
        engine.add(name, prompt)
    for _ in range(300):
        engine.step()
    assert prompts.keys() <= engine.ended.keys()
    right(engine, **prompts)
    pool.free_blocks(others)


@full
def test_free_blocks_that_a_request_hits_are_no_room_for_it(build: Build) -> None:
    """What it hits is free as well and is taken first: counting only what lies behind the hit
    overlooks that it does not fit."""
    conditions = Conditions()
    engine = build(conditions=conditions, num_blocks=61, extra={"prefetch_reserve_share": 0.0})
    turn(engine)
    overwrite(engine)
    prefix = [99, *range(3, 3 + 99)]
    engine.add("before", prefix)
    engine.run()
    conditions.load_steps = lambda: 150
    engine.edit("s", {"type": "prefetch"})
    engine.step()
    engine.step()
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert 30 < free < 48
    engine.add("big", [*prefix, *range(3, 3 + 85)], max_tokens=1)
    assert steps_until_ended(engine, "big") < 50
    engine.run()
