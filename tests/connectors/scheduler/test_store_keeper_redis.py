"""Keep-alive against a real Redis that is far too small: who survives other traffic."""

import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import redis

from connectors.scheduler.store_keeper import KeysChecked, StoreKeeper
from connectors.stores.buffers import BufferPool
from connectors.stores.redis import RedisStore
from spm.breaker import CircuitBreaker
from spm.config import KeepAliveConfig, SpmConfig
from spm.events import KeysGone
from spm.keys import Rank, StoreKey
from spm.metrics import Counters
from tests.connectors.scheduler.keeper_rig import SPACE, blocks
from tests.processes import wait_until
from tests.redis_server import EXECUTABLE, RedisServer, running_redis
from tracker.ids import BlockKey

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(EXECUTABLE is None, reason="redis-server is not installed"),
]

WORLD_SIZE = 2
VALUE = bytes(16_384)
MAX_MEMORY = 40 << 20
BLOCKS = 150
TRAFFIC_BYTES = 2 * MAX_MEMORY
TRAFFIC_BYTES_PER_S = 8 << 20


@pytest.fixture
def server() -> Iterator[RedisServer]:
    options = ["--maxmemory", str(MAX_MEMORY), "--maxmemory-policy", "allkeys-lru"]
    with running_redis(*options) as server:
        yield server


@pytest.fixture
def told() -> threading.Event:
    return threading.Event()


@pytest.fixture
def keeper(server: RedisServer, told: threading.Event) -> Iterator[StoreKeeper]:
    keeper = StoreKeeper(
        RedisStore(server.unix_url, BufferPool(1)),
        CircuitBreaker(failures=3, backoff_s=0.5, backoff_cap_s=1.0),
        Counters(),
        SpmConfig(keep_alive=KeepAliveConfig(interval_s=1.0)),
        WORLD_SIZE,
        on_news=told.set,
    )
    keeper.use(SPACE)
    yield keeper
    keeper.check_integrity()
    keeper.close()


def names_of(keys: Sequence[BlockKey]) -> list[StoreKey]:
    return [SPACE.store_key(key, Rank(rank)) for key in keys for rank in range(WORLD_SIZE)]


def write(client: redis.Redis, names: Sequence[str]) -> None:
    with client.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.set(name, VALUE)
        pipeline.execute()


def send_other_traffic(client: redis.Redis) -> None:
    """At a rate at which everything in the store is replaced every few seconds."""
    started_s, sent = time.monotonic(), 0
    while sent * len(VALUE) < TRAFFIC_BYTES:
        write(client, [f"other:{number}" for number in range(sent, sent + 50)])
        sent += 50
        time.sleep(max(0.0, started_s + sent * len(VALUE) / TRAFFIC_BYTES_PER_S - time.monotonic()))


def test_kept_alive_keys_survive_traffic_that_evicts_all_others(
    server: RedisServer, keeper: StoreKeeper, told: threading.Event
) -> None:
    kept, dropped = blocks(*range(BLOCKS)), blocks(*range(BLOCKS, 2 * BLOCKS))
    with server.client() as client:
        write(client, names_of(kept + dropped))
        keeper.hold(kept + dropped, time.monotonic() + 600)
        keeper.drop(dropped)
        send_other_traffic(client)
        assert client.info("stats")["evicted_keys"] > TRAFFIC_BYTES / len(VALUE) / 3
        survivors = client.exists(*names_of(kept)) / len(names_of(kept))
        leftovers = client.exists(*names_of(dropped)) / len(names_of(dropped))
        assert (survivors >= 0.99, leftovers < 0.05) == (True, True), (survivors, leftovers)

        client.delete(names_of(kept)[0])
        wait_until(
            lambda: any(kept[0] in one.keys for one in keeper.poll() if isinstance(one, KeysGone)),
            "news of the lost key",
        )
        told.clear()
        assert keeper.check(1, [kept[0], kept[1], dropped[0]], time.monotonic() + 5)
        assert told.wait(10)
        (answer,) = [one for one in keeper.poll() if isinstance(one, KeysChecked)]
        assert answer.present is not None
        assert (answer.present[0], answer.present[2]) == (False, False)


def test_what_one_engine_deletes_another_keeps(
    server: RedisServer, keeper: StoreKeeper, told: threading.Event
) -> None:
    shared, own = blocks(1), blocks(2)
    with server.client() as client:
        write(client, names_of(shared + own))
        for name in names_of(shared + own):
            client.expire(name, 3)  # as another engine's delete leaves them
        keeper.hold(shared, time.monotonic() + 600)
        wait_until(lambda: client.exists(*names_of(own)) == 0, "the end of the deleted values")
        assert client.exists(*names_of(shared)) == WORLD_SIZE
        assert [client.ttl(name) for name in names_of(shared)] == [-1] * WORLD_SIZE
