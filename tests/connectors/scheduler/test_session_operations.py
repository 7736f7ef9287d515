"""Offload, prefetch and evict at vLLM's own schedulers: where a session's blocks end up, what the
application is told, and what becomes of it when something else happens in between."""

from typing import Any

import pytest

from connectors.metadata import LoadFailure
from spm.residency import Tier
from spm.work import WorkClass
from tests.connectors.scheduler.scenarios import MODELS, TAIL, Build, moved, parts, right, until
from tests.connectors.scheduler.simulated_engine import Engine
from tests.connectors.scheduler.simulated_worker import Conditions
from tests.spm.sam.kit import ref_of

SESSION = ref_of("s")
every_model = parts(*MODELS)
full = parts("full")
PROMPT = list(range(3, 64))
RESUMED = 60
"""Tokens of a resumed session in full blocks of every model, less what windows need."""


def resumed(engine: Engine, name: str = "turn") -> list[int]:
    """The prompt of the session's next turn."""
    return [*PROMPT, *engine.outputs[name], *TAIL]


def turn(engine: Engine, session: str = "s", name: str = "turn", **hint: Any) -> None:  # noqa: ANN401
    engine.add(name, PROMPT, session=session, hint=hint or None)
    engine.run()
    right(engine, **{name: PROMPT})


