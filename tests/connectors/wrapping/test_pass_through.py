"""Every hook reaches the wrapped connector: with vLLM's arguments, once, in vLLM's order."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from connectors import plugin
from connectors.session_aware import SessionAwareConnector
from connectors.wrapping.connector import WrappingConnector
from connectors.wrapping.envelope import FillCommand, FillResult, WrappedCommands, WrappedReport
from tests.connectors.scheduler.vllm_parts import FULL, make_request, write_model
from tests.connectors.wrapping import spying
from tests.connectors.wrapping.driving import (
    OURS,
    Driven,
    Settings,
    config_of,
    multi,
    recording,
    settings,
    wrapped,
)
from tests.connectors.wrapping.recording import STORES, Call, RecordedStore
from tests.connectors.wrapping.recording_parts import RecordedReport

SPY = settings("Spy", spying.__name__)
PROMPT = list(range(3, 44))
OFF_AND_ON = pytest.mark.parametrize("sessions", [False, True], ids=["off", "on"])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path)


# --- hook by hook ------------------------------------------------------------------------


@dataclass
class Hook:
    """How vLLM calls it, and what the wrapped connector should see of that."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    heard: tuple[Any, ...] | None = None
    """None: the same."""
    answer: Any = "the wrapped connector's"
    gives: Any = None
    """What the wrapped connector answers, if it may not be any string."""


REQUEST, STEP, META = make_request("r", PROMPT), SchedulerOutput.make_empty(), object()
INNER_META: Any = object()
COMMANDS = WrappedCommands(INNER_META)
OUTPUT, MANAGER = KVConnectorOutput(), SimpleNamespace(block_pool=None)
REPORT, RESULTS = RecordedReport([]), KVConnectorTransferResults({"a"}, {"b"}, {"c"})

HOOKS: dict[str, Hook] = {
    # scheduler side
    "bind_kv_cache_manager": Hook((MANAGER,), answer=None),
    "bind_gpu_block_pool": Hook((META,), answer=None),
    "set_xfer_handshake_metadata": Hook(({0: META},), answer=None),
    "set_xfer_handshake_metadata_pp_aware": Hook(({(0, 0): META},), answer=None),
    "on_new_request": Hook((REQUEST,), answer=None),
    "get_num_new_matched_tokens": Hook((REQUEST, 8)),
    "get_loaded_kv_cache_group_ids": Hook((REQUEST,)),
    "get_external_cache_hit_sources": Hook((REQUEST, 8)),
    "update_state_after_alloc": Hook((REQUEST, META, 8), answer=None),
    "build_connector_meta": Hook((STEP,), gives=INNER_META, answer=COMMANDS),
    "update_connector_output": Hook((OUTPUT,), answer=None),
    "request_finished": Hook((REQUEST, [1]), gives=(True, {"x": 1}), answer=(True, {"x": 1})),
    "request_finished_all_groups": Hook((REQUEST, ([1],)), gives=(True, None), answer=(True, None)),
    "register_finished_partial_tail": Hook((REQUEST, ([1],), [(0, 1, 2)])),
    "has_pending_push_work": Hook(gives=True, answer=True),
    "has_pending_block_frees": Hook(),
    "get_finished_count": Hook(),
    "take_events": Hook(),
    "reset_cache": Hook(),
    "requires_kv_delivery": Hook(),
    "supports_divergent_local_hybrid_hits": Hook(),
    # worker side
    "get_mem_pool_context": Hook(),
    "register_kv_caches": Hook(({},), answer=None),
    "set_host_xfer_buffer_ops": Hook((META,), answer=None),
    "get_handshake_metadata": Hook(),
    "handle_preemptions": Hook((COMMANDS,), heard=(INNER_META,), answer=None),
    "bind_connector_metadata": Hook((COMMANDS,), heard=(INNER_META,), answer=None),
    "has_connector_metadata": Hook(),
    "start_load_kv": Hook((META,), {"request_ids": ["r"]}, answer=None),
    "wait_for_layer_load": Hook(("layer0",), answer=None),
    "save_kv_layer": Hook(("layer0", META, META), {"more": 1}, answer=None),
    "finish_forward": Hook(answer=None),
    "reset_capture_state": Hook(answer=None),
    "wait_for_save": Hook(answer=None),
    "get_finished": Hook(({"r"},), gives=(None, {"r"}), answer=(None, {"r"})),
    "get_transfer_results": Hook(({"r"},), gives=RESULTS, answer=RESULTS),
    "get_block_ids_with_load_errors": Hook(gives={3}, answer={3}),
    "get_kv_connector_kv_cache_events": Hook(),
    "build_connector_worker_meta": Hook(gives=REPORT, answer=WrappedReport(REPORT)),
    "clear_connector_metadata": Hook(answer=None),
    # both
    "get_kv_connector_stats": Hook(gives=None, answer=None),
    "shutdown": Hook(answer=None),
}
OF_THE_CLASS = {
    "get_required_kvcache_layout",
    "requires_piecewise_for_cudagraph",
    "build_kv_connector_stats",
    "build_prom_metrics",
}
SAME_FOR_BOTH = {"role"}
"""Both were built for the same one."""


