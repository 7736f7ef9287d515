"""Sessions' operations against a real LMCache server and Redis, with and without ``l2_url``."""

import pytest

from connectors.lmcache.chunk_keys import ChunkNames
from spm.agent_hint import BlockRange
from spm.keys import Rank
from spm.operation import Status
from tests import lmcache_server, redis_server
from tests.connectors.lmcache.lmcache_writer import MODEL
from tests.connectors.lmcache.rig import CHUNK_BLOCKS, CHUNK_TOKENS, ref_of, tokens_of
from tests.connectors.lmcache.server_rig import RANKS, Backend, LMCacheRig, names_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not lmcache_server.INSTALLED, reason="lmcache is not installed"),
    pytest.mark.skipif(redis_server.EXECUTABLE is None, reason="redis-server is not installed"),
]


def test_capabilities_are_what_there_is(rig: LMCacheRig, redis_known: bool) -> None:
    can = rig.pooling.capabilities

    assert (can.offload, can.prefetch, can.evict, can.delete, can.touch) == (True,) * 5
    assert can.residency is redis_known
    assert can.capacity is redis_known
    assert (can.exact_ttl, can.manifests, can.events) == (False,) * 3


def test_a_prefetch_into_the_host_tier_brings_the_session_back(rig: LMCacheRig) -> None:
    rig.stored_turn("s", 1, 3 * CHUNK_TOKENS)
    rig.backend.clear_host_tier()

    operation = rig.prefetch("s")

    assert (operation.status, operation.done_blocks) == (Status.OK, 3 * CHUNK_BLOCKS)
    assert rig.backend.host_bytes() > 0
    assert rig.residency("s")["host"] == 3 * CHUNK_BLOCKS


def test_a_prefetch_of_a_range_rounds_outward_and_says_what_is_not_stored(rig: LMCacheRig) -> None:
    rig.stored_turn("s", 2, 2 * CHUNK_TOKENS + 100)  # three blocks behind the last chunk
    rig.backend.clear_host_tier()

    first = rig.prefetch("s", BlockRange(1, 3))
    all_of_it = rig.prefetch("s")
    tail = rig.prefetch("s", BlockRange(2 * CHUNK_BLOCKS, 2 * CHUNK_BLOCKS + 2))

    assert (first.status, first.done_blocks) == (Status.OK, 2)
    assert (all_of_it.status, all_of_it.done_blocks) == (Status.PARTIAL, 2 * CHUNK_BLOCKS)
    assert "whole chunks" in all_of_it.detail
    assert tail.status is Status.NOT_FOUND


def test_a_prefetch_of_what_is_gone_is_not_found(rig: LMCacheRig) -> None:
    rig.turn("s", tokens_of(3, 2 * CHUNK_TOKENS))

    assert rig.prefetch("s").status is Status.NOT_FOUND


def test_a_prefetch_of_half_of_it_is_partial(rig: LMCacheRig) -> None:
    rig.turn("s", tokens_of(4, 4 * CHUNK_TOKENS))
    rig.backend.writer.store(tokens_of(4, 2 * CHUNK_TOKENS))

    operation = rig.prefetch("s")

    assert (operation.status, operation.done_blocks) == (Status.PARTIAL, 2 * CHUNK_BLOCKS)


def test_an_evicted_session_is_deleted_and_others_stay(rig: LMCacheRig) -> None:
    rig.stored_turn("kept", 5, 2 * CHUNK_TOKENS)
    rig.stored_turn("gone", 6, 2 * CHUNK_TOKENS + 40)

    operation = rig.evict("gone")

    assert operation.status is Status.OK
    rig.until(lambda: rig.backend.names() == names_of(tokens_of(5, 2 * CHUNK_TOKENS)), "deletes")
    assert rig.prefetch("gone").status is Status.NOT_FOUND
    assert rig.prefetch("kept").status is Status.OK


def test_chunks_of_two_sessions_are_deleted_with_the_second(rig: LMCacheRig) -> None:
    rig.stored_turn("a", 7, 2 * CHUNK_TOKENS)
    shared = rig.backend.names()
    longer = tokens_of(7, 2 * CHUNK_TOKENS) + tokens_of(8, CHUNK_TOKENS)
    rig.backend.writer.store(longer)
    rig.turn("b", longer)
    rig.until(lambda: len(rig.backend.names()) == 3 * RANKS, "chunks in Redis")

    rig.end("b")
    rig.until(lambda: rig.backend.names() == shared, "the end of what only b held")
    rig.end("a")
    rig.until(lambda: not rig.backend.names(), "the end of the rest")


def test_another_tenants_equal_chunks_are_not_touched(rig: LMCacheRig) -> None:
    rig.stored_turn("a", 9, CHUNK_TOKENS, salt="tenant-a")
    rig.stored_turn("b", 9, CHUNK_TOKENS, salt="tenant-b")
    others = names_of(tokens_of(9, CHUNK_TOKENS), "tenant-b")

    rig.end("a")

    rig.until(lambda: rig.backend.names() == others, "the end of one tenant's chunk")
    assert rig.prefetch("b").status is Status.OK


def test_an_evicted_range_deletes_only_chunks_wholly_inside(rig: LMCacheRig) -> None:
    rig.stored_turn("s", 10, 4 * CHUNK_TOKENS)
    names = ChunkNames(MODEL, RANKS)
    third = rig.chunk_keys("s")[2]

    operation = rig.evict("s", BlockRange(2 * CHUNK_BLOCKS - 1, 3 * CHUNK_BLOCKS + 1))

    assert (operation.status, operation.done_blocks) == (Status.PARTIAL, CHUNK_BLOCKS)
    gone = {names.store_key(third, Rank(rank)) for rank in range(RANKS)}
    left = names_of(tokens_of(10, 4 * CHUNK_TOKENS)) - gone
    rig.until(lambda: rig.backend.names() == left, "the end of one chunk")


