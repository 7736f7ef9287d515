"""LMCache inside vLLM's own processes (``LMCacheConnectorV1``) with Redis behind it, wrapped.

It refuses CPUs; what moves KV between its memory and the pool is the tests' own here
(:mod:`tests.e2e.lmcache_on_cpu`), everything else is LMCache's.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from tests import lmcache_server
from tests.e2e.checked_engine import checked_engine
from tests.e2e.conversations import (
    Exchange,
    assert_identical,
    assert_same_tokens,
    replay,
    tokens,
)
from tests.e2e.engine_process import EngineProcess, Turn
from tests.e2e.operations import carry_out
from tests.e2e.stock import Stock
from tests.processes import wait_until
from tests.redis_server import EXECUTABLE, RedisServer, running_redis

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(not lmcache_server.INSTALLED, reason="lmcache is not installed"),
    pytest.mark.skipif(EXECUTABLE is None, reason="redis-server is not installed"),
]

_BLOCK = 32
_PROTECT = {"cache_control": {"type": "ephemeral", "ttl": 300}}


@dataclass(frozen=True)
class Place:
    """One engine for all tests. Chunks are as long as blocks, and Redis is the only place that
    they are in."""

    engine: EngineProcess
    redis: RedisServer
    stock: Stock

    def stored(self) -> set[str]:
        with self.redis.client() as client:
            return {name.decode() for name in client.scan_iter(count=1000)}

    def lose(self, name: str) -> None:
        """Redis evicts it."""
        with self.redis.client() as client:
            assert client.delete(name) == 1

    def forget(self) -> None:
        """Nothing in the pool."""
        self.engine.settle()
        assert self.engine.drop_gpu_cache()


@pytest.fixture(scope="module")
def place(stock: Stock) -> Iterator[Place]:
    with running_redis() as redis:
        settings = {
            "lmcache.chunk_size": _BLOCK,
            "lmcache.local_cpu": False,
            "lmcache.max_local_cpu_size": 0.25,
            "lmcache.remote_url": redis.tcp_url,
            "lmcache.remote_serde": "naive",
            "lmcache.pre_caching_hash_algorithm": "sha256_cbor",
            "lmcache.save_decode_cache": True,
        }
        wrap = {
            "kv_connector": "LMCacheConnectorV1",
            "kv_connector_extra_config": settings,
            "remote_url": redis.tcp_url,
        }
        connector = {"wrap": wrap, "keep_alive": {"interval_s": 1, "delete_grace_s": 0}}
        modules = ("tests.e2e.lmcache_on_cpu",)
        spec = replace(stock.spec, num_blocks=64, connector=connector, imports=modules)
        with checked_engine(spec) as engine:
            yield Place(engine, redis, stock)


def test_a_session_comes_back_from_redis(place: Place) -> None:
    engine, stock = place.engine, place.stock
    replay(engine, stock.first)
    for exchange in stock.first:
        done = carry_out(engine, exchange.session, type="offload")
        assert (done["status"], done["done_blocks"]) == ("ok", done["blocks"])
        names = engine.stored_names(exchange.session)[0]
        assert len(names) == 2 * done["blocks"]
        assert set(names) <= place.stored()
    place.forget()
    turns = replay(engine, stock.again)
    assert_identical(turns, stock.again)
    assert turns[0].outcome is not None
    assert turns[0].outcome["remote_tokens"] == turns[0].cached_tokens


def _resume_protected(place: Place, exchange: Exchange) -> Turn:
    place.forget()
    length = len(exchange.reference.token_ids)
    turn = place.engine.one(exchange.prompt, exchange.session, length, hint=_PROTECT)
    assert_same_tokens([turn], [exchange])
    return turn


def test_half_a_chunk_is_a_miss_and_the_rest_of_it_goes(place: Place) -> None:
    """LMCache looks for the other half alone."""
    exchange = place.stock.again[2]
    whole = exchange.reference.cached_tokens
    _resume_protected(place, exchange)
    kv_bytes, metadata = place.engine.stored_names(exchange.session)[0][6:8]
    assert (kv_bytes[-8:], metadata[-8:]) == ("kv_bytes", "metadata")

    place.lose(kv_bytes)  # and the session comes back at once
    _resume_protected(place, exchange)
    wait_until(lambda: {kv_bytes, metadata} <= place.stored(), "it to be whole again")
    turn = _resume_protected(place, exchange)
    assert turn.outcome is not None
    assert turn.outcome["remote_tokens"] == whole

    place.lose(kv_bytes)  # and the session stays away for a while

    def is_clean() -> bool:
        place.engine.manage(op="status")  # an idle engine takes no step
        return metadata not in place.stored()

    wait_until(is_clean, "the other half to go")
    turn = _resume_protected(place, exchange)
    assert turn.outcome is not None
    assert turn.outcome["remote_tokens"] == 3 * _BLOCK


def test_two_cache_salts_never_share(place: Place) -> None:
    engine, before = place.engine, place.stored()
    prompt = tokens(random.Random(31), 230)
    first = engine.one(prompt, "salted", cache_salt="tenant-a")
    place.forget()
    assert engine.one(prompt, "salted-too", cache_salt="tenant-b").cached_tokens == 0
    assert place.stored() <= before, "nothing of theirs was saved"
    assert engine.one(prompt).cached_tokens == 0
    place.forget()
    assert engine.one(prompt).cached_tokens == len(prompt) // _BLOCK * _BLOCK
    place.forget()
    again = engine.one(prompt, "salted", cache_salt="tenant-a")
    assert (again.cached_tokens, again.token_ids) == (0, first.token_ids)
    assert engine.counters()["spm:bypassed_requests|cache_salt"] == 3
    said = [line for line in engine.warnings() if "cache_salt" in line]
    assert len(said) == 1
    assert "LMCacheConnectorV1" in said[0]
