"""A stop at any moment: told to go, an engine first stores what it has computed, but waits for no
store for ever; killed, it leaves nothing in the store that the next engine could not use.

vLLM 0.32, told to stop (SIGTERM): the API server passes it on to the engine and kills engine and
workers ``--shutdown-timeout`` seconds later, by default at once. Given time, the engine goes on
stepping while a connector has work, then asks each worker to end and kills it nine seconds later.
"""

import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis as redis_py

from spm.keys import Fingerprint, Rank, StoreKey, block_key_of
from spm.value_format import HEADER_BYTES, ValueIdentity, check_value
from tests.e2e.checked_engine import checked_engine
from tests.e2e.conversations import assert_same_tokens, replay, tokens
from tests.e2e.engine_process import EngineProcess, EngineSpec
from tests.e2e.http_server import MODEL, HttpServer, HttpServerSpec, running
from tests.e2e.stock import Stock, resume_until_identical
from tests.e2e.wire import Relay
from tests.processes import wait_until, wait_until_gone
from tests.redis_server import RedisServer
from tracker.ids import split_block_key

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_LONGER_THAN_THE_TEST_S = 600.0
_PATIENCE_S = 120.0
"""With servers: far less than a store that hangs takes."""
_BLOCK_TOKENS = 32
_PROMPT = tokens(random.Random(8), 5 * _BLOCK_TOKENS)
_OTHER_PROMPT = tokens(random.Random(9), 2 * _BLOCK_TOKENS)
"""Served before the store hangs, so that connections are made: else nobody would wait long."""


def _freeze(redis: RedisServer) -> None:
    assert redis.process is not None
    redis.process.send_signal(signal.SIGSTOP)


def _thaw(redis: RedisServer) -> None:
    assert redis.process is not None
    redis.process.send_signal(signal.SIGCONT)


def _blocks(client: "redis_py.Redis") -> dict[bytes, bytes]:
    """Stored values; a session's manifest lies beside them."""
    found: Any = {key: client.get(key) for key in client.scan_iter() if b":manifest:" not in key}
    return dict(found)


def _assert_all_whole(redis: RedisServer) -> int:
    """Each value says that it is what its name says, and its payload is as it was; how many."""
    with redis.client() as client:
        values = _blocks(client)
    for key, value in values.items():
        name = StoreKey(key.decode())
        _, fingerprint, _, rank, _ = name.split(":")
        block_hash, group = split_block_key(block_key_of(name))
        identity = ValueIdentity(
            Fingerprint(bytes.fromhex(fingerprint)), Rank(int(rank)), group, block_hash
        )
        assert len(value) > HEADER_BYTES
        check_value(memoryview(value), identity, checksum=True)
    return len(values)


# --- told to stop ------------------------------------------------------------------------


def _complete(server: HttpServer, prompt: list[int]) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    with server.client() as client:
        client.post("/v1/completions", json=body).raise_for_status()


