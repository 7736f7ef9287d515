"""Chunks of an in-process LMCache in a real Redis: two keys a worker, kept alive together."""

import asyncio
import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from connectors.lmcache.assembly import build_in_process_pooling
from connectors.lmcache.in_process import PARTS, InProcessChunkKeys, chunk_keys_of
from spm.errors import ConfigError
from spm.keys import Rank
from spm.operation import Status
from tests import lmcache_server, redis_server
from tests.connectors.lmcache.rig import CHUNK_BLOCKS, CHUNK_TOKENS, Rig, tokens_of
from tests.redis_server import RedisServer, running_redis

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not lmcache_server.INSTALLED, reason="lmcache is not installed"),
    pytest.mark.skipif(redis_server.EXECUTABLE is None, reason="redis-server is not installed"),
]

WORKERS = 2
VALUES = WORKERS * len(PARTS)


def metadata_of(worker: int = 0, **changed: Any) -> Any:  # noqa: ANN401
    from lmcache.v1.metadata import LMCacheMetadata

    metadata = LMCacheMetadata(
        model_name="some/model",
        world_size=WORKERS,
        local_world_size=WORKERS,
        worker_id=worker,
        local_worker_id=worker,
        kv_dtype=torch.bfloat16,
        kv_shape=(2, 2, CHUNK_TOKENS, 2, 16),
    )
    return replace(metadata, **changed)


def config_of(**changed: Any) -> Any:  # noqa: ANN401
    from lmcache.v1.config import LMCacheEngineConfig

    settings = {
        "chunk_size": CHUNK_TOKENS,
        "remote_url": "redis://127.0.0.1:6379",
        "pre_caching_hash_algorithm": "sha256_cbor",
    }
    return LMCacheEngineConfig.from_defaults(**{**settings, **changed})


def names_of(chunk_keys: InProcessChunkKeys, tokens: "array[int]") -> list[str]:
    """By chunk, worker and part."""
    keys = chunk_keys.keys(tokens, (), "")
    return [chunk_keys.names.store_key(key, Rank(at)) for key in keys for at in range(VALUES)]


def write(server: RedisServer, names: Sequence[str]) -> None:
    with server.client() as client:
        client.mset(dict.fromkeys(names, b"a value"))


def names_in(server: RedisServer) -> set[str]:
    with server.client() as client:
        return {name.decode() for name in client.scan_iter(count=1000)}


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture(scope="module")
def chunk_keys() -> InProcessChunkKeys:
    return chunk_keys_of(config_of(), metadata_of(), 1)


def rig_of(server: RedisServer, chunk_keys: InProcessChunkKeys, grace_s: int = 0) -> Rig:
    wrap = {"kv_connector": "LMCacheConnectorV1", "remote_url": server.tcp_url}
    keep_alive = {"interval_s": 1.0, "delete_grace_s": grace_s}
    rig = Rig({"wrap": wrap, "keep_alive": keep_alive, "load_deadline_s": 5.0})
    rig.pooling = build_in_process_pooling(rig.parts, chunk_keys)
    return rig


@pytest.fixture
def rig(server: RedisServer, chunk_keys: InProcessChunkKeys) -> Iterator[Rig]:
    rig = rig_of(server, chunk_keys)
    yield rig
    rig.pooling.check_integrity(idle=True)
    rig.pooling.close()


# --- names ------------------------------------------------------------------------------------


def test_our_names_are_those_that_lmcaches_connector_writes(
    server: RedisServer, chunk_keys: InProcessChunkKeys
) -> None:
    pytest.importorskip("lmcache.v1.storage_backend.connector.redis_connector")
    tokens = tokens_of(1, 2 * CHUNK_TOKENS + 50)

    put_with_lmcache(server, tokens)

    assert names_in(server) == set(names_of(chunk_keys, tokens))
    assert len(names_in(server)) == 2 * VALUES


