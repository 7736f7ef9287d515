"""Requests that a wrapped connector would mix up with others never reach it, in any hook."""

import dataclasses
import logging
import random
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import (
    CachedRequestData,
    KVConnectorBlockState,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.request import Request

from connectors.wrapping.connector import WrappingConnector
from connectors.wrapping.gate import RequestGate
from connectors.wrapping.traits import traits_of
from spm.metrics import Counters
from spm.wrap_config import Known, WrapConfig
from tests.connectors.scheduler.vllm_parts import make_request, write_model
from tests.connectors.wrapping.driving import Driven, recording, wrapped
from tests.connectors.wrapping.recording import STORES, RecordedStore

PROMPT = list(range(3, 44))


def gate_of(name: str, counters: Counters | None = None, **how: Any) -> RequestGate:  # noqa: ANN401
    wrap = WrapConfig(name, **how)
    return RequestGate(traits_of(wrap), name, counters or Counters())


def request_of(name: str, salt: str | None = None, *, adapter: bool = False) -> Request:
    request = make_request(name, PROMPT)
    request.cache_salt = salt
    request.lora_request = LoRARequest("adapter", 1, "/nowhere") if adapter else None
    return request


# --- who is kept out -----------------------------------------------------------------------


def multi(*names: str) -> dict[str, Any]:
    return {"kv_connector_extra_config": {"connectors": [{"kv_connector": n} for n in names]}}


@pytest.mark.parametrize(
    ("name", "how", "salts", "adapters"),
    [
        ("OffloadingConnector", {}, True, True),
        ("SimpleCPUOffloadConnector", {}, True, True),
        ("LMCacheMPConnector", {}, True, False),
        ("LMCacheConnectorV1", {}, False, False),
        ("ExampleConnector", {}, False, False),
        ("Unheard", {}, False, False),
        ("MultiConnector", multi("OffloadingConnector", "SimpleCPUOffloadConnector"), True, True),
        ("MultiConnector", multi("OffloadingConnector", "LMCacheMPConnector"), True, False),
        ("MultiConnector", multi("OffloadingConnector", "ExampleConnector"), False, False),
        ("MultiConnector", {}, False, False),
        ("OffloadingConnector", {"kv_connector_module_path": "mine"}, False, False),
        ("LMCacheMPConnector", {"kv_connector_module_path": "lmcache.x"}, True, False),
        ("ExampleConnector", {"isolates_cache_salt": "yes"}, True, False),
        ("ExampleConnector", {"isolates_adapters": "yes"}, False, True),
        ("OffloadingConnector", {"isolates_cache_salt": "no"}, False, True),
        ("OffloadingConnector", {"isolates_adapters": "no"}, True, False),
    ],
)
def test_what_is_known_of_connectors(
    name: str, how: dict[str, Any], salts: bool, adapters: bool
) -> None:
    gate = gate_of(name, **how)
    assert gate.admits(None, False)
    assert gate.admits("", False)
    assert gate.admits("tenant", False) is salts
    assert gate.admits(None, True) is adapters
    assert gate.admits("tenant", True) is (salts and adapters)


@pytest.mark.parametrize("salt", ["a@b", "a/b", "a\\b", "a\0b", "x" * 129])
@pytest.mark.parametrize("setting", ["auto", "yes"])
def test_a_salt_that_lmcache_raises_on_is_kept_out(salt: str, setting: Known) -> None:
    gate = gate_of("LMCacheMPConnector", isolates_cache_salt=setting)
    assert gate.admits("x" * 128, False)
    assert not gate.admits(salt, False)
    parent = gate_of("MultiConnector", **multi("LMCacheMPConnector", "OffloadingConnector"))
    assert parent.admits("x", False)
    assert not parent.admits(salt, False)


def test_all_are_counted_and_one_is_said(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters()
    gate = gate_of("ExampleConnector", counters)
    with caplog.at_level(logging.WARNING, "connectors"):
        for number in range(3):
            salted = request_of(f"salted{number}", "tenant")
            assert gate.kept_out(salted)
            assert gate.kept_out(salted)
        assert gate.kept_out(request_of("adapter", adapter=True))
        assert not gate.kept_out(request_of("plain"))
    counted = counters.drain()
    assert counted["spm:bypassed_requests|cache_salt"] == 3
    assert counted["spm:bypassed_requests|adapter"] == 1
    lines = [record.getMessage() for record in caplog.records]
    assert [("cache_salt" in line, "ExampleConnector" in line) for line in lines] == [
        (True, True),
        (False, True),
    ]
    assert not any("tenant" in line for line in lines), "a salt may be a secret"


def test_nothing_is_remembered_of_requests_that_are_over() -> None:
    gate = gate_of("ExampleConnector")
    salted = request_of("salted", "tenant")
    assert gate.kept_out(salted)
    gate.forget("salted")
    step = SchedulerOutput.make_empty()
    step.finished_req_ids = {"salted", "other"}
    assert gate.filtered(step, ()).finished_req_ids == {"other"}
    assert gate.num_kept == 0
    assert gate.filtered(step, ()) is step
    gate.forget("never heard of")
    assert gate.num_kept == 0


def test_a_new_request_may_have_the_id_of_one_that_was_kept_out() -> None:
    gate = gate_of("ExampleConnector")
    assert gate.kept_out(request_of("same", "tenant"))
    gate.forget("same")
    assert not gate.kept_out(request_of("same"))
    step = full_step(["same"], finished={"same"})
    seen = gate.filtered(step, ())
    assert [new.req_id for new in seen.scheduled_new_reqs] == ["same"]
    assert seen.finished_req_ids == set()


# --- the step as it sees it --------------------------------------------------------------------


def new_data(name: str) -> NewRequestData:
    return NewRequestData(name, [1, 2], [], None, None, ([1],), 0, None)


def full_step(
    new: list[str],
    cached: list[str] | None = None,
    finished: set[str] | None = None,
    *,
    tokens_by_step: bool = False,
) -> SchedulerOutput:
    """Every field that names requests names all of them."""
    going_on = cached or []
    names = [*new, *going_on]
    return SchedulerOutput(
        scheduled_new_reqs=[new_data(name) for name in new],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=list(going_on),
            resumed_req_ids=set(going_on),
            new_token_ids=[[at] for at, _ in enumerate(going_on)] if tokens_by_step else [],
            all_token_ids={name: [1] for name in going_on},
            new_block_ids=[([at],) for at, _ in enumerate(going_on)],
            num_computed_tokens=list(range(len(going_on))),
            num_output_tokens=list(range(len(going_on))),
        ),
        num_scheduled_tokens={name: at + 1 for at, name in enumerate(names)},
        total_num_scheduled_tokens=sum(range(1, len(names) + 1)),
        scheduled_spec_decode_tokens={name: [1] for name in names},
        scheduled_encoder_inputs={name: [0] for name in names},
        finished_req_ids=set(finished or ()),
        free_encoder_mm_hashes=["hash"],
        preempted_req_ids=set(names),
        num_invalid_spec_tokens=dict.fromkeys(names, 1),
        new_block_ids_to_zero=[1, 2],
        kv_connector_block_state=KVConnectorBlockState(
            set(names), lambda name: ([1],), {name: [(0, 1, 2)] for name in names}
        ),
    )


NAMES_NO_REQUEST = {
    "free_encoder_mm_hashes",
    "scheduled_encoder_input_stats",
    "has_structured_output_requests",
    "pending_structured_output_tokens",
    "kv_connector_metadata",
    "has_sync_kv_loads",
    "aux_output_connector_metadata",
    "ec_connector_metadata",
    "ec_manager_metadata",
    "new_block_ids_to_zero",
    "kv_cache_block_copies",
    "num_spec_tokens_to_schedule",
    "num_common_prefix_blocks",
}


@pytest.mark.parametrize("tokens_by_step", [False, True])
def test_no_field_of_a_step_names_who_is_kept_out(tokens_by_step: bool) -> None:
    gate = gate_of("ExampleConnector")
    hidden = ["salted-new", "salted-old", "salted-end"]
    assert all(gate.kept_out(request_of(name, "tenant")) for name in hidden)
    gate.forget("salted-end")
    step = full_step(
        ["new", "salted-new"],
        ["old", "salted-old", "older"],
        {"end", "salted-end"},
        tokens_by_step=tokens_by_step,
    )
    before = repr(dataclasses.asdict(step))
    seen = gate.filtered(step, ["spm-standin-1"])
    shown = full_step(
        ["new"],
        ["old", "older"],
        {"end", "spm-standin-1"},
        tokens_by_step=tokens_by_step,
    )
    assert "salted" not in repr(dataclasses.asdict(seen))
    assert seen.num_scheduled_tokens == {"new": 1, "old": 3, "older": 5}
    assert seen.total_num_scheduled_tokens == 9
    cached = seen.scheduled_cached_reqs
    assert cached.num_computed_tokens == cached.num_output_tokens == [0, 2]
    assert cached.new_block_ids == [([0],), ([2],)]
    assert cached.new_token_ids == ([[0], [2]] if tokens_by_step else [])
    renumbered = {"num_scheduled_tokens", "total_num_scheduled_tokens", "scheduled_cached_reqs"}
    for field in dataclasses.fields(SchedulerOutput):
        if field.name not in {*renumbered, "kv_connector_block_state"}:
            assert getattr(seen, field.name) == getattr(shown, field.name), field.name
    state, all_of = seen.kv_connector_block_state, shown.kv_connector_block_state
    assert state is not None
    assert all_of is not None
    assert (state.req_ids, state.boundary_state_offloads) == (
        all_of.req_ids,
        all_of.boundary_state_offloads,
    )
    assert repr(dataclasses.asdict(step)) == before, "vLLM's own step is not touched"


def test_every_field_of_this_vllm_is_thought_of() -> None:
    """Fails when a step has a new field: filter it, or say here that it names no request."""
    full = full_step(["new"], ["old"], {"end"}, tokens_by_step=True)
    for kind in (SchedulerOutput, CachedRequestData, KVConnectorBlockState):
        part: Any = {
            SchedulerOutput: full,
            CachedRequestData: full.scheduled_cached_reqs,
            KVConnectorBlockState: full.kv_connector_block_state,
        }[kind]
        names = {field.name for field in dataclasses.fields(kind)} - {"resolve_block_ids"}
        silent = {name for name in names if not getattr(part, name)}
        assert silent <= NAMES_NO_REQUEST, "a field that the test above says nothing about"


def test_a_step_without_anything_to_hide_is_the_very_same() -> None:
    gate = gate_of("ExampleConnector")
    step = full_step(["new"], ["old"], {"end"})
    assert gate.filtered(step, ()) is step
    assert gate.filtered(step, ["spm-standin-1"]).scheduled_new_reqs is step.scheduled_new_reqs


# --- a whole engine ---------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path)


def storm(engine: Driven, seed: int) -> list[Request]:
    """Salted, adapted and plain requests with the same prompts, under pressure."""
    chance, requests = random.Random(seed), []
    for number in range(30):
        kind: dict[str, Any] = chance.choice(({}, {"cache_salt": "t"}, {"adapter": "a"}))
        name = f"{'hidden' if kind else 'plain'}{number}"
        tail = [3 + chance.randrange(5) for _ in range(chance.randrange(1, 9))]
        requests.append(engine.add(name, PROMPT + tail, max_tokens=chance.randrange(1, 40), **kind))
        for _ in range(chance.randrange(5)):
            engine.step()
        if chance.random() < 0.3:
            engine.abort(requests[chance.randrange(len(requests))].request_id)
    engine.run()
    return requests


@pytest.mark.parametrize("sessions", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_the_connector_never_hears_of_them(
    directory: Path, sessions: bool, asynchronous: bool
) -> None:
    store = STORES["store"] = RecordedStore(lookup_steps=1, load_steps=2, save_steps=3)
    connector = wrapped(recording("store"), sessions=sessions)
    engine = Driven(directory, connector, asynchronous=asynchronous, num_blocks=40, step_tokens=32)
    requests = storm(engine, seed=3)
    assert isinstance(engine.connector, WrappingConnector)
    hidden = [request for request in requests if request.request_id.startswith("hidden")]
    assert sum(request.num_preemptions for request in hidden) > 0
    assert {"abort", "length"} <= {engine.ended[request.request_id] for request in hidden}
    assert "plain" in repr(store.scheduler_calls)
    assert "plain" in repr(store.worker_calls)
    assert store.num_loads > 0
    seen_by_workers = [call for call in store.worker_calls if call[0] != "start_load_kv"]
    assert "hidden" not in repr(store.scheduler_calls)
    assert "hidden" not in repr(seen_by_workers), "start_load_kv gets vLLM's own batch"
    assert engine.connector.gate.num_kept == 0
    assert all(engine.hits.get(request.request_id, (0, 0))[1] == 0 for request in hidden)


def hit_by(engine: Driven, name: str, cache_salt: str | None = None) -> int:
    engine.forget_gpu()
    engine.add(name, PROMPT, cache_salt=cache_salt)
    engine.run()
    return engine.hits[name][1]


def test_what_one_salt_stored_no_other_finds(directory: Path) -> None:
    """A connector that is said to keep them apart is asked, and does."""
    STORES["store"] = RecordedStore()
    inner = recording("store")
    engine = Driven(directory, wrapped(inner, wrap={"isolates_cache_salt": "yes"}))
    assert hit_by(engine, "a", cache_salt="a") == 0
    assert hit_by(engine, "again", cache_salt="a") == 40
    assert hit_by(engine, "b", cache_salt="b") == 0
    assert hit_by(engine, "none") == 0
    assert hit_by(engine, "none again") == 40


def test_a_salted_request_stores_nothing_and_finds_nothing(directory: Path) -> None:
    store = STORES["store"] = RecordedStore()
    engine = Driven(directory, wrapped(recording("store")))
    assert hit_by(engine, "salted", cache_salt="a") == 0
    assert store.values == {}
    assert hit_by(engine, "plain") == 0
    assert hit_by(engine, "plain again") == 40
    assert hit_by(engine, "salted again", cache_salt="a") == 0
    engine.add("salted, local", PROMPT, cache_salt="a")
    engine.run()
    assert engine.hits["salted, local"] == (40, 0), "vLLM's own pool keeps them apart"


def test_a_session_that_is_kept_out_is_a_session_all_the_same(directory: Path) -> None:
    """It is known, and its client hears of it."""
    store = STORES["store"] = RecordedStore()
    engine = Driven(directory, wrapped(recording("store")))
    engine.add("salted", PROMPT, cache_salt="a", session="s")
    engine.run()
    params = engine.params["salted"]
    assert params is not None
    assert params["spm"]["session_id"] == "s"
    assert set(params) == {"spm"}, "the connector had nothing to say"
    assert store.values == {}
