"""vLLM's OffloadingConnector (CPU and tiering), SimpleCPUOffloadConnector and ExampleConnector,
alone and wrapped: the same calls, decisions and metadata.

Only the scheduler's half is real here. The workers of the first two refuse to run without a
GPU, so the lowest part that copies is simulated (``vllm_connectors.py`` says which), and the
simulated model checks that what it reads is what they carried; ExampleConnector's worker needs a
real model's layers and is simulated whole.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import RequestStatus

from connectors.wrapping.connector import WrappingConnector
from connectors.wrapping.traits import traits_of
from spm.wrap_config import WrapConfig
from tests.connectors.scheduler.vllm_parts import FULL, HYBRID, Attention, make_request, write_model
from tests.connectors.wrapping import vllm_connectors
from tests.connectors.wrapping.driving import Driven, Settings, settings, wrapped
from tests.connectors.wrapping.recording import STORES, Call, RecordedStore

MODULE = vllm_connectors.__name__
PROMPT = list(range(3, 46))


@dataclass(frozen=True)
class Kind:
    """A connector of vLLM's, the model it serves and what moves its KV."""

    name: str
    extra: dict[str, Any]
    worker: Callable[..., None]
    model: tuple[Attention, ...] = FULL
    preempts: bool = True
    """Takes part in the storm; ExampleConnector asserts on preempted requests, also alone."""

    def settings(self, directory: Path, *, recorded: bool = True) -> Settings:
        extra = {**self.extra}
        if self.name == "ExampleConnector":
            extra["shared_storage_path"] = str(directory)
        if not recorded:
            return settings(self.name, None, **extra)
        return settings(f"Recorded{self.name}", MODULE, store="store", **extra)


PAGE = 4096
"""To which OffloadingConnector rounds up a chunk."""
TIERING = {
    "spec_name": "TieringOffloadingSpec",
    "cpu_bytes_to_use": 14 * PAGE,
    "secondary_tiers": [{"type": "KeptTier", "module_path": MODULE}],
}
OFFLOADING, SIMPLE = "OffloadingConnector", "SimpleCPUOffloadConnector"
in_host, by_handler = vllm_connectors.offloading_worker, vllm_connectors.simple_worker
HOST = {"cpu_bytes_to_use": 40 * PAGE}
BLOCKS = {"cpu_bytes_to_use": 40 * 512}
KINDS = {
    "offloading": Kind(OFFLOADING, {**HOST, "offload_prompt_only": False}, in_host),
    "offloading-hybrid": Kind(OFFLOADING, HOST, in_host, HYBRID),
    "tiering": Kind(OFFLOADING, TIERING, in_host),
    "simple": Kind(SIMPLE, BLOCKS, by_handler),
    "simple-hybrid": Kind(SIMPLE, BLOCKS, by_handler, HYBRID),
    "simple-lazy": Kind(SIMPLE, {**BLOCKS, "lazy_offload": True}, by_handler),
    "example": Kind("ExampleConnector", {}, vllm_connectors.example_worker, preempts=False),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path)


def engine_of(directory: Path, connector: Settings, kind: Kind, **how: Any) -> Driven:  # noqa: ANN401
    return Driven(
        directory,
        connector,
        model=kind.model,
        prepare_worker=partial(kind.worker, model=kind.model),
        kv_cache=vllm_connectors.allocated,
        **how,
    )


def drive(engine: Driven, kind: Kind) -> None:
    engine.add("first", PROMPT)
    engine.run()
    engine.forget_gpu()
    engine.add("again", PROMPT)
    engine.run()
    assert engine.hits["again"][1] > 0, "nothing came from the connector"
    if kind.preempts:
        storm(engine)
    else:
        together(engine)
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.add("last", PROMPT)
    engine.run()
    engine.shutdown()


def together(engine: Driven) -> None:
    for again in ("", " again"):
        for number in range(3):
            engine.add(f"short{number}{again}", [5 + number] * 19)
        engine.run()
        engine.forget_gpu()
    assert [engine.hits[f"short{number} again"][1] for number in range(3)] == [16] * 3


def storm(engine: Driven) -> None:
    chance = random.Random(5)
    for number in range(40):
        prefix = chance.choice((PROMPT, PROMPT[:22], [9] * 30, list(range(60, 90))))
        tail = [3 + chance.randrange(5) for _ in range(chance.randrange(1, 20))]
        engine.add(f"r{number}", prefix + tail, max_tokens=chance.randrange(1, 40))
        for _ in range(chance.randrange(6)):
            engine.step()
        if chance.random() < 0.25:
            engine.abort(f"r{chance.randrange(number + 1)}")
    engine.run(2000)


