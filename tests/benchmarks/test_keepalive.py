"""That the keep-alive benchmark measures what it says it measures. No times are looked at."""

import pytest

from benchmarks.keepalive import TurningRing, block_keys, fill, run_keeper
from spm.config import KeepAliveConfig
from tests.redis_server import EXECUTABLE, running_redis


def test_a_turn_takes_every_key() -> None:
    ring = TurningRing(2000, seed=1)

    assert ring.turn(3) > 0

    assert len(ring.ring) == 2000
    assert len(set(block_keys(2000, 1))) == 2000
    assert all(key in ring.ring for key in block_keys(2000, 1))


@pytest.mark.skipif(EXECUTABLE is None, reason="redis-server is not installed")
def test_the_keeper_finds_the_keys_that_were_filled_in() -> None:
    hurried = KeepAliveConfig(interval_s=1.0, max_keys_per_s=10_000_000)
    with running_redis() as server:
        fill(server.tcp_url, 1000)
        run = run_keeper(server.tcp_url, 1000, hurried, 1.5)
        with pytest.raises(AssertionError, match="not all keys"):
            run_keeper(server.tcp_url, 1500, hurried, 1.5)

    assert 500 < run.keys_per_s < 2000
