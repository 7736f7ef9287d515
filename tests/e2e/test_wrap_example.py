"""Sessions over vLLM's own ExampleConnector: it moves KV as it does alone, and never between two
cache salts. Alone, and with a MultiConnector on either side of ours.

It keeps whole prompts in files, loads within a request's own step, and knows no salt.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.checked_engine import checked_engine
from tests.e2e.conversations import assert_identical, replay, tokens
from tests.e2e.engine_process import EngineProcess, EngineSpec, Turn, session_aware
from tests.e2e.operations import Traffic, carry_out, residency
from tests.e2e.stock import Stock

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_POOL_BLOCKS = 64
_PROTECT = {"cache_control": {"type": "ephemeral", "ttl": 300}}


def _example(path: Path) -> dict[str, Any]:
    """Part of ``kv_transfer_config``."""
    settings = {"shared_storage_path": str(path)}
    return {"kv_connector": "ExampleConnector", "kv_connector_extra_config": settings}


def _multi(*children: dict[str, Any]) -> dict[str, Any]:
    how = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    connectors = [{**child, **how} for child in children]
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": connectors},
    }


def _around(wrapped: dict[str, Any]) -> dict[str, Any]:
    """Ours around it."""
    return session_aware({"wrap": wrapped})


def _spec(stock: Stock, transfer: dict[str, Any]) -> EngineSpec:
    return replace(stock.spec, transfer=transfer, num_blocks=_POOL_BLOCKS)


def _twice(engine: EngineProcess, stock: Stock, *, with_sessions: bool) -> list[Turn]:
    """Computed and saved, then with nothing in the pool."""
    turns = replay(engine, stock.first, with_sessions=with_sessions)
    engine.settle()
    assert engine.drop_gpu_cache()
    return turns + replay(engine, stock.again, with_sessions=with_sessions)


def _answers(turns: list[Turn]) -> list[tuple[Any, ...]]:
    return [(turn.token_ids, turn.logprobs, turn.cached_tokens) for turn in turns]


@dataclass(frozen=True)
class Alone:
    """What ExampleConnector alone does."""

    turns: list[Turn]
    files: set[str]
    crossed_tokens: int
    """Hit by a request with a cache salt, of what one with another salt left."""


def _files(path: Path) -> set[str]:
    return {str(one.relative_to(path)) for one in path.rglob("*") if one.is_file()}


@pytest.fixture(scope="module")
def alone(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    path = tmp_path_factory.mktemp("alone")
    with EngineProcess(_spec(stock, _example(path))) as engine:
        turns = _twice(engine, stock, with_sessions=False)
        files = _files(path)
        prompt = tokens(random.Random(41), 100)
        engine.one(prompt, cache_salt="tenant-a")
        crossed = engine.one(prompt, cache_salt="tenant-b").cached_tokens
        return Alone(turns, files, crossed)


@dataclass(frozen=True)
class Place:
    """One engine for all tests, and where ExampleConnector keeps its files."""

    engine: EngineProcess
    path: Path


@pytest.fixture(scope="module")
def place(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    path = tmp_path_factory.mktemp("wrapped")
    with checked_engine(_spec(stock, _around(_example(path)))) as engine:
        yield Place(engine, path)


def test_it_answers_and_stores_as_it_does_alone(place: Place, alone: Alone, stock: Stock) -> None:
    turns = _twice(place.engine, stock, with_sessions=True)
    assert _answers(turns) == _answers(alone.turns)
    assert _files(place.path) == alone.files
    loaded = turns[len(stock.first) :]
    assert_identical(loaded, stock.again)
    assert all(turn.outcome and turn.outcome["gpu_tokens"] == 0 for turn in loaded[:1])


def test_what_is_protected_stays_in_the_pool_and_the_rest_is_loaded(
    place: Place, stock: Stock
) -> None:
    engine, (kept, other) = place.engine, stock.again[1:]
    assert engine.drop_gpu_cache()
    engine.one(kept.prompt, kept.session, hint=_PROTECT)
    engine.one(other.prompt)  # nobody says that it comes back
    Traffic().overwrite(engine)
    where = residency(engine, kept.session)
    assert where["gpu"] == where["blocks"] > 0
    turns = replay(engine, [kept, other])
    assert_identical(turns, [kept, other])
    in_pool = [turn.outcome["gpu_tokens"] for turn in turns if turn.outcome is not None]
    shared = 70 // 32 * 32
    assert in_pool == [turns[0].cached_tokens, shared]


def test_operations_do_what_such_a_connector_can(place: Place, stock: Stock) -> None:
    """Asked for all of a session and one token, it has it only if it once saved a prompt of just
    one block less. What it loads only within a request's step cannot be prefetched."""
    engine = place.engine
    replay(engine, stock.first)
    shorter, longer = stock.first[0].session, stock.first[1].session
    done = carry_out(engine, shorter, type="offload")
    assert (done["status"], done["done_blocks"]) == ("partial", done["blocks"] - 1)
    assert carry_out(engine, longer, type="offload")["status"] == "failed"
    assert engine.drop_gpu_cache()
    done = carry_out(engine, shorter, type="prefetch")
    assert done["status"] == "unsupported"
    assert done["detail"]


@pytest.mark.fault(
    "F28",
    breaks="a wrapped connector that knows no salt is given requests with one",
)
def test_requests_with_a_cache_salt_are_kept_out(place: Place, alone: Alone) -> None:
    assert alone.crossed_tokens > 0, "alone, it gives one tenant's KV to another"
    engine, before = place.engine, _files(place.path)
    prompt = tokens(random.Random(41), 100)
    first = engine.one(prompt, "salted", cache_salt="tenant-a")
    assert engine.one(prompt, "salted-too", cache_salt="tenant-b").cached_tokens == 0
    assert engine.one(prompt, cache_salt="tenant-a").cached_tokens == len(prompt) // 32 * 32
    assert _files(place.path) == before, "nothing of theirs was saved"
    assert engine.one(prompt).cached_tokens == 0
    assert _files(place.path) > before
    assert engine.drop_gpu_cache()
    again = engine.one(prompt, cache_salt="tenant-a")
    assert (again.cached_tokens, again.token_ids) == (0, first.token_ids)
    assert engine.counters()["spm:bypassed_requests|cache_salt"] == 4
    said = [line for line in engine.warnings() if "cache_salt" in line]
    assert len(said) == 1
    assert "ExampleConnector" in said[0]


def _parent(one: Path, other: Path) -> dict[str, Any]:
    return _multi(_around(_example(one)), _example(other))


def _child(one: Path, other: Path) -> dict[str, Any]:
    return _around(_multi(_example(one), _example(other)))


@pytest.mark.parametrize("build", [_parent, _child])
def test_a_multi_connector_may_be_on_either_side(
    build: Callable[[Path, Path], dict[str, Any]], stock: Stock, alone: Alone, tmp_path: Path
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    with checked_engine(_spec(stock, build(one, other))) as engine:
        turns = _twice(engine, stock, with_sessions=True)
        assert _answers(turns) == _answers(alone.turns)
        assert _files(one) == _files(other) == alone.files
        kept = stock.again[1]
        turn = engine.one(kept.prompt, kept.session, hint=_PROTECT)
        assert turn.outcome is not None
        assert turn.outcome["class"] == "soon"
        Traffic().overwrite(engine)
        where = residency(engine, kept.session)
        assert where["gpu"] == where["blocks"] > 0
        assert_identical(replay(engine, [kept]), [kept])