def test_no_hook_of_this_vllm_is_forgotten() -> None:
    """Fails when vLLM's base class has a new name: pass it on, and say here how."""
    assert set(HOOKS) | OF_THE_CLASS | SAME_FOR_BOTH == spying.PUBLIC


def wrapping(directory: Path, connector: Settings, role: KVConnectorRole) -> Any:  # noqa: ANN401
    config, kv_cache = config_of(directory, connector, FULL)
    built = KVConnectorFactory.create_connector(config, role, kv_cache)
    assert isinstance(built, WrappingConnector)
    return built


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_reaches_the_wrapped_connector(directory: Path, name: str) -> None:
    hook = HOOKS[name]
    connector = wrapping(directory, wrapped(SPY, sessions=False), KVConnectorRole.SCHEDULER)
    spy, kwargs = connector.inner, hook.kwargs or {}
    spy.answers["build_connector_meta"] = INNER_META
    if hook.gives is not None or hook.answer is None:
        spy.answers[name] = hook.gives
    expected = f"answer to {name}" if hook.answer == "the wrapped connector's" else hook.answer
    found = getattr(connector, name)
    answer = found(*hook.args, **kwargs) if callable(found) else found
    heard = hook.args if hook.heard is None else hook.heard
    assert spy.heard == [(name, heard, kwargs)], "once, and as vLLM said it"
    assert answer == expected
    if hook.heard is None:
        assert all(a is b for a, b in zip(spy.heard[0][1], hook.args, strict=True))


def test_what_only_some_connectors_have_is_found_too(directory: Path) -> None:
    connector = wrapping(directory, wrapped(SPY, sessions=False), KVConnectorRole.WORKER)
    assert connector.special == "what only this connector has"
    assert not hasattr(connector, "prefer_cross_layer_blocks")
    assert connector.role is KVConnectorRole.WORKER


def test_what_vllm_asks_the_class_the_wrapped_class_answers(directory: Path) -> None:
    """vLLM asks the class it knows by name; the settings say whom that concerns."""
    config, _ = config_of(directory, wrapped(recording("x"), sessions=False), FULL)
    own, _ = config_of(directory, settings(*OURS), FULL)
    assert config.kv_transfer_config is not None
    assert SessionAwareConnector.get_required_kvcache_layout(config) is None
    assert SessionAwareConnector.get_required_kvcache_layout(own) is None
    wrap = config.kv_transfer_config.kv_connector_extra_config["wrap"]
    wrap["kv_connector_extra_config"] |= {"layout": "HND", "piecewise": True}
    extra = config.kv_transfer_config.kv_connector_extra_config
    assert SessionAwareConnector.get_required_kvcache_layout(config) == "HND"
    assert SessionAwareConnector.requires_piecewise_for_cudagraph(extra)
    assert not SessionAwareConnector.requires_piecewise_for_cudagraph({})


def test_a_connector_may_change_what_vllm_lets_it_change(directory: Path) -> None:
    connector = wrapping(directory, wrapped(SPY, sessions=False), KVConnectorRole.SCHEDULER)

    class Changing:
        def build_connector_meta(self, step: SchedulerOutput) -> object:
            step.new_block_ids_to_zero = [2]
            return INNER_META

        def update_connector_output(self, output: KVConnectorOutput) -> None:
            assert output.kv_connector_worker_meta is REPORT
            output.finished_sending = {"s"}

    connector.inner = Changing()
    salted = make_request("salted", PROMPT)
    salted.cache_salt = "tenant"
    connector.gate.kept_out(salted)
    step = SchedulerOutput.make_empty()
    step.new_block_ids_to_zero = [1, 2]
    connector.build_connector_meta(step)
    assert step.new_block_ids_to_zero == [2], "also if it saw a filtered copy"
    report = WrappedReport(REPORT)
    output = KVConnectorOutput(finished_sending={"r", "s"}, kv_connector_worker_meta=report)
    connector.update_connector_output(output)
    assert output.finished_sending == {"s"}
    assert output.kv_connector_worker_meta is report


