"""Hints at the boundaries of vLLM's own schedulers: what the small pool still holds after
others wanted room, and what happens to hints when requests are preempted or aborted."""

from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from connectors.scheduler.sessions import SessionHooks
from spm.config import SpmConfig
from spm.metrics import Metric, metric_key
from tests.connectors.scheduler.kit import geometry_of
from tests.connectors.scheduler.scenarios import MODELS, TAIL, Build, parts, right
from tests.connectors.scheduler.simulated_engine import Engine

_PROTECT = {"cache_control": {"ttl": 300}}
_LATE = metric_key(Metric.HINTS, "late")
_HINTS_ONLY: dict[str, Any] = {"host_bytes": 0}

every_model = parts(*MODELS)
full = parts("full")


def prompt_of(number: int, length: int = 40) -> list[int]:
    return [10 + number, *range(3, 3 + length - 1)]


def press(engine: Engine, requests: int) -> None:
    """Requests without hints, one after the other."""
    for number in range(requests):
        engine.add(f"other{number}", prompt_of(100 + number))
        engine.run()


def hit_tokens(engine: Engine, name: str, prompt: list[int], **how: Any) -> int:  # noqa: ANN401
    """Serve it; the tokens that the GPU pool still had."""
    engine.add(name, prompt, **how)
    engine.run()
    right(engine, **{name: prompt})
    return engine.local_hits[name]


@every_model
@pytest.mark.fault("F16", breaks="a hint acts after the blocks of its request were freed")
def test_protection_decides_who_stays(build: Build) -> None:
    engine = build(num_blocks=48, extra=_HINTS_ONLY)
    engine.add("kept", prompt_of(1), session="a", hint=_PROTECT)
    engine.add("lost", prompt_of(2))
    engine.run()
    press(engine, 12)
    kept = [*prompt_of(1), *engine.outputs["kept"], *TAIL]
    lost = [*prompt_of(2), *engine.outputs["lost"], *TAIL]
    assert hit_tokens(engine, "kept again", kept) >= 40
    assert hit_tokens(engine, "lost again", lost) == 0
    assert _LATE not in engine.counters.drain()


@full
def test_a_branch_keeps_the_shared_prefix_while_any_lives(build: Build) -> None:
    engine = build(num_blocks=40, extra=_HINTS_ONLY)
    shared = prompt_of(1)
    engine.add("parent", shared, session="root", hint={"state": "waiting_tool"})
    engine.run()
    for child in "abc":
        hint = {"session_id": child, "parent_session_id": "root", **_PROTECT}
        engine.add(child, [*shared, ord(child), 5, 6, 7], hint=hint)
        engine.run()
    for gone in ("root", "a", "b"):
        answer = engine.manage("end_session", session_id=gone, tree=False, operation_id=gone)
        assert answer["ended"] == [gone]
        press(engine, 6)
        assert hit_tokens(engine, f"after {gone}", shared) >= 36, "one branch is left"
    engine.manage("end_session", session_id="c", tree=True, operation_id="c")
    press(engine, 8)
    assert hit_tokens(engine, "after all", shared) < 36


@full
def test_a_preempted_session_keeps_what_it_had_computed(build: Build) -> None:
    """The pool has room for one of the two; the hinted one resumes from its own blocks."""
    engine = build(num_blocks=22, extra=_HINTS_ONLY)
    engine.add("first", prompt_of(1), max_tokens=30)
    hinted = engine.add("second", prompt_of(2, 24), max_tokens=30, session="s", hint=_PROTECT)
    engine.run()
    assert hinted.num_preemptions > 0, "the scenario is meant to preempt it"
    right(engine, first=prompt_of(1), second=prompt_of(2, 24))
    assert engine.half.sessions.sam.gauges()[metric_key(Metric.SAM_RECORDS)] <= 14


