"""Operations on sessions whose store is LMCache, on a real server, Redis and vLLM. Chunks are
two blocks long here, so that blocks and chunks are not the same thing."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.e2e.checked_engine import checked_engine
from tests.e2e.conversations import Exchange, assert_same_tokens, replay
from tests.e2e.engine_process import EngineProcess, Turn
from tests.e2e.lmcache_site import BLOCK, LMCacheSite, running_site
from tests.e2e.operations import (
    Traffic,
    carry_out,
    end_session,
    leave,
    residency,
    start_afresh,
)
from tests.e2e.stock import Stock
from tests.processes import wait_until
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_POOL_BLOCKS = 64
_CHUNK = 2 * BLOCK
_KEEP_ALIVE_S = 1
_PROTECT = {"cache_control": {"type": "ephemeral", "ttl": 300}}


@pytest.fixture(scope="module")
def site() -> Iterator[LMCacheSite]:
    with running_site(chunk_tokens=_CHUNK) as site:
        yield site


@dataclass(frozen=True)
class Place:
    """One engine for all tests."""

    site: LMCacheSite
    stock: Stock
    engine: EngineProcess

    def stored(self, *exchanges: Exchange) -> set[str]:
        return self.site.wait_until_stored(self.engine, *[one.session for one in exchanges])

    def wait_until_left(self, names: set[str]) -> None:
        """Until Redis has these and no others."""

        def only_these() -> bool:
            self.engine.settle()
            return self.site.stored() == names

        wait_until(only_these, "LMCache to delete what nobody holds")


@pytest.fixture(scope="module")
def shared(stock: Stock, site: LMCacheSite) -> Iterator[Place]:
    keep_alive = {"interval_s": _KEEP_ALIVE_S, "delete_grace_s": 0}
    spec = site.engine(
        replace(stock.spec, num_blocks=_POOL_BLOCKS),
        keep_alive=keep_alive,
        store={"control_deadline_s": 20.0},
    )
    with checked_engine(spec) as engine:
        yield Place(site, stock, engine)


@pytest.fixture
def place(shared: Place) -> Place:
    """As if it were new."""
    start_afresh(shared.engine, shared.stock)
    with shared.site.redis.client() as client:
        client.flushall()
    shared.site.clear_l1()
    return shared


def _leave(place: Place) -> None:
    """All sessions are offloaded, and the pool is overwritten."""
    engine = place.engine
    replay(engine, place.stock.first)
    names = place.stored(*place.stock.first)
    for exchange in place.stock.first:
        done = carry_out(engine, exchange.session, type="offload")
        whole = done["blocks"] * BLOCK // _CHUNK * _CHUNK // BLOCK
        assert done["done_blocks"] == whole >= 6
        assert done["status"] == ("ok" if whole == done["blocks"] else "partial")
    Traffic().overwrite(engine)
    engine.settle()
    assert engine.drop_gpu_cache()
    place.site.clear_l1()
    assert names <= place.site.stored()


def _prefetched(engine: EngineProcess, session: str, **edit: str) -> dict[str, Any]:
    """On a busy machine LMCache may need longer than one try is given."""
    for _ in range(5):
        done = carry_out(engine, session, type="prefetch", **edit)
        if done["status"] != "failed":
            break
    return done


def _hits_with_our_redis(stock: Stock, redis: RedisServer) -> list[Turn]:
    """The same with our own store: offloaded, overwritten, prefetched, resumed."""
    spec = replace(stock.engine(redis.tcp_url, save="sessions"), num_blocks=_POOL_BLOCKS)
    with checked_engine(spec) as engine:
        leave(engine, stock, Traffic())
        for exchange in stock.again:
            assert carry_out(engine, exchange.session, type="prefetch")["status"] == "ok"
        return replay(engine, stock.again)


def test_a_session_resumes_as_with_our_own_store(place: Place, redis: RedisServer) -> None:
    engine, again = place.engine, place.stock.again
    ours = _hits_with_our_redis(place.stock, redis)
    _leave(place)
    for exchange in again:
        done = _prefetched(engine, exchange.session, target="host")
        assert done["status"] in ("ok", "partial")
        assert done["done_blocks"] >= done["blocks"] - 1
    with place.site.redis.client() as client:
        client.flushall()  # what is loaded from now on is in LMCache's memory
    for exchange in again:
        done = _prefetched(engine, exchange.session)
        assert done["done_blocks"] >= done["blocks"] - 1
    turns = replay(engine, again)
    assert_same_tokens(turns, again)
    for turn, other in zip(turns, ours, strict=True):
        assert abs(turn.cached_tokens - other.cached_tokens) <= BLOCK
        assert turn.outcome is not None
        assert turn.outcome["gpu_tokens"] == turn.cached_tokens
    engine.check_integrity()


def test_without_a_prefetch_it_is_loaded_when_its_request_comes(place: Place) -> None:
    _leave(place)
    turns = replay(place.engine, place.stock.again)
    assert_same_tokens(turns, place.stock.again)
    for turn, exchange in zip(turns, place.stock.again, strict=True):
        assert turn.outcome is not None
        assert turn.outcome["remote_tokens"] >= exchange.reference.cached_tokens - 3 * BLOCK > 0


def test_what_sessions_hold_is_kept_alive_in_redis(place: Place) -> None:
    """Every chunk of a protected session is touched again and again; nobody's is not."""
    engine, (kept, other) = place.engine, place.stock.first[1:]
    engine.one(kept.prompt, kept.session, hint=_PROTECT)
    names = place.stored(kept)
    engine.one(other.prompt)
    engine.settle()
    wait_until(lambda: bool(place.site.stored() - names), "a chunk of nobody's")
    with place.site.redis.client() as client:
        idle = {name: client.object("IDLETIME", name) for name in place.site.stored()}
        give_up_s = time.monotonic() + 30
        while min(idle[name] for name in idle.keys() - names) < 3 * _KEEP_ALIVE_S + 1:
            assert time.monotonic() < give_up_s
            time.sleep(0.2)
            idle = {name: client.object("IDLETIME", name) for name in idle}
    assert max(idle[name] for name in names) <= 2 * _KEEP_ALIVE_S
    blocks = len(names) * _CHUNK // BLOCK
    wait_until(lambda: residency(engine, kept.session)["remote"] == blocks, "all to be known")


def test_evicted_chunks_leave_redis_and_shared_ones_stay(place: Place) -> None:
    engine, first = place.engine, place.stock.first
    replay(engine, first)
    names = [place.stored(exchange) for exchange in first]
    assert place.site.stored() == set.union(*names)
    assert 0 < len(names[0] & names[1] & names[2]) < len(names[0])
    assert carry_out(engine, first[0].session, type="evict")["status"] == "ok"
    place.wait_until_left(names[1] | names[2])
    end_session(engine, first[1].session)
    place.wait_until_left(names[2])
    assert engine.drop_gpu_cache()
    turn = replay(engine, place.stock.again[2:])[0]
    assert_same_tokens([turn], place.stock.again[2:])
    assert turn.outcome is not None
    assert turn.outcome["remote_tokens"] > 0
    end_session(engine, first[2].session)
    place.wait_until_left(set())