def test_ours_is_bound_first(directory: Path) -> None:
    """It replaces the queue of free blocks, which the wrapped connector may hold on to."""
    connector = wrapping(directory, wrapped(SPY), KVConnectorRole.SCHEDULER)
    bound: list[str] = []
    connector.half = SimpleNamespace(bind=lambda manager: bound.append("half"))
    connector.inner = SimpleNamespace(bind_kv_cache_manager=lambda manager: bound.append("inner"))
    connector.bind_kv_cache_manager(MANAGER)
    assert bound == ["half", "inner"]


def test_news_of_stand_ins_reach_the_wrapped_connector_and_not_vllm(directory: Path) -> None:
    connector = wrapping(directory, wrapped(SPY), KVConnectorRole.SCHEDULER)
    seen: list[Any] = []

    def update(output: KVConnectorOutput) -> None:
        seen.append((output.finished_recving, output.finished_sending))

    connector.inner = SimpleNamespace(update_connector_output=update)
    news = ({"spm-standin-1"}, {"spm-standin-2"})
    connector.half = SimpleNamespace(take_output=lambda output: news)
    for received, sent in ((None, None), ({"r"}, {"s"})):
        output = KVConnectorOutput(finished_recving=received, finished_sending=sent)
        connector.update_connector_output(output)
        assert (output.finished_recving, output.finished_sending) == (received, sent)
    assert seen == [
        ({"spm-standin-1"}, {"spm-standin-2"}),
        ({"spm-standin-1", "r"}, {"spm-standin-2", "s"}),
    ]


@pytest.mark.parametrize("theirs", [True, False, None])
def test_a_reset_is_done_if_both_say_so(directory: Path, theirs: bool | None) -> None:
    connector = wrapping(directory, wrapped(SPY), KVConnectorRole.SCHEDULER)
    connector.inner.answers["reset_cache"] = theirs
    connector.half = SimpleNamespace(reset=lambda: True)
    assert connector.reset_cache() is theirs
    connector.half = SimpleNamespace(reset=lambda: False)
    assert connector.reset_cache() is False


def test_events_of_both_are_published(directory: Path) -> None:
    connector = wrapping(directory, wrapped(SPY), KVConnectorRole.SCHEDULER)
    connector.inner.answers["take_events"] = theirs = ["theirs"]
    connector.half = SimpleNamespace(take_events=lambda: ())
    assert connector.take_events() is theirs
    connector.half = SimpleNamespace(take_events=lambda: ["ours"])
    assert connector.take_events() == ["theirs", "ours"]


def test_vllm_hears_nothing_of_stand_ins_from_workers(directory: Path) -> None:
    connector = wrapping(directory, wrapped(SPY), KVConnectorRole.WORKER)
    spy, load = connector.inner, FillCommand("spm-standin-1", (5, 6))
    ended = "spm-standin-2"
    connector.bind_connector_metadata(WrappedCommands(INNER_META, [load], [ended], ["salted"]))
    spy.answers["get_transfer_results"] = KVConnectorTransferResults(
        {ended, "s"}, {load.request_id, "r"}, {"r"}
    )
    spy.answers["get_block_ids_with_load_errors"] = {5, 9}
    spy.answers["build_connector_worker_meta"] = REPORT
    results = connector.get_transfer_results({"r", "salted"})
    assert spy.heard[-1] == ("get_transfer_results", ({"r", ended},), {})
    assert results == KVConnectorTransferResults({"s"}, {"r"}, {"r"})
    assert connector.get_block_ids_with_load_errors() == {9}
    report = connector.build_connector_worker_meta()
    assert report.inner is REPORT
    assert sorted(report.fills, key=lambda one: one.request_id) == [
        FillResult("spm-standin-1", loaded=True, failed_block_ids=(5,)),
        FillResult("spm-standin-2", saved=True),
    ]
    spy.answers["build_connector_worker_meta"] = None
    assert connector.build_connector_worker_meta() is None
    spy.answers["get_finished"] = ({"s"}, {"spm-standin-3"})
    assert connector.get_finished({"r"}) == ({"s"}, None)