def timeless(calls: list[Call]) -> list[Call]:
    """Without what these connectors measure."""
    return [call for call in calls if call[0] != "get_kv_connector_stats"]


@every_kind
@pytest.mark.parametrize(
    ("asynchronous", "sessions"),
    [(False, False), (False, True), (True, True)],
    ids=["sync-off", "sync-on", "async-on"],
)
def test_alone_and_wrapped_are_called_the_same(
    directory: Path, tmp_path: Path, kind: Kind, asynchronous: bool, sessions: bool
) -> None:
    recorded: list[tuple[Driven, RecordedStore]] = []
    for wrap in (lambda inner: inner, partial(wrapped, sessions=sessions)):
        store = STORES["store"] = RecordedStore()
        folder = tmp_path / f"kept{len(recorded)}"
        how = {"asynchronous": asynchronous, "num_blocks": 40, "step_tokens": 64}
        engine = engine_of(directory, wrap(kind.settings(folder)), kind, **how)
        drive(engine, kind)
        recorded.append((engine, store))
    (one, alone), (other, inside) = recorded
    assert isinstance(other.connector, WrappingConnector)
    pairs = [(alone.scheduler_calls, inside.scheduler_calls)]
    pairs.append((alone.worker_calls, inside.worker_calls))
    for left, right in pairs:
        for at, (a, b) in enumerate(zip(timeless(left), timeless(right), strict=False)):
            assert a == b, f"call {at}"
        assert len(left) == len(right)
    assert one.outputs == other.outputs
    assert one.hits == other.hits
    assert one.params == other.params


def asked_for(engine: Driven, prompt: list[int]) -> None:
    """A lookup on behalf of nobody: asked, allocated nothing, over."""
    inner, request = engine.connector, make_request("asks", [*prompt, 7])
    inner.on_new_request(request)
    tokens, _ = inner.get_num_new_matched_tokens(request, 0)
    assert tokens
    inner.update_state_after_alloc(request, KVCacheBlocks(([],)), 0)
    request.status = RequestStatus.FINISHED_ABORTED
    assert not inner.request_finished(request, [])[0]
    engine.scheduler.finished_req_ids.add("asks")  # the step says so


@pytest.mark.parametrize("kind", ["offloading", "simple"])
def test_whether_a_lookup_keeps_a_prefix_from_being_evicted(directory: Path, kind: str) -> None:
    """What is said of these connectors in ``traits.py``, tried."""
    part = KINDS[kind]
    page = PAGE if kind == "offloading" else 256
    room = {"cpu_bytes_to_use": 25 * page}  # two prompts and a half
    engine = engine_of(directory, settings(part.name, None, **room), part, num_blocks=64)
    one, two, three = ([first, *PROMPT] for first in (100, 101, 102))
    for number, prompt in enumerate((one, two)):
        engine.add(f"stored{number}", prompt, max_tokens=1)
        engine.run()
    asked_for(engine, one[:40])
    engine.add("stored2", three, max_tokens=1)
    engine.run()
    engine.forget_gpu()
    engine.add("again", one, max_tokens=1)
    engine.run()
    kept = engine.hits["again"][1] == 40
    assert kept is traits_of(WrapConfig(part.name)).lookup_refreshes


@pytest.mark.parametrize("kind", ["offloading", "simple", "tiering", "example"])
def test_two_salts_never_share(directory: Path, tmp_path: Path, kind: str) -> None:
    """Those that key by vLLM's block hash are asked and tell apart; ExampleConnector, which does
    not, is not asked."""
    part = KINDS[kind]
    folder = tmp_path / "kept"
    engine = engine_of(directory, wrapped(part.settings(folder, recorded=False)), part)
    hits = {}
    for name, salt in (("a", "a"), ("a2", "a"), ("b", "b"), ("b2", "b"), ("none", None)):
        engine.add(name, PROMPT, max_tokens=1, cache_salt=salt)
        engine.run()
        engine.forget_gpu()
        hits[name] = engine.hits[name][1]
    found = 0 if kind == "example" else 40
    assert hits == {"a": 0, "a2": found, "b": 0, "b2": found, "none": 0}
    engine.add("none2", PROMPT, max_tokens=1)
    engine.run()
    assert engine.hits["none2"][1] == 40, "which is what the salted ones must not do"
    engine.shutdown()