@full
@pytest.mark.parametrize("steps", range(6))
def test_an_abort_at_any_step_leaves_no_claim_of_its_own(build: Build, steps: int) -> None:
    engine = build(num_blocks=40, extra=_HINTS_ONLY)
    engine.add("aborted", prompt_of(1), max_tokens=8, session="s", hint=_PROTECT)
    for _ in range(steps):
        engine.step()
    engine.abort("aborted")
    engine.run()
    assert engine.manage("end_session", session_id="s", operation_id="1")["status"] == "ok"
    assert engine.half.sessions.sam.gauges()[metric_key(Metric.SAM_RECORDS)] == 0
    assert hit_tokens(engine, "next", prompt_of(3)) == 0


@full
def test_vllms_own_hint_envelope_is_read(build: Build) -> None:
    engine = build(num_blocks=40, extra=_HINTS_ONLY)
    actions = [
        KvHintAction("1", "kv.fetch", "1.0", {"from": "elsewhere"}),
        KvHintAction("2", "kv.retain", "1.0", {"ttl": 60, "state": "waiting_user"}),
    ]
    request = engine.add(
        "r", prompt_of(1), session="s", kv_hints=KvHintsEnvelope("0.1", "m", actions)
    )
    engine.run()
    assert request.kv_hints is not None
    assert engine.params["r"]["spm"]["class"] == "later"
    assert engine.params["r"]["spm"]["ttl_s"] == 60


@full
def test_a_reset_of_the_prefix_cache_ends_every_claim(build: Build) -> None:
    engine = build(num_blocks=40, extra=_HINTS_ONLY)
    engine.add("r", prompt_of(1), session="s", hint=_PROTECT)
    engine.run()
    engine.forget_gpu()
    assert hit_tokens(engine, "again", prompt_of(1)) == 0
    gauges = engine.half.sessions.sam.gauges()
    assert gauges[metric_key(Metric.SAM_RECORDS)] == 0
    assert gauges[metric_key(Metric.SAM_PROTECTED_BLOCKS)] == 0


@full
def test_a_model_with_several_pools_keeps_vllms_order(build: Build) -> None:
    """Block ids of one pool mean nothing in another."""
    engine = build(num_blocks=40, extra=_HINTS_ONLY)
    manager = engine.scheduler.kv_cache_manager
    hooks = SessionHooks(
        SpmConfig(host_bytes=0),
        geometry_of(MODELS["full"]),
        1,
        "engine",
        engine.counters,
        lambda: engine.now_s,
    )
    stock = FreeKVCacheBlockQueue(manager.block_pool.free_block_queue.get_all_free_blocks())
    manager.block_pool.free_block_queue = stock
    manager.coordinator.single_type_managers[0].block_pool = BlockPool(8, True, 4)
    hooks.bind(manager)
    assert manager.block_pool.free_block_queue is stock
    assert hooks.gauges()[metric_key(Metric.SAM_ACTIVE)] == 0


@full
@pytest.mark.parametrize("state", ["finished", None])
def test_what_was_nobodys_session_is_not_given_away(build: Build, state: str | None) -> None:
    """A prefix that requests without a session use is not a session's to give up first."""
    engine = build(num_blocks=64, extra=_HINTS_ONLY)
    common = prompt_of(1, 24)
    engine.add("anonymous", common)
    engine.run()
    hint = {"state": state} if state else {}
    engine.add("session", [*common, 5, 5, 5, 5, 6, 6, 6, 6], session="s", hint=hint)
    engine.run()
    if state is None:  # it goes on with another prompt, and the old one is superseded
        engine.add("other", prompt_of(9), session="s", hint=hint)
        engine.run()
    sizes = engine.half.sessions.sam.gauges()
    low = [sizes[metric_key(Metric.SAM_BLOCKS, zone)] for zone in ("finished", "demoted")]
    assert 0 < sum(low) <= 4, "only what it computed itself"
    press(engine, 1)
    assert hit_tokens(engine, "anonymous again", common) == 20
