"""Evictions, and offloads and prefetches whose store goes away in between, on real vLLM."""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.e2e.checked_engine import checked_engine
from tests.e2e.conversations import assert_identical, assert_same_tokens, replay
from tests.e2e.engine_process import EngineProcess
from tests.e2e.operations import (
    Traffic,
    ask,
    carry_out,
    end_session,
    leave,
    outcome,
    residency,
    start_afresh,
)
from tests.e2e.stock import Stock, resume_until_identical
from tests.e2e.wire import Relay, Wire
from tests.redis_server import EXECUTABLE, RedisServer, running_redis

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_VALUE_BYTES = 512 + 131_072  # header, and 32 tokens of the made model's KV
_PROTECT = {"cache_control": {"type": "ephemeral", "ttl": 300}}
_PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    if EXECUTABLE is None:
        pytest.skip("no redis-server on the path")
    with running_redis() as server:
        yield server


@pytest.fixture(scope="module")
def relay(server: RedisServer) -> Iterator[Relay]:
    with Relay(server.port) as relay:
        yield relay


@pytest.fixture(scope="module")
def shared(stock: Stock, relay: Relay) -> Iterator[EngineProcess]:
    extra = {"save": "sessions", "keep_alive": {"delete_grace_s": 0}}
    with checked_engine(replace(stock.engine(relay.url, **extra), num_blocks=64)) as engine:
        yield engine


@pytest.fixture
def engine(shared: EngineProcess, stock: Stock, server: RedisServer) -> EngineProcess:
    """The engine and the store as if they were new."""
    start_afresh(shared, stock)
    _wait_until_gone(server, [])
    return shared


def _stored(server: RedisServer) -> set[str]:
    """Names of blocks, manifests left out."""
    with server.client() as client:
        names = {name.decode() for name in client.scan_iter()}
    return {name for name in names if ":manifest:" not in name}


def _wait_until_gone(server: RedisServer, but: list[str]) -> None:
    """Until nothing is stored but these."""
    give_up_s = time.monotonic() + _PATIENCE_S
    while _stored(server) != set(but):
        assert time.monotonic() < give_up_s, _stored(server) ^ set(but)
        time.sleep(0.05)


# --- evict -----------------------------------------------------------------------------


def test_evicted_blocks_leave_the_store_and_shared_ones_stay(
    engine: EngineProcess, stock: Stock, server: RedisServer
) -> None:
    replay(engine, stock.first)
    engine.settle()
    sessions = [exchange.session for exchange in stock.first]
    names = {session: engine.stored_names(session)[0] for session in sessions}
    assert _stored(server) == set().union(*names.values())
    others = set(names[sessions[1]]) | set(names[sessions[2]])
    assert 0 < len(set(names[sessions[0]]) & others) < len(names[sessions[0]])
    assert carry_out(engine, sessions[0], type="evict")["status"] == "ok"
    _wait_until_gone(server, [*others])
    end_session(engine, sessions[1])
    _wait_until_gone(server, names[sessions[2]])
    assert engine.drop_gpu_cache()
    assert_identical(replay(engine, stock.again[2:]), stock.again[2:])
    carry_out(engine, sessions[2], type="evict")
    _wait_until_gone(server, [])


def test_a_running_request_survives_its_sessions_eviction(
    engine: EngineProcess, stock: Stock, server: RedisServer
) -> None:
    replay(engine, stock.first[2:])
    exchange = stock.again[2]
    length = len(exchange.reference.token_ids)
    request_id = engine.start(exchange.prompt, exchange.session, length, steps=3)
    engine.manage(op="get_session", session_id=exchange.session)
    operation_id = ask(engine, exchange.session, type="evict")
    assert outcome(engine, operation_id)["status"] == "ok"
    _wait_until_gone(server, [])
    assert_identical([engine.finish(request_id)], [exchange])
    engine.check_integrity()


# --- the store goes away ---------------------------------------------------------------


@pytest.mark.parametrize("mode", [Wire.CUT, Wire.FREEZE])
def test_the_store_goes_away_in_the_middle_of_a_prefetch(
    mode: Wire, engine: EngineProcess, stock: Stock, relay: Relay
) -> None:
    leave(engine, stock, Traffic())
    relay.set(mode, int(2.5 * _VALUE_BYTES))
    done = carry_out(engine, stock.first[1].session, type="prefetch")
    assert done["status"] in ("partial", "failed")
    assert done["done_blocks"] < done["blocks"]
    engine.check_integrity()
    assert_same_tokens(replay(engine, stock.again), stock.again)
    relay.set(Wire.FLOW)
    resume_until_identical(engine, stock)


def test_the_store_goes_away_in_the_middle_of_an_offload(
    engine: EngineProcess, stock: Stock, relay: Relay
) -> None:
    exchange = stock.first[1]
    relay.set(Wire.CUT)
    engine.one(exchange.prompt, exchange.session, hint=_PROTECT)
    engine.settle()
    relay.set(Wire.FLOW)
    assert residency(engine, exchange.session)["remote"] == 0
    protected = engine.gauges()["spm:sam_protected_blocks|"]
    assert protected > 0
    relay.set(Wire.CUT, len("+OK\r\n") * 2)
    done = carry_out(engine, exchange.session, type="offload")
    assert done["status"] in ("partial", "failed")
    assert engine.gauges()["spm:sam_protected_blocks|"] > 0, "what is not stored is kept"
    engine.check_integrity()
    relay.set(Wire.FLOW)
    give_up_s = time.monotonic() + _PATIENCE_S
    while carry_out(engine, exchange.session, type="offload")["status"] != "ok":
        assert time.monotonic() < give_up_s
    assert engine.gauges()["spm:sam_protected_blocks|"] == 0


def test_redis_is_killed_in_the_middle_of_a_prefetch(
    engine: EngineProcess, stock: Stock, relay: Relay, server: RedisServer
) -> None:
    leave(engine, stock, Traffic())
    relay.set(Wire.FREEZE, int(1.5 * _VALUE_BYTES))
    operation_id = ask(engine, stock.first[1].session, type="prefetch")
    engine.step(3)
    assert outcome(engine, operation_id)["status"] == "accepted", "it is on its way"
    server.stop()
    relay.set(Wire.FLOW)
    engine.settle()
    assert outcome(engine, operation_id)["status"] in ("partial", "failed")
    engine.check_integrity()
    assert_same_tokens(replay(engine, stock.again), stock.again)
    server.start()
    resume_until_identical(engine, stock)
