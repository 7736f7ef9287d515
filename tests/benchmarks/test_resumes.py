"""That resumes are checked to come from where they are said to come from."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import redis

from benchmarks.lmcache_peer import OtherConnector, add_lmcache_ratios
from benchmarks.report import Options, Report
from benchmarks.resumes import BLOCK_TOKENS, FULL_BLOCKS, WARM_SAMPLES, Arm, Resume, Resumes
from benchmarks.served import Server
from benchmarks.wrapped_ttft import Wrapping
from tests.redis_server import EXECUTABLE, running_redis

PROMPT = [1, 2, 3]
LOADED = FULL_BLOCKS * BLOCK_TOKENS


@pytest.fixture(scope="module")
def redis_port() -> Iterator[int]:
    if EXECUTABLE is None:
        pytest.skip("redis-server is not installed")
    with running_redis() as server:
        yield server.port


class ReadingServer(Server):
    """Counts its requests. Once it was made to forget, it loads the next prompt, of which some
    values come from Redis."""

    def __init__(self, redis_port: int, redis_reads: int) -> None:
        self._client = redis.Redis(port=redis_port)
        self._reads = redis_reads
        self._forgot = False
        self.loaded_tokens = 0.0
        self.requests = 0
        self.stored = 0

    async def forget(self) -> None:
        self._forgot = True

    async def wait_stored(self, prompts: int) -> None:
        self.stored = prompts

    async def ttft(self, prompt: Sequence[int], extra: Mapping[str, Any] | None = None) -> float:
        self.requests += 1
        if self._forgot:
            self._forgot = False
            self.loaded_tokens += LOADED
            for _ in range(self._reads):
                self._client.get("a value")
        return 0.1 * self.requests

    async def metric(self, name: str, label: str = "") -> float:
        return self.loaded_tokens


def repeat(server: ReadingServer, resume: Resume, redis_port: int) -> Resumes:
    other = ReadingServer(redis_port, 0)
    arms = {"stock": Arm(other), "store": Arm(server, {"resumed": resume}, server.wait_stored)}
    resumes = Resumes(arms, redis_port, rest_s=0.0)
    asyncio.run(resumes.repeat(1, PROMPT))
    return resumes


def test_every_place_is_measured_and_counted(redis_port: int) -> None:
    server = ReadingServer(redis_port, 7)

    resumes = repeat(server, Resume(server.forget, 7), redis_port)

    assert {name: len(series) for name, series in resumes.times.items()} == {
        "stock cold": 1,
        "store cold": 1,
        "stock gpu": WARM_SAMPLES,
        "store gpu": WARM_SAMPLES,
        "store resumed": WARM_SAMPLES,
    }
    assert resumes.loaded_tokens == {"store resumed": WARM_SAMPLES * LOADED}
    assert server.stored == 1


def test_a_prompt_from_another_tier_is_noticed(redis_port: int) -> None:
    server = ReadingServer(redis_port, 7)

    with pytest.raises(AssertionError, match="7 values read from Redis"):
        repeat(server, Resume(server.forget, 0), redis_port)


def test_a_prompt_that_was_not_forgotten_is_noticed(redis_port: int) -> None:
    async def forget() -> None:
        """Nothing is forgotten."""

    with pytest.raises(AssertionError, match=r"0\.0 tokens loaded"):
        repeat(ReadingServer(redis_port, 7), Resume(forget, 7), redis_port)


def test_ratios_above_one_say_that_lmcache_was_slower() -> None:
    report = Report("test", Options(True, 0, None), 2)
    times = {
        "lmcache redis": [3.0, 3.0],
        "lmcache host": [2.0, 2.0],
        "lmcache cold": [6.0, 6.0],
        "redis resumed": [2.0, 2.0],
        "host resumed": [1.0, 1.0],
        "redis cold": [5.0, 5.0],
        "stock gpu": [0.5, 0.5],
    }

    add_lmcache_ratios(report, times)

    medians = {key: ratio["median"] for key, ratio in report.as_dict()["ratios"].items()}
    assert medians == {
        "lmcache_redis_over_ours": 1.5,
        "lmcache_host_over_ours": 2.0,
        "lmcache_redis_over_stock_gpu_hit": 6.0,
        "lmcache_host_over_stock_gpu_hit": 4.0,
        "lmcache_cold_over_ours": 1.2,
    }


def test_the_wrapped_connector_gets_the_settings_it_has_alone() -> None:
    alone = OtherConnector(0, extra={"lmcache.mp.server_urls": ["tcp://127.0.0.1:1"]})

    wrapping = Wrapping(0, around=alone).transfer_config()

    inner = alone.transfer_config()
    assert inner["kv_connector"] == "LMCacheMPConnector"
    assert wrapping["kv_connector"] == "SessionAwareConnector"
    assert wrapping["kv_connector_extra_config"] == {
        "wrap": {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_extra_config": {"lmcache.mp.server_urls": ["tcp://127.0.0.1:1"]},
        }
    }
