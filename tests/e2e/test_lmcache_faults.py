"""Whatever happens to LMCache or to the Redis behind it, requests finish with the right tokens,
operations come to an end, and service is back when the store is."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from tests.e2e.checked_engine import checked_engine
from tests.e2e.conversations import assert_same_tokens, replay
from tests.e2e.engine_process import EngineProcess
from tests.e2e.lmcache_site import BLOCK, LMCacheSite, running_site
from tests.e2e.operations import carry_out, start_afresh
from tests.e2e.stock import Stock

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_MANY_TRIES = 200
_PATIENCE = {"lmcache.mp.mq_timeout": 2.0, "lmcache.mp.heartbeat_interval": 1.0}
_ENDS = ("ok", "partial", "failed", "rejected", "not_found", "unsupported")


@pytest.fixture(scope="module")
def site() -> Iterator[LMCacheSite]:
    with running_site(chunk_tokens=BLOCK) as site:
        yield site


@dataclass(frozen=True)
class Place:
    """One engine for all tests; its sessions are stored, and nothing is in its pool."""

    site: LMCacheSite
    stock: Stock
    engine: EngineProcess

    def store(self) -> None:
        """Everything computed once and stored; nothing left in the GPU pool. LMCache writes to
        Redis only what is new to its memory."""
        with self.site.redis.client() as client:
            client.flushall()
        self.site.clear_l1()
        replay(self.engine, self.stock.first)
        self.site.wait_until_stored(self.engine, *[e.session for e in self.stock.first])
        self.site.leave_nothing_but_l2(self.engine)

    def resume(self) -> None:
        """Every request gets its answer; each operation comes to an end."""
        engine, again = self.engine, self.stock.again
        engine.settle()
        assert engine.drop_gpu_cache()
        assert_same_tokens(replay(engine, again), again)
        session = again[0].session
        for edit in (
            {"type": "offload"},
            {"type": "prefetch", "target": "host"},
            {"type": "prefetch"},
        ):
            done = carry_out(engine, session, **edit)
            assert done["status"] in _ENDS
        engine.check_integrity()

    def resume_until_whole(self) -> None:
        """Service is back when a resume gives the full hit again, from the store."""
        engine, again = self.engine, self.stock.again
        whole = [exchange.reference.cached_tokens for exchange in again]
        for _ in range(_MANY_TRIES):
            engine.settle()
            assert engine.drop_gpu_cache()
            turns = replay(engine, again)
            assert_same_tokens(turns, again)
            if [turn.cached_tokens for turn in turns] == whole:
                return
        raise AssertionError("the store is back and is not used")


@pytest.fixture(scope="module")
def shared(stock: Stock, site: LMCacheSite) -> Iterator[Place]:
    spec = site.engine(
        replace(stock.spec, num_blocks=64),
        store={"extra": _PATIENCE},
        load_deadline_s=2.0,
    )
    with checked_engine(spec) as engine:
        yield Place(site, stock, engine)


@pytest.fixture
def place(shared: Place) -> Place:
    """As if it were new."""
    start_afresh(shared.engine, shared.stock)
    shared.store()
    return shared


def test_the_server_is_killed_and_comes_back_empty(place: Place) -> None:
    place.site.server.stop()
    place.resume()
    place.site.server.start()
    place.resume_until_whole()


def test_redis_is_emptied_in_the_middle_of_a_session(place: Place) -> None:
    with place.site.redis.client() as client:
        client.flushall()
    place.resume()
    place.resume_until_whole()


def test_the_server_hangs(place: Place) -> None:
    with place.site.server.hung():
        place.resume()
    place.resume_until_whole()


def test_redis_is_killed_and_comes_back_empty(place: Place) -> None:
    """The last of them, as LMCache 0.5.6 never connects to Redis again; its memory serves on."""
    place.site.redis.stop()
    place.resume()
    place.site.redis.start()
    place.resume_until_whole()