def test_deletes_leave_other_engines_time_where_redis_is_known(empty_backend: Backend) -> None:
    rig = LMCacheRig(empty_backend, redis_known=True, delete_grace_s=60).ready()
    other = LMCacheRig(empty_backend, redis_known=True, delete_grace_s=60).ready()
    try:
        rig.stored_turn("s", 11, CHUNK_TOKENS)
        name = next(iter(empty_backend.names()))
        with empty_backend.redis.client() as client:
            rig.end("s")
            rig.until(lambda: 0 < client.ttl(name) <= 60, "a lifetime")
            rig.until(lambda: empty_backend.host_bytes() == 0, "an empty host tier")
            other.turn("t", tokens_of(11, CHUNK_TOKENS))  # which holds the same chunk
            other.until(lambda: client.ttl(name) == -1, "its touch")
    finally:
        rig.pooling.close()
        other.pooling.close()


def test_keep_alive_touches_lmcaches_keys_in_redis(with_redis: LMCacheRig) -> None:
    rig = with_redis
    rig.stored_turn("kept", 12, 2 * CHUNK_TOKENS)
    kept = sorted(rig.backend.names())
    rig.backend.writer.store(tokens_of(13, CHUNK_TOKENS))
    rig.until(lambda: len(rig.backend.names()) == 3 * RANKS, "chunks in Redis")
    (other, *_) = rig.backend.names() - set(kept)

    with rig.backend.redis.client() as client:
        rig.until(lambda: client.object("IDLETIME", other) >= 3, "an idle key")
        assert max(client.object("IDLETIME", name) for name in kept) < 3
    assert rig.residency("kept")["remote"] == 2 * CHUNK_BLOCKS


def test_what_redis_lost_is_no_longer_said_to_be_there(with_redis: LMCacheRig) -> None:
    rig = with_redis
    rig.stored_turn("s", 14, 2 * CHUNK_TOKENS)
    rig.until(lambda: rig.residency("s")["remote"] == 2 * CHUNK_BLOCKS, "residency")

    with rig.backend.redis.client() as client:
        names = ChunkNames(MODEL, RANKS)
        client.delete(names.store_key(rig.chunk_keys("s")[1], Rank(1)))  # one rank's part

    rig.until(lambda: rig.residency("s")["remote"] == CHUNK_BLOCKS, "residency")


def test_keep_alive_without_redis_brings_sessions_back_to_the_host_tier(
    empty_backend: Backend,
) -> None:
    rig = LMCacheRig(empty_backend, redis_known=False).ready()
    try:
        rig.stored_turn("s", 15, 2 * CHUNK_TOKENS)
        empty_backend.clear_host_tier()
        rig.until(lambda: empty_backend.host_bytes() > 0, "the session's return")
        assert rig.lmcache.keep_alive_status == {
            "keys": 1,
            "interval_s": 1.0,
            "behind_s": 0.0,
            "keys_per_s": 1.0,
        }
    finally:
        rig.pooling.close()


def test_an_offload_is_confirmed_in_redis_chunk_by_chunk(with_redis: LMCacheRig) -> None:
    rig = with_redis
    rig.stored_turn("s", 16, 3 * CHUNK_TOKENS)

    operation = rig.offload("s")

    assert (operation.status, operation.done_blocks) == (Status.OK, 3 * CHUNK_BLOCKS)
    assert rig.sam.demotions == [None]
    assert rig.lookups.asked == []  # the connector was not asked


def test_the_tail_of_an_offload_keeps_its_protection(with_redis: LMCacheRig) -> None:
    rig = with_redis
    rig.stored_turn("s", 17, 2 * CHUNK_TOKENS + 100)

    operation = rig.offload("s")

    assert (operation.status, operation.done_blocks) == (Status.PARTIAL, 2 * CHUNK_BLOCKS)
    assert rig.sam.demotions == [BlockRange(0, 2 * CHUNK_BLOCKS)]


def test_an_offload_of_what_lmcache_lost_fails(with_redis: LMCacheRig) -> None:
    rig = with_redis
    rig.turn("s", tokens_of(18, 2 * CHUNK_TOKENS))

    assert rig.offload("s").status is Status.FAILED
    assert rig.sam.demotions == []


def test_without_redis_an_offload_asks_the_connector(empty_backend: Backend) -> None:
    rig = LMCacheRig(empty_backend, redis_known=False).ready()
    try:
        rig.turn("s", tokens_of(19, 2 * CHUNK_TOKENS))
        rig.lookups.blocks = 2 * CHUNK_BLOCKS

        assert rig.offload("s").status is Status.OK
        assert rig.lookups.asked == [2 * CHUNK_BLOCKS]
    finally:
        rig.pooling.close()


def test_a_session_is_not_forgotten_by_a_status(rig: LMCacheRig) -> None:
    rig.turn("s", tokens_of(24, CHUNK_TOKENS))

    status = rig.pooling.status()

    assert status["tiers"]["remote"]["kind"] == "lmcache"
    assert status["tiers"]["host"]["capacity_bytes"] == lmcache_server.L1_GIB * 2**30
    assert "@" not in status["tiers"]["remote"]["url"]
    assert rig.pooling.logical_blocks(ref_of("s")) == CHUNK_BLOCKS