@OFF_AND_ON
def test_both_are_shut_down_whoever_raises(directory: Path, sessions: bool) -> None:
    connector = wrapping(directory, wrapped(SPY, sessions=sessions), KVConnectorRole.SCHEDULER)
    closed = []

    def close(name: str) -> None:
        closed.append(name)
        raise RuntimeError(name)

    connector.inner = SimpleNamespace(shutdown=lambda: close("inner"))
    if sessions:
        connector.half = SimpleNamespace(shutdown=lambda: close("half"))
    with pytest.raises(RuntimeError):
        connector.shutdown()
    assert sorted(closed) == (["half", "inner"] if sessions else ["inner"])


def test_without_session_features_management_says_so(directory: Path) -> None:
    connector = wrapping(directory, wrapped(SPY, sessions=False), KVConnectorRole.SCHEDULER)
    core: Any = SimpleNamespace(
        scheduler=SimpleNamespace(get_kv_connector=lambda: connector), is_sleeping=lambda: False
    )
    answer = plugin.spm_manage(core, {"op": "status"})
    assert isinstance(answer, dict)
    assert answer["status"] == "unsupported"
    assert "sam.enabled" in answer["detail"]


# --- a whole engine, alone and wrapped -----------------------------------------------------


def slow(**how: Any) -> RecordedStore:  # noqa: ANN401
    return replace(RecordedStore(lookup_steps=1, load_steps=2, save_steps=3), **how)


def one_after_the_other(engine: Driven) -> None:
    engine.add("first", PROMPT)
    engine.run()
    engine.forget_gpu()
    engine.add("again", [*PROMPT, 7, 7, 7])
    engine.run()
    engine.add("local", [*PROMPT, 7, 7, 7], max_tokens=9)
    engine.run()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.add("new", PROMPT)
    engine.run()


def storm(seed: int) -> Callable[[Driven], None]:
    """Requests that share prefixes come, are preempted, aborted at any point and end."""

    def drive(engine: Driven) -> None:
        chance = random.Random(seed)
        for number in range(30):
            prefix = chance.choice((PROMPT, PROMPT[:20], [9] * 30))
            tail = [3 + chance.randrange(5) for _ in range(chance.randrange(1, 20))]
            engine.add(f"r{number}", prefix + tail, max_tokens=chance.randrange(1, 30))
            for _ in range(chance.randrange(6)):
                engine.step()
            if chance.random() < 0.3:
                engine.abort(f"r{chance.randrange(number + 1)}")
            if chance.random() < 0.1:
                engine.scheduler.reset_prefix_cache()
        engine.run()

    return drive


def preempting(engine: Driven) -> None:
    requests = [engine.add(f"r{n}", [5 + n] * 30, max_tokens=50) for n in range(5)]
    engine.run()
    assert sum(request.num_preemptions for request in requests) > 0


Scenario = tuple[Callable[[Driven], None], Callable[[], RecordedStore], dict[str, Any]]
SCENARIOS: dict[str, Scenario] = {
    "one-after-the-other": (one_after_the_other, slow, {}),
    "in-step": (one_after_the_other, lambda: slow(loads_at_once=True), {}),
    "failing": (
        one_after_the_other,
        lambda: slow(fails=lambda name: name[0] % 3 == 0),
        {},
    ),
    "preempting": (preempting, slow, {"num_blocks": 40, "step_tokens": 32}),
    "storm": (storm(1), slow, {"num_blocks": 48, "step_tokens": 32}),
    "failing-storm": (
        storm(2),
        lambda: slow(fails=lambda name: name[0] % 4 == 0),
        {"num_blocks": 48, "step_tokens": 32},
    ),
}
every_scenario = pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=list(SCENARIOS))
both_schedulers = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def driven(
    directory: Path,
    connector: Settings,
    store: RecordedStore,
    scenario: Scenario,
    **how: Any,  # noqa: ANN401
) -> Driven:
    STORES["store"] = store
    drive, _, engine_settings = scenario
    engine = Driven(directory, connector, **engine_settings, **how)
    drive(engine)
    engine.shutdown()
    return engine


def same_calls(one: list[Call], other: list[Call]) -> None:
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        assert left == right, f"call {at}"
    assert len(one) == len(other)
    assert one


