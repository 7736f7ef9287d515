"""The control API, the names and the control worker against a real LMCache server and Redis."""

import time
from array import array

import pytest

from connectors.lmcache.chunk_keys import ChunkNames
from connectors.lmcache.control import (
    DeleteTier,
    LMCacheControl,
    ServerStatus,
    WarmRequest,
    WarmResult,
)
from spm.errors import StoreRefusedError, StoreTimeoutError, StoreUnavailableError
from tests import lmcache_server, redis_server
from tests.connectors.lmcache.lmcache_writer import MODEL
from tests.connectors.lmcache.rig import CHUNK_TOKENS, tokens_of
from tests.connectors.lmcache.server_rig import RANKS, Backend, chunks_of, names_of, soon
from tests.processes import wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not lmcache_server.INSTALLED, reason="lmcache is not installed"),
    pytest.mark.skipif(redis_server.EXECUTABLE is None, reason="redis-server is not installed"),
]

CHUNK = CHUNK_TOKENS
SALT = "tenant-a"


def warm(backend: Backend, tokens: "array[int]", salt: str = "") -> WarmResult | None:
    """Submit, and poll to the end."""
    name = backend.control.submit_warm(WarmRequest(tokens, len(tokens), salt), soon())
    if name is None:
        return None
    results: list[WarmResult] = []

    def ended() -> bool:
        result = backend.control.poll_warm(name, soon())
        results.extend([result] if result is not None else [])
        return bool(results)

    wait_until(ended, "the end of a warm prefetch")
    return results[0]


@pytest.fixture
def site(empty_backend: Backend) -> Backend:
    return empty_backend


def stored(site: Backend, tokens: "array[int]", salt: str = "") -> None:
    """Store, and wait for the second tier."""
    expected = site.names() | names_of(tokens, salt)
    site.writer.store(tokens, salt)
    wait_until(lambda: site.names() >= expected, "chunks in Redis")
    wait_until(lambda: not site.objects_in_use(), "the end of the store in Redis")


def test_the_server_says_what_it_is(site: Backend) -> None:
    status = site.control.status(soon())

    assert status.kind == ServerStatus(CHUNK, "blake3", True, 0, 0).kind
    assert status.limit_bytes == lmcache_server.L1_GIB * 2**30


@pytest.mark.parametrize("salt", ["", SALT])
def test_our_names_are_those_that_lmcache_wrote(site: Backend, salt: str) -> None:
    tokens = tokens_of(1, 3 * CHUNK + 40)

    stored(site, tokens, salt)

    assert site.names() == names_of(tokens, salt)
    assert len(names_of(tokens, salt)) == 3 * RANKS


def test_equal_chunks_of_two_salts_are_different_keys_and_names(site: Backend) -> None:
    tokens = tokens_of(2, 2 * CHUNK)
    stored(site, tokens)
    stored(site, tokens, SALT)

    plain, salted = chunks_of(tokens).keys, chunks_of(tokens, SALT).keys

    assert set(plain).isdisjoint(salted)
    assert site.names() == names_of(tokens) | names_of(tokens, SALT)


def test_keys_of_a_growing_chain_are_those_of_the_whole(site: Backend) -> None:
    tokens = tokens_of(3, 2 * CHUNK + 10)
    chunks = chunks_of(tokens, SALT)
    assert len(chunks.keys) == 2

    tokens.extend(tokens_of(4, 2 * CHUNK))
    chunks.extend()

    assert chunks.keys == chunks_of(tokens, SALT).keys
    stored(site, tokens, SALT)
    assert site.names() == names_of(tokens, SALT)


def test_a_warm_prefetch_brings_chunks_back_from_redis(site: Backend) -> None:
    tokens = tokens_of(5, 3 * CHUNK + 100)
    stored(site, tokens)
    site.clear_host_tier()

    assert warm(site, tokens) == WarmResult(3 * RANKS, 3 * RANKS)
    assert site.host_bytes() > 0


def test_a_warm_prefetch_of_nothing_stored_finds_nothing(site: Backend) -> None:
    assert warm(site, tokens_of(6, 2 * CHUNK)) == WarmResult(0, 2 * RANKS)


def test_a_warm_prefetch_finds_no_other_tenants_chunks(site: Backend) -> None:
    tokens = tokens_of(7, 2 * CHUNK)
    stored(site, tokens, SALT)

    assert warm(site, tokens) == WarmResult(0, 2 * RANKS)
    assert warm(site, tokens, SALT) == WarmResult(2 * RANKS, 2 * RANKS)


def test_less_than_a_chunk_is_nothing_to_prefetch(site: Backend) -> None:
    assert warm(site, tokens_of(8, CHUNK - 1)) is None


def test_a_prefetch_is_told_of_once(site: Backend) -> None:
    tokens = tokens_of(9, CHUNK)
    name = site.control.submit_warm(WarmRequest(tokens, CHUNK, ""), soon())
    assert name is not None
    wait_until(lambda: site.control.poll_warm(name, soon()) is not None, "the end of a prefetch")

    with pytest.raises(StoreRefusedError, match="404"):
        site.control.poll_warm(name, soon())


def test_a_model_that_nobody_registered_is_refused_with_words(site: Backend) -> None:
    control = LMCacheControl(site.server.control_url, "other/model", 1)

    with pytest.raises(StoreRefusedError, match=r"503.*other/model"):
        control.submit_warm(WarmRequest(tokens_of(10, CHUNK), CHUNK, ""), soon())


def test_deleted_objects_are_gone_from_both_tiers(site: Backend) -> None:
    kept, given_up = tokens_of(11, 2 * CHUNK), tokens_of(12, 2 * CHUNK)
    stored(site, kept)
    stored(site, given_up)
    names = ChunkNames(MODEL, RANKS)
    objects = [one for key in chunks_of(given_up).keys for one in names.objects(key)]

    result = site.control.delete(objects, DeleteTier.ALL, soon())

    assert (result.deleted, result.skipped) == (2 * len(objects), 0)
    assert site.names() == names_of(kept)
    assert warm(site, given_up) == WarmResult(0, 2 * RANKS)
    assert warm(site, kept) == WarmResult(2 * RANKS, 2 * RANKS)
    assert site.control.delete(objects, DeleteTier.HOST, soon()).deleted == 0


def test_a_hung_server_is_given_up_at_the_deadline_and_answers_again_later(site: Backend) -> None:
    with site.server.hung(), pytest.raises(StoreTimeoutError):
        site.control.status(time.monotonic() + 0.3)

    assert site.control.status(soon()).chunk_tokens == CHUNK


def test_nobody_there_is_unavailable() -> None:
    control = LMCacheControl(f"http://127.0.0.1:{redis_server.free_port()}", MODEL, RANKS)

    with pytest.raises(StoreUnavailableError):
        control.status(soon())
