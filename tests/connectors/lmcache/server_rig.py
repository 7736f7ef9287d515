"""Sessions over a real LMCache server and Redis."""

import json
import time
import urllib.request
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from connectors.lmcache.assembly import build_server_pooling
from connectors.lmcache.chunk_keys import ChunkNames, LMCacheModel, ServerChunkKeys
from connectors.lmcache.control import LMCacheControl
from connectors.lmcache.session_chunks import SessionChunks
from spm.keys import Rank
from tests.connectors.lmcache.lmcache_writer import MODEL, LMCacheWriter, writing
from tests.connectors.lmcache.rig import CHUNK_TOKENS, Rig, tokens_of
from tests.lmcache_server import LMCacheServer, running_lmcache_server
from tests.processes import wait_until
from tests.redis_server import RedisServer, running_redis

RANKS = 2


def soon() -> float:
    return time.monotonic() + 10.0


def chunks_of(tokens: "array[int]", salt: str = "") -> SessionChunks:
    names = ChunkNames(MODEL, RANKS)
    return SessionChunks(ServerChunkKeys(names, CHUNK_TOKENS, "blake3"), tokens, salt)


def names_of(tokens: "array[int]", salt: str = "") -> set[str]:
    """In Redis."""
    names = ChunkNames(MODEL, RANKS)
    keys = chunks_of(tokens, salt).keys
    return {names.store_key(key, Rank(rank)) for key in keys for rank in range(RANKS)}


@dataclass
class Backend:
    server: LMCacheServer
    redis: RedisServer
    writer: LMCacheWriter
    control: LMCacheControl

    def clear_host_tier(self) -> None:
        """Until it is empty: what is on its way to Redis is in use."""

        def cleared() -> bool:
            self.control.clear_host_tier(soon())
            return self.host_bytes() == 0

        wait_until(cleared, "an empty host tier")

    def host_bytes(self) -> int:
        return self.control.status(soon()).used_bytes

    def objects_in_use(self) -> int:
        """Locked in the host tier."""
        with urllib.request.urlopen(f"{self.server.control_url}/status", timeout=5) as answer:
            host = json.load(answer)["storage_manager"]["l1_manager"]
        return int(host["read_locked_count"]) + int(host["write_locked_count"])

    def names(self) -> set[str]:
        with self.redis.client() as client:
            return {name.decode() for name in client.scan_iter(count=1000)}


@contextmanager
def running_backend() -> Iterator[Backend]:
    with (
        running_redis() as redis,
        running_lmcache_server(redis.port) as server,
        writing(server, RANKS) as writer,
    ):
        yield Backend(server, redis, writer, LMCacheControl(server.control_url, MODEL, RANKS))


class LMCacheRig(Rig):
    """With LMCache in place of the wrapped connector, and a writer in place of the workers."""

    def __init__(self, backend: Backend, *, redis_known: bool, **keep: Any) -> None:  # noqa: ANN401
        store = {"kind": "lmcache", "control_url": backend.server.control_url}
        if redis_known:
            store["l2_url"] = backend.redis.tcp_url
        settings = {"interval_s": 1.0, "delete_grace_s": 0, **keep}
        super().__init__({"store": store, "keep_alive": settings, "load_deadline_s": 5.0})
        self.backend = backend
        self.pooling = self.lmcache = build_server_pooling(
            self.parts, LMCacheModel(MODEL, RANKS, "")
        )

    def ready(self) -> "LMCacheRig":
        """The server has said what it is."""
        self.until(lambda: self.pooling.capabilities.delete, "the server's answer")
        return self

    def stored_turn(self, name: str, session: int, count: int, salt: str | None = None) -> None:
        """A turn of ``count`` tokens, whose chunks LMCache stores in both tiers."""
        tokens = tokens_of(session, count)
        self.backend.writer.store(tokens, salt or "")
        self.turn(name, tokens, salt)
        expected = names_of(tokens, salt or "")
        self.until(lambda: self.backend.names() >= expected, "chunks in Redis")
