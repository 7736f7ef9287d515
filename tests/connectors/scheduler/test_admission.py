"""Sessions that resume go first: what waits, for how long, and what never does. On vLLM's own
schedulers, with a pool that holds three sessions of forty tokens and not four."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.scheduler.admission import _STALE, AdmissionGate
from spm.config import SamConfig
from spm.metrics import Metric, metric_key
from spm.sam.manager import SessionAwareManager
from spm.sam.zones import Zone
from tests.connectors.scheduler.kit import geometry_of
from tests.connectors.scheduler.scenarios import MODELS, Build, parts
from tests.connectors.scheduler.simulated_engine import STEP_S, Engine
from tracker.ids import SessionId, SessionRef, TenantId

_BLOCKS = 37
_AWAY = {"state": "waiting_tool", "expected_resume_s": 1, "cache_control": {"ttl": 5}}
_HELD = metric_key(Metric.ADMISSIONS_HELD)
full = parts("full")


def prompt_of(number: int, length: int = 40) -> list[int]:
    return [10 + number, *range(3, 3 + length - 1)]


def gated(build: Build, **sam: Any) -> Engine:  # noqa: ANN401
    caps = {"max_protected_share": 1.0, "max_tenant_protected_share": 1.0}
    extra = {"host_bytes": 0, "sam": {"resume_first_s": 2.0, **caps, **sam}}
    return build(num_blocks=_BLOCKS, extra=extra)


def three_away(engine: Engine) -> dict[str, list[int]]:
    """Three sessions are expected back; what each would send next."""
    prompts = {name: prompt_of(number) for number, name in enumerate("abc")}
    for name, prompt in prompts.items():
        engine.add(f"{name}1", prompt, session=name, hint=_AWAY)
        engine.run()
    return {n: [*prompts[n], *engine.outputs[f"{n}1"], 7, 8] for n in prompts}


def keep_busy(engine: Engine) -> None:
    """A small request without a hint that runs for long."""
    engine.add("busy", [99, 98], max_tokens=12)
    engine.step()
    engine.step()


@full
def test_a_newcomer_waits_for_those_expected_back(build: Build) -> None:
    engine = gated(build)
    following = three_away(engine)
    keep_busy(engine)
    engine.add("new", prompt_of(9), session="new")
    engine.step()
    engine.add("a2", following["a"], session="a", hint=_AWAY)
    engine.add("b2", following["b"], session="b", hint=_AWAY)
    engine.run()
    order = list(engine.ended)
    assert order.index("a2") < order.index("new")
    assert order.index("b2") < order.index("new")
    assert engine.local_hits["a2"] >= 40
    assert engine.local_hits["b2"] >= 40
    assert engine.counters.drain()[_HELD] == 1


@full
def test_without_the_setting_the_newcomer_displaces_them(build: Build) -> None:
    engine = gated(build, resume_first_s=0.0)
    following = three_away(engine)
    keep_busy(engine)
    engine.add("new", prompt_of(9), session="new")
    engine.step()
    for name in "abc":
        engine.add(f"{name}2", following[name], session=name, hint=_AWAY)
    engine.run()
    assert min(engine.local_hits[f"{name}2"] for name in "abc") < 40
    assert _HELD not in engine.counters.drain()


@full
def test_nothing_waits_longer_than_it_may(build: Build) -> None:
    """Those expected back do not come, and the engine always has something to do."""
    engine = gated(build, resume_first_s=0.2)
    three_away(engine)
    keep_busy(engine)
    engine.add("new", prompt_of(9), session="new")
    engine.step()
    assert engine.counters.drain()[_HELD] == 1
    for number in range(40):
        engine.add(f"busy{number}", [99, number], max_tokens=2)
        engine.step()
        if "new" in engine.ended:
            break
    assert "new" in engine.ended
    steps = 0.2 / STEP_S
    assert number <= steps + 10, "it was let in as soon as its time was over"
    engine.run()


@full
def test_an_idle_engine_lets_everything_in(build: Build) -> None:
    engine = gated(build, resume_first_s=3600.0)
    three_away(engine)
    engine.add("new", prompt_of(9), session="new")
    engine.run(limit=12)
    assert "new" in engine.ended


@full
def test_requests_without_a_session_never_wait(build: Build) -> None:
    engine = gated(build)
    three_away(engine)
    keep_busy(engine)
    engine.add("unnamed", prompt_of(9))
    engine.run(limit=30)
    assert list(engine.ended)[-2:] == ["unnamed", "busy"]
    assert _HELD not in engine.counters.drain()


@full
@pytest.mark.parametrize("how", ["ended", "later", "expired"])
def test_what_is_not_expected_back_soon_holds_nobody_up(build: Build, how: str) -> None:
    engine = gated(build)
    three_away(engine)
    for number, name in enumerate("abc"):
        if how == "ended":
            engine.manage("end_session", session_id=name, operation_id=f"end{number}")
        elif how == "later":
            hint = {"session_id": name, "expected_resume_s": 60}
            engine.manage("apply", hint=hint, operation_id=f"later{number}")
        else:
            engine.now_s += 6.0
    keep_busy(engine)
    engine.add("new", prompt_of(9), session="new")
    engine.run(limit=40)
    assert list(engine.ended)[-2:] == ["new", "busy"]
    assert _HELD not in engine.counters.drain()


@full
def test_an_aborted_request_leaves_nothing_held(build: Build) -> None:
    engine = gated(build)
    three_away(engine)
    keep_busy(engine)
    engine.add("new", prompt_of(9), session="new")
    engine.step()
    assert engine.counters.drain()[_HELD] == 1
    engine.abort("new")
    engine.run()
    engine.connector.check_integrity(idle=True)


def is_let_in(engine: Engine) -> bool:
    """Whether a newcomer goes first although the engine is busy."""
    keep_busy(engine)
    engine.add("new", prompt_of(9), session="new")
    engine.run(limit=60)
    return _HELD not in engine.counters.drain()


@full
@pytest.mark.parametrize("how", ["taken", "reset", "evicted"])
def test_blocks_that_are_gone_are_reserved_no_longer(build: Build, how: str) -> None:
    engine = gated(build)
    three_away(engine)
    if how == "taken":
        engine.add("unnamed", prompt_of(8, 132))
        engine.run()
    elif how == "reset":
        engine.forget_gpu()
    else:
        for name in "abc":
            engine.edit(name, {"type": "evict"}, operation=name)
    assert is_let_in(engine)


@full
def test_those_that_wait_already_go_before_a_newcomer_on_an_idle_engine(build: Build) -> None:
    engine = gated(build)
    following = three_away(engine)
    engine.add("new", prompt_of(9), session="new")
    for name in "abc":
        engine.add(f"{name}2", following[name], session=name, hint=_AWAY)
    engine.run()
    assert min(engine.local_hits[f"{name}2"] for name in "abc") >= 40


@full
def test_a_session_may_come_back_with_a_long_tool_result(build: Build) -> None:
    """It has all it had, if less than half of what it brings."""
    engine = gated(build)
    following = three_away(engine)
    keep_busy(engine)
    longer = [*following["a"], *range(100, 120)]
    engine.add("a2", [*longer, *range(20, 40)], session="a", hint=_AWAY)
    engine.step()
    engine.run()
    assert engine.local_hits["a2"] >= 40
    assert _HELD not in engine.counters.drain()


class _Said(SessionAwareManager):
    """Says of sessions what a test wants it to."""

    def __init__(self) -> None:
        self.states: dict[SessionRef, tuple[Zone, float, int]] = {}
        self.branches: dict[SessionRef, int] = {}
        """Blocks of a session with those it shares; as many as its own if not told."""

    def state(self, ref: SessionRef) -> tuple[Zone, float]:
        return self.states.get(ref, (Zone.ORDINARY, 0.0, 0))[:2]

    def own_blocks(self, ref: SessionRef) -> int:
        return self.states[ref][2]

    def branch_blocks(self, ref: SessionRef) -> int:
        return self.branches.get(ref, self.states[ref][2])


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),
            st.sampled_from(["soon", "later", "arrived", "admitted", "wait"]),
            st.floats(0.0, 20.0),
            st.integers(0, 50),
        ),
        max_size=60,
    )
)
def test_reservations_are_those_of_a_naive_model(steps: list[tuple[int, str, float, int]]) -> None:
    now_s, said = 0.0, _Said()
    config = SamConfig(resume_first_s=5.0, soon_s=10.0)
    gate = AdmissionGate(config, geometry_of(MODELS["full"]), said, lambda: now_s)
    expected: dict[SessionRef, tuple[int, float]] = {}
    waiting: set[SessionRef] = set()
    for number, what, seconds, blocks in steps:
        ref = SessionRef(TenantId("t"), SessionId(str(number)))
        if what in ("soon", "later"):
            zone = Zone.SOON if what == "soon" else Zone.LATER
            said.states[ref] = (zone, seconds, blocks)
            gate.said(ref)
            expected.pop(ref, None)
            if zone is Zone.SOON and seconds > 0:
                expected[ref] = (blocks, now_s + min(seconds, 10.0))
        elif what == "arrived":
            gate.arrived(ref)
            if ref in expected and ref not in waiting:
                expected[ref] = (expected[ref][0], now_s + 5.0)
                waiting.add(ref)
        elif what == "admitted":
            gate.admitted(ref)
            expected.pop(ref, None)
        else:
            now_s += seconds
        gate.expire()
        if what in ("soon", "later", "admitted"):
            waiting.discard(ref)
        expected = {ref: one for ref, one in expected.items() if one[1] > now_s}
        waiting &= expected.keys()
        assert gate.reserved_blocks == sum(blocks for blocks, _ in expected.values())
        gate.check_integrity()


def test_saying_the_same_again_and_again_takes_no_memory() -> None:
    said, ref = _Said(), SessionRef(TenantId("t"), SessionId("s"))
    said.states[ref] = (Zone.SOON, 5.0, 1)
    gate = AdmissionGate(
        SamConfig(resume_first_s=1.0), geometry_of(MODELS["full"]), said, lambda: 0.0
    )
    for _ in range(10 * _STALE):
        gate.said(ref)
    assert len(gate._ends) <= _STALE + 3


@pytest.mark.parametrize(("left_blocks", "held"), [(4, True), (30, False)])
def test_a_shared_prefix_alone_is_no_session_that_resumes(left_blocks: int, held: bool) -> None:
    """A session of forty blocks, most of them shared: four of them are left, or thirty."""
    said, ref = _Said(), SessionRef(TenantId("t"), SessionId("s"))
    said.states[ref], said.branches[ref] = (Zone.SOON, 5.0, 5), 40
    gate = AdmissionGate(
        SamConfig(resume_first_s=1.0), geometry_of(MODELS["full"]), said, lambda: 0.0
    )
    gate.pool = cast("Any", SimpleNamespace(get_num_free_blocks=lambda: 8))
    gate.said(ref)
    gate.arrived(ref)
    gate.end_step(1)
    request = cast("Any", SimpleNamespace(num_tokens=44 * 4))
    assert gate.holds(request, ref, 0.0, left_blocks * 4) == held
