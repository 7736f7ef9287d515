"""A real LMCache server or Redis that hangs, is restarted or is gone: operations end and sessions
go on."""

import pytest

from spm.operation import Status
from tests import lmcache_server, redis_server
from tests.connectors.lmcache.rig import CHUNK_BLOCKS, CHUNK_TOKENS, tokens_of
from tests.connectors.lmcache.server_rig import Backend, LMCacheRig, names_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not lmcache_server.INSTALLED, reason="lmcache is not installed"),
    pytest.mark.skipif(redis_server.EXECUTABLE is None, reason="redis-server is not installed"),
]


def test_sessions_that_came_before_the_server_answered_get_their_names(
    empty_backend: Backend,
) -> None:
    with empty_backend.server.hung():
        rig = LMCacheRig(empty_backend, redis_known=True)
        tokens = tokens_of(20, 2 * CHUNK_TOKENS)
        rig.turn("s", tokens)
        assert not rig.pooling.capabilities.delete
        assert rig.prefetch("s").status is Status.FAILED
    try:
        rig.ready()
        empty_backend.writer.store(tokens)
        rig.until(lambda: rig.residency("s")["remote"] == 2 * CHUNK_BLOCKS, "residency")
    finally:
        rig.pooling.close()


def test_operations_on_a_hung_server_end_and_later_ones_work(rig: LMCacheRig) -> None:
    rig.stored_turn("s", 21, 2 * CHUNK_TOKENS)

    with rig.backend.server.hung():
        assert rig.prefetch("s").status is Status.FAILED
        rig.turn("s", tokens_of(21, 3 * CHUNK_TOKENS))

    rig.until(lambda: rig.prefetch("s").status is Status.PARTIAL, "a prefetch that works")


def test_a_server_restarted_empty_is_asked_again(empty_backend: Backend) -> None:
    rig = LMCacheRig(empty_backend, redis_known=True).ready()
    try:
        rig.stored_turn("s", 23, CHUNK_TOKENS)
        empty_backend.server.restart()
        # Until its workers have come back LMCache refuses: it does not know the model.
        rig.until(lambda: rig.prefetch("s").status is Status.OK, "a prefetch that works")
        assert empty_backend.host_bytes() > 0
    finally:
        rig.pooling.close()


def test_without_redis_operations_end_and_sessions_go_on(with_redis: LMCacheRig) -> None:
    """Last: LMCache 0.5.6 never connects to Redis again, and says that it is well."""
    rig, server = with_redis, with_redis.backend.redis
    rig.stored_turn("s", 22, CHUNK_TOKENS)
    server.stop()
    try:
        assert rig.offload("s").status is Status.FAILED
        rig.turn("s", tokens_of(22, 2 * CHUNK_TOKENS))
        assert rig.evict("s").status is Status.OK
    finally:
        server.start()

    rig.turn("t", tokens_of(23, CHUNK_TOKENS))
    with server.client() as client:  # as LMCache would, if it came back
        client.mset(dict.fromkeys(names_of(tokens_of(23, CHUNK_TOKENS)), b"a chunk"))
    rig.until(lambda: rig.offload("t").status is Status.OK, "an offload that is confirmed")