def _complete_and_hang(server: HttpServer, redis: RedisServer) -> None:
    _complete(server, _OTHER_PROMPT)
    with redis.client() as client:
        wait_until(lambda: len(_blocks(client)) == len(_OTHER_PROMPT) // _BLOCK_TOKENS, "blocks")
    _freeze(redis)
    _complete(server, _PROMPT)


def _served(redis: RedisServer, grace_s: int) -> HttpServerSpec:
    remote = {"kind": "redis", "url": redis.tcp_url}
    return HttpServerSpec(
        {"host_bytes": 0, "remote": remote, "save_deadline_s": _LONGER_THAN_THE_TEST_S},
        ("--shutdown-timeout", str(grace_s)),
        is_stopped=True,
    )


def _is_told(server: HttpServer) -> None:
    os.kill(server.process.pid, signal.SIGTERM)
    wait_until(
        lambda: "EngineCore: start mode=drain" in server.log_path.read_text(),
        "the engine's word",
        _PATIENCE_S,
    )


def test_a_server_told_to_stop_first_stores_what_it_has_computed(
    redis: RedisServer, tmp_path: Path
) -> None:
    log_path = tmp_path / "server.log"
    with running(_served(redis, 60), log_path) as server:
        _complete_and_hang(server, redis)
        _is_told(server)
        assert server.process.exit_code is None
        _thaw(redis)
        wait_until(lambda: server.process.exit_code is not None, "its end", _PATIENCE_S)
    assert _assert_all_whole(redis) == (len(_PROMPT) + len(_OTHER_PROMPT)) // _BLOCK_TOKENS
    with running(_served(redis, 0), tmp_path / "next.log") as following:
        _complete(following, _PROMPT)
        loaded = following.metric("spm:loaded_blocks_total", tier="remote")
        assert loaded == (len(_PROMPT) - 1) // _BLOCK_TOKENS


def test_a_server_whose_store_hangs_stops_in_the_time_it_was_given(
    redis: RedisServer, tmp_path: Path
) -> None:
    with running(_served(redis, 5), tmp_path / "server.log") as server:
        _complete_and_hang(server, redis)
        everyone = psutil.Process(server.process.pid).children(recursive=True)
        _is_told(server)
        wait_until(lambda: server.process.exit_code is not None, "its end", _PATIENCE_S)
        wait_until_gone([process.pid for process in everyone])
    _thaw(redis)
    _assert_all_whole(redis)


@pytest.fixture(params=[1, 2], ids=["one-process", "two-workers"])
def hanging(request: pytest.FixtureRequest, stock: Stock, redis: RedisServer) -> EngineSpec:
    """Its store may hang for longer than a test takes."""
    patience = {"save_deadline_s": _LONGER_THAN_THE_TEST_S, "stop_deadline_s": 4.0}
    spec = stock.engine(redis.tcp_url, **patience)
    return replace(spec, tensor_parallel_size=request.param)


def _with_saves_on_their_way(spec: EngineSpec, stock: Stock, redis: RedisServer) -> EngineProcess:
    engine = EngineProcess(spec)
    engine.one(_OTHER_PROMPT)
    engine.settle()
    _freeze(redis)
    replay(engine, stock.first)
    engine.step(2)  # what the last step computed is copied in the next
    return engine


def test_workers_write_what_they_have_copied_before_they_end(
    hanging: EngineSpec, stock: Stock, redis: RedisServer
) -> None:
    engine = _with_saves_on_their_way(hanging, stock, redis)
    closing = threading.Thread(target=engine.close)
    closing.start()
    _thaw(redis)
    closing.join()
    assert _assert_all_whole(redis) > 0
    with checked_engine(hanging) as following:
        turns = replay(following, stock.again)
        assert_same_tokens(turns, stock.again)  # two workers compute with other last bits
        hits = [exchange.reference.cached_tokens for exchange in stock.again]
        assert [turn.cached_tokens for turn in turns] == hits


def test_workers_do_not_wait_for_a_store_that_hangs(
    hanging: EngineSpec, stock: Stock, redis: RedisServer
) -> None:
    engine = _with_saves_on_their_way(hanging, stock, redis)
    everyone = [engine.pid, *(p.pid for p in psutil.Process(engine.pid).children(recursive=True))]
    engine.close()
    wait_until_gone(everyone)
    _thaw(redis)


# --- killed ------------------------------------------------------------------------------

_STORED_BYTES = 2_000_000
"""Of the conversation's first turn: 15 blocks or more."""
_SEEDS = range(5)


def _kill_engine(engine: EngineProcess) -> None:
    os.kill(engine.pid, signal.SIGKILL)


def _kill_worker(engine: EngineProcess) -> None:
    workers = psutil.Process(engine.pid).children(recursive=True)
    os.kill(max(process.pid for process in workers), signal.SIGKILL)


@pytest.mark.parametrize("seed", _SEEDS)
def test_an_engine_killed_at_any_byte_of_its_writes_leaves_a_store_that_can_be_read(
    seed: int, stock: Stock, redis: RedisServer
) -> None:
    _assert_survived(seed, stock, redis, stock.spec, _kill_engine)


def test_so_does_one_whose_worker_is_killed(stock: Stock, redis: RedisServer) -> None:
    spec = replace(stock.spec, tensor_parallel_size=2)
    _assert_survived(11, stock, redis, spec, _kill_worker)


def _compute_and_store(engine: EngineProcess, stock: Stock) -> None:
    replay(engine, stock.first)
    engine.settle()


def _assert_survived(
    seed: int,
    stock: Stock,
    redis: RedisServer,
    base: EngineSpec,
    kill: Callable[[EngineProcess], None],
) -> None:
    at_byte = random.Random(seed).randrange(_STORED_BYTES)
    with Relay(redis.port) as relay:
        connector = stock.engine(relay.url).connector
        engine = EngineProcess(replace(base, connector=connector))
        killed = threading.Event()

        def act() -> None:
            if not killed.is_set():
                killed.set()
                kill(engine)

        relay.at_write(at_byte, act)
        with pytest.raises((AssertionError, EOFError, OSError)):
            _compute_and_store(engine, stock)
        assert killed.is_set()
        engine.kill()
    _assert_all_whole(redis)
    with checked_engine(replace(base, connector=stock.engine(redis.tcp_url).connector)) as after:
        assert_same_tokens(replay(after, stock.first), stock.first)
        if base.tensor_parallel_size == 1:
            resume_until_identical(after, stock)