def overwrite(engine: Engine) -> None:
    """Other requests take the whole pool, one after the other."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    for number in range(2 * pool.num_gpu_blocks // 16):
        engine.add(f"other{number}", [100 + number, *range(3, 63)])
        engine.run()


def come_back(engine: Engine, name: str = "again") -> int:
    """The session resumes; tokens of the prompt that were in the GPU pool."""
    prompt = resumed(engine)
    loads = moved(engine)
    engine.add(name, prompt, session="s")
    engine.run()
    right(engine, **{name: prompt})
    assert moved(engine) == loads or engine.local_hits[name] < RESUMED
    return engine.local_hits[name]


# --- offload ---------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("tier", list(Tier))
def test_an_offload_is_confirmed_before_anything_is_given_up(build: Build, tier: Tier) -> None:
    engine = build(conditions=Conditions(tier), extra={"save": "sessions"})
    turn(engine, cache_control={"ttl": 300})
    before = engine.manage("status")["engine"]["tiers"]["gpu"]["protected_blocks"]
    assert before > 0
    answer = engine.edit("s", {"type": "offload"})
    assert answer["status"] in ("accepted", "ok")
    engine.run()
    assert engine.operation()["status"] == "ok"
    assert engine.operation()["done"]
    assert engine.manage("status")["engine"]["tiers"]["gpu"]["protected_blocks"] == 0
    assert come_back(engine) >= RESUMED - 8, "what was given up is taken first, not thrown away"


@full
def test_an_offload_saves_what_was_never_saved(build: Build) -> None:
    conditions = Conditions(refuses_writes=True)
    engine = build(conditions=conditions)
    turn(engine, cache_control={"ttl": 300})
    assert not conditions.values
    conditions.refuses_writes = False
    engine.edit("s", {"type": "offload"})
    engine.run()
    operation = engine.operation()
    assert (operation["status"], operation["edits"][0]["done_blocks"]) == ("ok", 16)
    assert len(conditions.values) == 16


@full
def test_what_could_not_be_stored_keeps_its_protection(build: Build) -> None:
    conditions = Conditions(refuses_writes=True)
    engine = build(conditions=conditions)
    turn(engine, cache_control={"ttl": 300})
    engine.edit("s", {"type": "offload"})
    engine.run()
    operation = engine.operation()
    assert operation["status"] == "failed"
    assert engine.manage("status")["engine"]["tiers"]["gpu"]["protected_blocks"] == 16


@full
def test_a_part_that_is_lost_in_both_places_makes_it_partial(build: Build) -> None:
    conditions = Conditions()
    engine = build(conditions=conditions, num_blocks=24)
    turn(engine)
    overwrite(engine)
    lost = engine.half.manager.tracker.keys_of(SESSION)[5:7]
    engine.keeper.lose(lost, engine.now_s)
    engine.edit("s", {"type": "offload"})
    engine.run()
    operation = engine.operation()
    assert (operation["status"], operation["edits"][0]["done_blocks"]) == ("partial", 14)


@full
def test_a_store_that_does_not_answer_releases_nothing(build: Build) -> None:
    engine = build()
    turn(engine, cache_control={"ttl": 300})
    engine.keeper.steps = None
    engine.edit("s", {"type": "offload"})
    engine.run()
    assert engine.operation()["status"] == "failed"
    assert engine.manage("status")["engine"]["tiers"]["gpu"]["protected_blocks"] == 16


@full
def test_an_offloaded_session_that_is_used_again_stays_protected(build: Build) -> None:
    engine = build()
    turn(engine, cache_control={"ttl": 300})
    engine.keeper.steps = 3
    engine.edit("s", {"type": "offload"})
    engine.add("again", resumed(engine), session="s", hint={"cache_control": {"ttl": 300}})
    engine.run()
    assert engine.operation()["status"] == "ok"
    assert engine.manage("status")["engine"]["tiers"]["gpu"]["protected_blocks"] >= 16


# --- prefetch --------------------------------------------------------------------------


@every_model
def test_a_prefetched_session_resumes_from_the_gpu_pool(build: Build) -> None:
    engine = build(num_blocks=96)
    turn(engine)
    overwrite(engine)
    engine.edit("s", {"type": "prefetch"})
    engine.run()
    assert engine.operation()["status"] == "ok"
    assert come_back(engine) >= RESUMED


@full
def test_it_takes_an_idle_engine_one_step_to_begin(build: Build) -> None:
    engine = build()
    turn(engine)
    overwrite(engine)
    loads = moved(engine)
    engine.edit("s", {"type": "prefetch"})
    engine.step()
    engine.step()
    assert moved(engine) > loads


@full
def test_only_the_gap_is_loaded(build: Build) -> None:
    engine = build()
    turn(engine)
    answer = engine.edit("s", {"type": "prefetch"})
    assert (answer["status"], answer["edits"][0]["done_blocks"]) == ("ok", 16)
    assert moved(engine) == 0


@full
def test_prefetched_blocks_are_protected(build: Build) -> None:
    engine = build(num_blocks=64)
    turn(engine)
    overwrite(engine)
    engine.edit("s", {"type": "prefetch"})
    engine.run()
    assert engine.manage("status")["engine"]["tiers"]["gpu"]["protected_blocks"] == 16
    overwrite(engine)
    assert come_back(engine) >= RESUMED


@full
@pytest.mark.parametrize("missing", [0, 7])
def test_what_arrived_before_a_hole_is_a_usable_prefix(build: Build, missing: int) -> None:
    conditions = Conditions()
    engine = build(conditions=conditions)
    turn(engine)
    overwrite(engine)
    hole = engine.half.manager.tracker.keys_of(SESSION)[missing]
    conditions.fails = lambda rank, key: LoadFailure.MISSING if key == hole else None
    engine.edit("s", {"type": "prefetch"})
    engine.run()
    operation = engine.operation()
    assert operation["status"] == ("partial" if missing else "not_found")
    assert operation["edits"][0]["done_blocks"] == missing
    conditions.fails = lambda rank, key: None
    prompt = resumed(engine)
    engine.add("again", prompt, session="s")
    engine.run()
    right(engine, again=prompt)
    assert engine.local_hits["again"] == 4 * missing


@full
@pytest.mark.parametrize(("share", "expected"), [(0.0, 16), (0.5, 16), (0.75, 8), (1.0, 0)])
def test_the_reserve_is_left_to_inference(build: Build, share: float, expected: int) -> None:
    """Of 32 free blocks, all ordinary, half at most and never the reserve."""
    engine = build(num_blocks=33, extra={"prefetch_reserve_share": share})
    turn(engine)
    overwrite(engine)
    engine.edit("s", {"type": "prefetch"})
    engine.run()
    operation = engine.operation()
    assert operation["edits"][0]["done_blocks"] == expected
    assert operation["status"] == {16: "ok", 8: "partial", 0: "rejected"}[expected]
    assert engine.half.sessions.sam.low_free(100) == 32 - expected


@full
def test_no_more_than_half_of_the_ordinary_blocks_are_taken(build: Build) -> None:
    engine = build(num_blocks=21, extra={"prefetch_reserve_share": 0.0})
    turn(engine)
    overwrite(engine)
    engine.edit("s", {"type": "prefetch"})
    engine.run()
    assert engine.operation()["edits"][0]["done_blocks"] == 10


@full
def test_inference_gets_its_blocks_back(build: Build) -> None:
    """A request that does not fit beside a prefetch is served next; nothing is lost."""
    conditions = Conditions()
    engine = build(conditions=conditions, num_blocks=41, extra={"prefetch_reserve_share": 0.0})
    turn(engine)
    overwrite(engine)
    conditions.load_steps = lambda: 50
    engine.edit("s", {"type": "prefetch"})
    engine.step()
    engine.step()
    prompt = [99, *range(3, 3 + 120)]
    engine.add("big", prompt)
    until(engine, lambda e: "big" in e.ended)
    engine.run()
    right(engine, big=prompt)
    assert engine.operation()["status"] == "rejected"


@full
def test_a_request_of_the_session_waits_for_what_is_on_its_way_and_loads_the_rest(
    build: Build,
) -> None:
    conditions = Conditions()
    engine = build(
        conditions=conditions, extra={"prefetch_inflight_bytes": 1 << 16, "batch_bytes": 1 << 15}
    )
    turn(engine)
    overwrite(engine)
    conditions.load_steps = lambda: 4
    engine.edit("s", {"type": "prefetch"})
    engine.step()
    engine.step()
    prompt = resumed(engine)
    engine.add("again", prompt, session="s")
    engine.run()
    right(engine, again=prompt)
    assert engine.local_hits["again"] == 32, "half of it was in flight"
    assert moved(engine) == 16, "nothing was loaded twice"
    assert engine.operation()["done"]


@full
def test_a_prefetch_that_a_request_waits_for_is_promoted_once(build: Build) -> None:
    conditions = Conditions()
    engine = build(conditions=conditions)
    turn(engine)
    overwrite(engine)
    conditions.load_steps = lambda: 8
    engine.edit("s", {"type": "prefetch"})
    engine.step()
    engine.step()
    engine.add("again", resumed(engine), session="s")
    engine.run()
    assert engine.promoted == [engine.commanded[-1].job_id]
    assert engine.commanded[-1].work is WorkClass.PREFETCH


@full
def test_a_session_that_ends_takes_its_prefetch_with_it(build: Build) -> None:
    conditions = Conditions(load_steps=lambda: 5)
    engine = build(conditions=conditions)
    turn(engine)
    overwrite(engine)
    engine.edit("s", {"type": "prefetch"})
    engine.step()
    engine.manage("end_session", session_id="s", tree=False, operation_id="end")
    engine.run()
    assert engine.operation()["status"] in ("failed", "not_found")
    assert engine.half.gauges()["spm:sam_records|"] == 0


@full
def test_a_cache_reset_ends_a_prefetch(build: Build) -> None:
    conditions = Conditions(load_steps=lambda: 5)
    engine = build(conditions=conditions)
    turn(engine)
    overwrite(engine)
    engine.edit("s", {"type": "prefetch"})
    engine.step()
    engine.step()
    engine.connector.reset_cache()
    engine.run()
    assert engine.operation()["done"]
    assert come_back(engine) == 0


@full
def test_into_the_host_tier_only(build: Build) -> None:
    conditions = Conditions(keeps_host=True)
    engine = build(conditions=conditions)
    turn(engine)
    overwrite(engine)
    for key in engine.half.manager.tracker.keys_of(SESSION):
        engine.workers[0].lose_host(key)
    engine.add("news", [9, 9, 9, 9, 9])
    engine.run()
    assert engine.manage("get_session", session_id="s")["session"]["residency"]["host"] == 0
    engine.edit("s", {"type": "prefetch", "target": "host"})
    engine.run()
    assert engine.operation()["status"] == "ok"
    residency = engine.manage("get_session", session_id="s")["session"]["residency"]
    assert (residency["gpu"], residency["host"], residency["remote"]) == (0, 16, 16)


@full
def test_more_operations_than_allowed_are_rejected(build: Build) -> None:
    conditions = Conditions(load_steps=lambda: 9)
    engine = build(conditions=conditions, extra={"max_operations": 2})
    turn(engine)
    overwrite(engine)
    edits = [{"type": "prefetch", "block_start": n, "block_end": n + 1} for n in range(4)]
    statuses = [edit["status"] for edit in engine.edit("s", *edits)["edits"]]
    assert statuses == ["accepted", "accepted", "rejected", "rejected"]
    engine.run()
    assert [e["status"] for e in engine.operation()["edits"]] == [
        "ok",
        "ok",
        "rejected",
        "rejected",
    ]


@full
def test_one_tenant_has_its_part_of_the_operations(build: Build) -> None:
    conditions = Conditions(load_steps=lambda: 9)
    extra = {"max_operations": 4, "sam": {"tenant_header": "X-Tenant"}}
    engine = build(conditions=conditions, extra=extra)
    turn(engine)
    overwrite(engine)
    edits = [{"type": "prefetch", "block_start": n, "block_end": n + 1} for n in range(4)]
    statuses = [edit["status"] for edit in engine.edit("s", *edits)["edits"]]
    assert statuses == ["accepted", "accepted", "rejected", "rejected"]
    engine.run()
    (later,) = engine.edit("s", edits[2], operation="later")["edits"]
    assert later["status"] != "rejected"
    engine.run()


@full
def test_an_idle_engine_forgets_sessions_when_it_is_asked(build: Build) -> None:
    engine = build(extra={"session_ttl_s": 1})
    turn(engine)
    assert engine.manage("get_session", session_id="s")["status"] == "ok"
    engine.now_s += 10
    assert engine.manage("list_sessions", limit=10)["sessions"] == []


@full
def test_what_lies_behind_a_block_that_was_given_up_is_not_loaded(build: Build) -> None:
    engine = build()
    turn(engine)
    overwrite(engine)
    engine.edit("s", {"type": "evict", "block_start": 6, "block_end": 8}, operation="evict")
    engine.edit("s", {"type": "prefetch"})
    engine.run()
    (edit,) = engine.operation()["edits"]
    assert (edit["status"], edit["done_blocks"]) == ("partial", 6)
    assert "block 6" in engine.operation()["detail"]
    engine.edit("s", {"type": "prefetch", "block_start": 8, "block_end": 99}, operation="tail")
    engine.run()
    (edit,) = engine.operation("tail")["edits"]
    assert (edit["status"], edit["done_blocks"]) == ("partial", 8)
    assert "16 logical blocks" in edit["detail"]


@full
def test_what_a_session_gave_up_is_what_is_said_of_it(build: Build) -> None:
    engine = build()
    turn(engine, cache_control={"ttl": 300})
    engine.edit("s", {"type": "offload"}, operation="1")
    engine.run()
    session = engine.manage("get_session", session_id="s")["session"]
    assert (session["class"], session["ttl_left_s"], session["blocks"]) == ("demoted", 0.0, 16)
    engine.edit("s", {"type": "evict"}, operation="2")
    session = engine.manage("get_session", session_id="s")["session"]
    assert (session["class"], session["blocks"]) == ("finished", 0)


# --- evict, keep-alive, other engines --------------------------------------------------


@full
def test_evicted_blocks_are_deleted_unless_another_session_holds_them(build: Build) -> None:
    engine = build()
    turn(engine)
    turn(engine, session="other", name="same")
    engine.edit("s", {"type": "evict"}, operation="one")
    assert engine.keeper.deleted == []
    assert engine.edit("other", {"type": "evict"}, operation="two")["status"] == "ok"
    assert len(engine.keeper.deleted) == 16
    assert not engine.conditions.values


@full
def test_keys_are_held_while_their_session_is_worth_it(build: Build) -> None:
    engine = build()
    turn(engine, cache_control={"ttl": 900})
    assert len(engine.keeper.held) == 16
    assert min(engine.keeper.held.values()) >= engine.now_s + 890
    engine.manage("end_session", session_id="s", tree=False, operation_id="end")
    assert not engine.keeper.held


@full
def test_keys_that_keep_alive_missed_are_saved_or_computed_again(build: Build) -> None:
    engine = build()
    turn(engine)
    overwrite(engine)
    engine.keeper.lose(engine.half.manager.tracker.keys_of(SESSION)[8:], engine.now_s)
    engine.add("news", [9, 9, 9, 9, 9])
    engine.run()
    residency = engine.manage("get_session", session_id="s")["session"]["residency"]
    assert residency["remote"] == 8
    assert come_back(engine) == 0
    assert moved(engine) == 8


@every_model
def test_another_engine_prefetches_a_session_it_never_saw(build: Build) -> None:
    conditions = Conditions()
    first, second = (build(conditions=conditions, num_blocks=96) for _ in range(2))
    turn(first)
    answer = second.edit("s", {"type": "prefetch"})
    assert answer["status"] == "accepted"
    second.run()
    assert second.operation()["status"] == "ok"
    prompt = resumed(first)
    second.add("again", prompt, session="s")
    second.run()
    right(second, again=prompt)
    assert second.local_hits["again"] >= RESUMED


@full
def test_another_engines_session_is_reported_and_not_adopted(build: Build) -> None:
    conditions = Conditions()
    first, second = (build(conditions=conditions) for _ in range(2))
    turn(first)
    request = {"v": 1, "op": "get_session", "tenant": "default", "session_id": "s"}
    promise = second.half.manage(request)
    assert not isinstance(promise, dict)
    second.run()
    session = promise.result(timeout=0)["session"]
    assert (session["origin"], session["blocks"]) == ("manifest", 16)
    assert session["residency"]["remote"] == 16
    assert second.half.manager.tracker.num_sessions == 0
    promise = second.half.manage({**request, "tenant": "somebody"})
    assert not isinstance(promise, dict)
    second.run()
    assert promise.result(timeout=0)["status"] == "not_found"


@full
def test_nothing_is_found_of_a_session_that_nobody_has(build: Build) -> None:
    engine = build()
    assert engine.edit("s", {"type": "prefetch"})["status"] == "accepted"
    engine.run()
    assert engine.operation()["status"] == "not_found"
    assert engine.edit("s", {"type": "offload"}, operation="2")["status"] == "not_found"


# --- auto mode -------------------------------------------------------------------------


def auto_state(engine: Engine) -> dict[str, Any]:
    state = engine.manage("get_session", session_id="s")["session"]["auto"]
    assert isinstance(state, dict)
    return state


def auto_engine(build: Build, num_blocks: int, bytes_per_s: float) -> Engine:
    """One whose pool holds a session and little more, with a store as fast as this."""
    engine = build(num_blocks=num_blocks, extra={"auto": True})
    assert engine.half.pooling is not None
    engine.half.pooling.speeds.note(Tier.REMOTE, 1 << 30, (1 << 30) / bytes_per_s)
    return engine


@full
def test_without_pressure_everything_is_retained(build: Build) -> None:
    engine = auto_engine(build, 200, 1e9)
    turn(engine, expected_resume_s=600)
    assert auto_state(engine)["decision"] == "retain"
    assert "pressure" in auto_state(engine)["reason"].lower()


@full
@pytest.mark.parametrize(("gap_s", "decision"), [(0.0, "retain"), (3600.0, "offload")])
def test_under_pressure_the_gap_decides(build: Build, gap_s: float, decision: str) -> None:
    engine = auto_engine(build, 20, 1e6)
    turn(engine, expected_resume_s=gap_s)
    assert auto_state(engine)["decision"] == decision
    protected = engine.manage("status")["engine"]["tiers"]["gpu"]["protected_blocks"]
    assert (protected > 0) == (decision == "retain")


@full
def test_what_the_application_says_wins_over_auto_mode(build: Build) -> None:
    engine = auto_engine(build, 20, 1e6)
    turn(engine, expected_resume_s=3600, cache_control={"ttl": 60})
    assert engine.manage("get_session", session_id="s")["session"]["auto"] is None


@full
def test_a_session_that_came_back_late_is_expected_late(build: Build) -> None:
    engine = auto_engine(build, 20, 1e6)
    turn(engine)
    engine.now_s += 200
    engine.add("again", resumed(engine), session="s")
    engine.run()
    assert auto_state(engine)["decision"] == "offload"


@full
def test_what_is_computed_faster_than_loaded_is_dropped(build: Build) -> None:
    engine = auto_engine(build, 20, 1e3)
    assert engine.half.pooling is not None
    rate = engine.half.pooling.rate
    rate.note_step(10_000)
    engine.now_s += 0.01
    rate.note_end()
    turn(engine, expected_resume_s=3600)
    assert auto_state(engine)["decision"] == "drop"
    status = engine.manage("status")["engine"]
    assert (status["operations"], status["tiers"]["gpu"]["protected_blocks"]) == (0, 0)
