"""A real LMCache server with a real Redis behind it, and engines that use them."""

import contextlib
import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests import lmcache_server
from tests.e2e.engine_process import EngineProcess, EngineSpec
from tests.lmcache_server import LMCacheServer, running_lmcache_server
from tests.processes import wait_until
from tests.redis_server import EXECUTABLE, RedisServer, running_redis

BLOCK = 32


@dataclass(frozen=True)
class LMCacheSite:
    """L1 is the server's host memory, L2 is Redis."""

    server: LMCacheServer
    redis: RedisServer

    def engine(self, spec: EngineSpec, **extra: Any) -> EngineSpec:  # noqa: ANN401
        """The same model with LMCache as its store."""
        store = {
            "kind": "lmcache",
            "url": self.server.url,
            "control_url": self.server.control_url,
            "l2_url": self.redis.tcp_url,
            **extra.pop("store", {}),
        }
        return replace(spec, connector={"store": store, **extra})

    def stored(self) -> set[str]:
        """Names in Redis."""
        with self.redis.client() as client:
            return {name.decode() for name in client.scan_iter(count=1000)}

    def wait_until_stored(self, engine: EngineProcess, *sessions: str) -> set[str]:
        """Until all chunks of these sessions are in Redis; returns their names there."""
        engine.settle()
        names = {name for session in sessions for name in engine.stored_names(session)[0]}
        assert names
        wait_until(lambda: names <= self.stored(), "LMCache to write to Redis")
        return names

    def clear_l1(self) -> None:
        """Redis is all that is left, once locks of requests that were aborted have run out."""

        def is_empty() -> bool:
            self._call("POST", "/cache/clear")
            status = self._call("GET", "/status")["storage_manager"]["l1_manager"]
            return bool(status["total_object_count"] == 0)

        wait_until(is_empty, "LMCache's memory to be empty")

    def _call(self, method: str, path: str) -> Any:  # noqa: ANN401
        place = urlsplit(self.server.control_url)
        connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=20)
        with contextlib.closing(connection):
            connection.request(method, path)
            answer = connection.getresponse()
            body = answer.read()
            assert answer.status == 200, body
            return json.loads(body)

    def leave_nothing_but_l2(self, engine: EngineProcess) -> None:
        """Nothing in the GPU pool, nothing in L1."""
        engine.settle()
        assert engine.drop_gpu_cache()
        self.clear_l1()


_LOCKS_RUN_OUT = ("--l1-read-ttl-seconds", "1", "--l1-write-ttl-seconds", "1")
"""Else they do after minutes."""


@contextmanager
def running_site(chunk_tokens: int) -> Iterator[LMCacheSite]:
    """Both on ports of their own; skips where one is not installed."""
    if EXECUTABLE is None:
        pytest.skip("no redis-server on the path")
    if not lmcache_server.INSTALLED:
        pytest.skip("lmcache is not installed")
    with (
        running_redis() as redis,
        running_lmcache_server(
            redis.port, chunk_tokens=chunk_tokens, options=_LOCKS_RUN_OUT
        ) as server,
    ):
        yield LMCacheSite(server, redis)