def put_with_lmcache(server: RedisServer, tokens: "array[int]") -> None:
    """By LMCache's own token database and Redis connector, on all workers."""
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
    from lmcache.v1.storage_backend.connector.redis_connector import RedisConnector
    from lmcache.v1.token_database import ChunkedTokenDatabase

    shape = torch.Size((2, 2, 8, 16))
    described = MemoryObjMetadata(
        shape, torch.bfloat16, 0, 1024, 1, 0, MemoryFormat.KV_2LTD, None, [shape], [torch.bfloat16]
    )
    value = TensorMemoryObj(torch.zeros(1024, dtype=torch.uint8), described, None)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def put() -> None:
        backend = SimpleNamespace(config=config_of(), metadata=metadata_of())
        connector = RedisConnector(server.tcp_url, loop, backend)
        for worker in range(WORKERS):
            database = ChunkedTokenDatabase(config_of(), metadata_of(worker))
            for _, _, key in database.process_tokens(tokens.tolist()):
                await connector.put(key, value)
        await connector.connection.aclose()
        # Its own close() waits on this loop for something that has to run on this loop.
        workers = asyncio.all_tasks() - {asyncio.current_task()}
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

    try:
        asyncio.run_coroutine_threadsafe(put(), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_keys_of_a_longer_chain_begin_with_the_shorter_ones(
    chunk_keys: InProcessChunkKeys,
) -> None:
    tokens = tokens_of(2, 4 * CHUNK_TOKENS + 3)
    all_of_them = chunk_keys.keys(tokens, (), "")

    assert len(all_of_them) == 4
    assert chunk_keys.keys(tokens, all_of_them[:3], "") == all_of_them[3:]
    assert chunk_keys.keys(tokens[: 3 * CHUNK_TOKENS], (), "") == all_of_them[:3]


def test_vllms_own_block_hashes_stay_as_they_were() -> None:
    from vllm.v1.core import kv_cache_utils

    before = kv_cache_utils.NONE_HASH
    chunk_keys_of(config_of(), metadata_of(), 1)

    assert before == kv_cache_utils.NONE_HASH


@pytest.mark.parametrize(
    ("config", "metadata", "groups", "why"),
    [
        ({"remote_url": "resp://127.0.0.1:1"}, {}, 1, "'resp'"),
        ({"remote_url": None}, {}, 1, "'not set'"),
        ({}, {"use_mla": True}, 1, "MLA"),
        ({}, {}, 2, "2 KV cache groups"),
        ({"use_layerwise": True}, {}, 1, "use_layerwise"),
        ({"pre_caching_hash_algorithm": "builtin"}, {}, 1, "PYTHONHASHSEED"),
    ],
)
def test_names_that_would_be_guessed_are_refused(
    config: dict[str, Any],
    metadata: dict[str, Any],
    groups: int,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)

    with pytest.raises(ConfigError, match=why):
        chunk_keys_of(config_of(**config), metadata_of(**metadata), groups)


# --- sessions ---------------------------------------------------------------------------------


def test_capabilities_are_what_there_is(rig: Rig) -> None:
    can = rig.pooling.capabilities

    assert (can.offload, can.evict, can.touch, can.delete, can.residency) == (True,) * 5
    assert (can.prefetch, can.manifests) == (False, False)
    assert rig.prefetch("s").status is Status.UNSUPPORTED


def test_both_keys_of_every_worker_are_touched(
    rig: Rig, server: RedisServer, chunk_keys: InProcessChunkKeys
) -> None:
    tokens = tokens_of(3, CHUNK_TOKENS)
    kept = names_of(chunk_keys, tokens)
    write(server, [*kept, "other"])
    rig.turn("s", tokens)

    with server.client() as client:
        rig.until(lambda: client.object("IDLETIME", "other") >= 3, "an idle key")
        assert all(client.object("IDLETIME", name) < 3 for name in kept)
    assert rig.residency("s")["remote"] == CHUNK_BLOCKS


@pytest.mark.parametrize("lost", range(VALUES))
def test_half_a_chunk_is_gone_and_its_other_half_is_deleted(
    rig: Rig, server: RedisServer, chunk_keys: InProcessChunkKeys, lost: int
) -> None:
    tokens = tokens_of(4, 2 * CHUNK_TOKENS)
    names = names_of(chunk_keys, tokens)
    write(server, names)
    rig.turn("s", tokens)
    rig.until(lambda: rig.residency("s")["remote"] == 2 * CHUNK_BLOCKS, "residency")

    with server.client() as client:
        client.delete(names[VALUES + lost])  # of the second chunk

    rig.until(lambda: rig.residency("s")["remote"] == CHUNK_BLOCKS, "residency")
    rig.until(lambda: names_in(server) == set(names[:VALUES]), "the end of the other halves")


def test_a_chunk_that_was_half_written_is_let_live(
    rig: Rig, server: RedisServer, chunk_keys: InProcessChunkKeys
) -> None:
    tokens = tokens_of(5, CHUNK_TOKENS)
    names = names_of(chunk_keys, tokens)
    write(server, names[:1])
    rig.turn("s", tokens)
    missed = rig.pooling._missed  # type: ignore[attr-defined]
    rig.until(lambda: bool(missed), "a first look")

    write(server, names)

    rig.until(lambda: rig.residency("s")["remote"] == CHUNK_BLOCKS, "residency")
    assert names_in(server) == set(names)
    assert not missed


def test_an_offload_is_confirmed_when_both_keys_are_there(
    rig: Rig, server: RedisServer, chunk_keys: InProcessChunkKeys
) -> None:
    tokens = tokens_of(6, 2 * CHUNK_TOKENS)
    names = names_of(chunk_keys, tokens)
    write(server, names[:-1])  # the last chunk lacks one worker's metadata
    rig.turn("s", tokens)

    partly = rig.offload("s")
    write(server, names)
    wholly = rig.offload("s")

    assert (partly.status, partly.done_blocks) == (Status.PARTIAL, CHUNK_BLOCKS)
    assert (wholly.status, wholly.done_blocks) == (Status.OK, 2 * CHUNK_BLOCKS)


def test_an_ended_session_is_deleted_but_for_what_others_hold(
    rig: Rig, server: RedisServer, chunk_keys: InProcessChunkKeys
) -> None:
    tokens = tokens_of(7, 2 * CHUNK_TOKENS)
    names = names_of(chunk_keys, tokens)
    write(server, names)
    rig.turn("long", tokens)
    rig.turn("short", tokens[:CHUNK_TOKENS])

    rig.end("long")

    rig.until(lambda: names_in(server) == set(names[:VALUES]), "the end of what one held")


def test_other_engines_have_time_to_touch_what_is_deleted_here(
    server: RedisServer, chunk_keys: InProcessChunkKeys
) -> None:
    rig, other = rig_of(server, chunk_keys, 60), rig_of(server, chunk_keys, 60)
    tokens = tokens_of(8, CHUNK_TOKENS)
    names = names_of(chunk_keys, tokens)
    write(server, names)
    try:
        rig.turn("s", tokens)
        with server.client() as client:
            rig.end("s")
            rig.until(lambda: all(0 < client.ttl(name) <= 60 for name in names), "lifetimes")
            other.turn("t", tokens)
            other.until(lambda: all(client.ttl(name) == -1 for name in names), "its touch")
    finally:
        rig.pooling.close()
        other.pooling.close()