@every_scenario
@pytest.mark.parametrize(("asynchronous", "hma"), [(False, False), (True, True)])
@OFF_AND_ON
def test_alone_and_wrapped_are_called_the_same(
    directory: Path, scenario: Scenario, asynchronous: bool, hma: bool, sessions: bool
) -> None:
    alone, inside = scenario[1](), scenario[1]()
    inner = recording("store", hma=hma)
    how = {"asynchronous": asynchronous}
    one = driven(directory, inner, alone, scenario, **how)
    other = driven(directory, wrapped(inner, sessions=sessions), inside, scenario, **how)
    assert isinstance(other.connector, WrappingConnector)
    same_calls(alone.scheduler_calls, inside.scheduler_calls)
    same_calls(alone.worker_calls, inside.worker_calls)
    assert one.outputs == other.outputs
    assert one.hits == other.hits
    assert one.params == other.params
    assert alone.num_loads or scenario[0] is preempting


@both_schedulers
@OFF_AND_ON
def test_a_child_of_multi_connector_is_called_the_same(
    directory: Path, asynchronous: bool, sessions: bool
) -> None:
    scenario = SCENARIOS["storm"]
    alone, inside = slow(), slow()
    how = {"asynchronous": asynchronous}
    one = driven(directory, multi(recording("store")), alone, scenario, **how)
    child = wrapped(recording("store"), sessions=sessions)
    other = driven(directory, multi(child), inside, scenario, **how)
    same_calls(*map(without_stats, (alone.scheduler_calls, inside.scheduler_calls)))
    same_calls(alone.worker_calls, inside.worker_calls)
    assert one.outputs == other.outputs
    assert one.hits == other.hits


def without_stats(calls: list[Call]) -> list[Call]:
    """A child sees its parent's, which name all children by their classes."""

    def part(value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, dict):
            return {k: part(v) for k, v in value.items() if k != "kv_connector_stats"}
        return type(value)(map(part, value)) if isinstance(value, (list, tuple)) else value

    return [part(call) for call in calls]


@both_schedulers
@OFF_AND_ON
def test_a_wrapped_multi_connector_is_called_the_same(
    directory: Path, asynchronous: bool, sessions: bool
) -> None:
    scenario = SCENARIOS["storm"]
    recorded = []
    parent = multi(recording("store"), recording("second"))
    for connector in (parent, wrapped(parent, sessions=sessions)):
        first, STORES["second"] = slow(), slow(lookup_steps=2)
        engine = driven(directory, connector, first, scenario, asynchronous=asynchronous)
        recorded.append((engine, first, STORES["second"]))
    (one, *alone), (other, *inside) = recorded
    for left, right in zip(alone, inside, strict=True):
        same_calls(left.scheduler_calls, right.scheduler_calls)
        same_calls(left.worker_calls, right.worker_calls)
    assert one.outputs == other.outputs
    assert one.hits == other.hits


@OFF_AND_ON
def test_of_two_children_each_keeps_its_own_loads_and_saves(
    directory: Path, sessions: bool
) -> None:
    STORES["store"], STORES["second"] = slow(), slow()
    child = wrapped(recording("second"), sessions=sessions)
    engine = Driven(directory, multi(recording("store"), child))
    one_after_the_other(engine)
    assert engine.hits["again"] == (0, 40)
    assert STORES["store"].values.keys() == STORES["second"].values.keys() != set()


def test_sessions_are_managed_through_a_multi_connector(directory: Path) -> None:
    STORES["store"] = slow()
    engine = Driven(directory, multi(wrapped(recording("store"))))
    engine.add("first", PROMPT, session="s")
    engine.run()
    core: Any = SimpleNamespace(scheduler=engine.scheduler, is_sleeping=lambda: False)
    asked = {"v": 1, "op": "status", "tenant": "default", "session_id": "s"}
    answer = cast("dict[str, Any]", plugin.spm_manage(core, asked))
    assert answer["status"] == "ok"


def test_the_client_hears_both_what_the_connector_and_what_the_session_says(
    directory: Path,
) -> None:
    STORES["store"] = slow()
    engine = Driven(directory, wrapped(recording("store")))
    engine.add("first", PROMPT, session="s")
    engine.run()
    params = engine.params["first"]
    assert params is not None
    assert params["blocks of store"] == 11
    assert params["spm"]["session_id"] == "s"


def test_a_request_that_never_ran_ends_without_a_trace(directory: Path) -> None:
    STORES["store"] = slow()
    engine = Driven(directory, wrapped(recording("store")))
    request = engine.add("first", PROMPT, session="s")
    engine.abort("first")
    assert request.status is RequestStatus.FINISHED_ABORTED
    engine.run()
