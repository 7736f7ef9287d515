"""Which phases run, and with what."""

import pytest

from spm.config import SpmConfig
from spm.demo.conversation import ROUNDS
from spm.demo.lmcache_process import CHUNK_TOKENS, LMCacheSpec
from spm.demo.phases import (
    HOST,
    LMCACHE,
    LMCACHE_RESTART,
    LMCACHE_STORE,
    RECOMPUTE,
    REDIS,
    REDIS_STORE,
    REFERENCE,
    RESTART,
    STORES,
    Phase,
    Store,
    select_phases,
)
from spm.demo.server import MAX_MODEL_LEN

SERVER = LMCacheSpec(port=1, control_port=2, l2_url="redis://127.0.0.1:3")


def names(chosen: list[str] | None, *, redis: bool = True, store: Store = REDIS_STORE) -> list[str]:
    return [phase.name for phase in select_phases(store, chosen, redis_installed=redis)]


def test_all_phases_run_by_default_the_reference_first() -> None:
    assert names(None) == ["reference", "recompute", "host", "redis", "restart"]


def test_with_lmcache_all_else_runs_on_it() -> None:
    expected = ["reference", "recompute", "lmcache", "restart"]
    assert names(None, store=LMCACHE_STORE) == expected
    assert names(["restart"], store=LMCACHE_STORE) == ["reference", "lmcache", "restart"]
    assert names(["lmcache"], store=LMCACHE_STORE) == ["reference", "lmcache"]
    assert names(None, store=LMCACHE_STORE, redis=False) == ["reference", "recompute"]


@pytest.mark.parametrize("name", ["recompute", "host", "redis"])
def test_a_named_phase_runs_after_the_reference_alone(name: str) -> None:
    assert names([name]) == ["reference", name]


def test_the_restart_brings_the_phase_that_fills_redis() -> None:
    assert names(["restart"]) == ["reference", "redis", "restart"]


def test_the_order_and_repetition_of_names_do_not_matter() -> None:
    assert names(["restart", "host", "host"]) == ["reference", "host", "redis", "restart"]


def test_no_names_leave_the_reference() -> None:
    assert names([]) == ["reference"]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, ["reference", "recompute", "host"]),
        (["restart"], ["reference"]),
        (["redis", "host"], ["reference", "host"]),
    ],
)
def test_without_redis_its_phases_are_left_out(
    chosen: list[str] | None, expected: list[str]
) -> None:
    assert names(chosen, redis=False) == expected


@pytest.mark.parametrize("phase", [REFERENCE, RECOMPUTE], ids=lambda phase: phase.name)
def test_plain_vllm_has_no_connector(phase: Phase) -> None:
    assert phase.connector("redis://127.0.0.1:1") is None


def test_the_host_phase_keeps_away_from_redis() -> None:
    settings = HOST.connector("redis://127.0.0.1:1")
    assert settings is not None
    assert settings.host_bytes > 0
    assert settings.redis_url is None


@pytest.mark.parametrize("phase", [REDIS, RESTART], ids=lambda phase: phase.name)
def test_the_redis_phases_have_no_host_memory_to_hide_behind(phase: Phase) -> None:
    settings = phase.connector("redis://127.0.0.1:1")
    assert settings is not None
    assert (settings.host_bytes, settings.redis_url) == (0, "redis://127.0.0.1:1")


@pytest.mark.parametrize("phase", [LMCACHE, LMCACHE_RESTART], ids=lambda phase: phase.name)
def test_the_lmcache_phases_have_lmcache_for_everything(phase: Phase) -> None:
    settings = phase.connector("redis://127.0.0.1:3", SERVER)
    assert settings is not None
    config = SpmConfig.from_extra_config(settings.transfer_config()["kv_connector_extra_config"])
    assert config.store is not None
    assert (config.store.url, config.store.control_url) == (SERVER.url, SERVER.control_url)
    assert config.store.l2_url == SERVER.l2_url
    assert not config.pools


@pytest.mark.parametrize("store", STORES.values(), ids=lambda store: store.name)
def test_a_restart_goes_on_where_its_predecessor_stopped(store: Store) -> None:
    filling, restarted = store.phases[-2:]
    assert filling.fills_redis
    assert not restarted.fills_redis
    assert restarted.first_round == filling.last_round + 1
    assert restarted.last_round == ROUNDS == REFERENCE.last_round
    assert [phase for phase in store.phases if phase.fills_redis] == [filling]


@pytest.mark.parametrize("store", STORES.values(), ids=lambda store: store.name)
def test_every_pool_is_whole_blocks_and_has_room_for_the_longest_prompt(store: Store) -> None:
    for phase in (REFERENCE, *store.phases):
        assert phase.pool_tokens % store.block_size == 0
        blocks = phase.pool_tokens // store.block_size - 1  # one is vLLM's null block
        assert blocks * store.block_size >= MAX_MODEL_LEN


def test_with_lmcache_a_block_is_a_chunk_so_that_hits_are_equally_long() -> None:
    assert LMCACHE_STORE.block_size == CHUNK_TOKENS == SERVER.chunk_tokens


def test_only_the_reference_has_room_for_all_sessions() -> None:
    assert REFERENCE.pool_tokens > 3 * max(
        phase.pool_tokens for store in STORES.values() for phase in store.phases
    )


def test_the_pool_is_described_in_tokens() -> None:
    assert Phase("p", "t", pool_tokens=3200).describe_pool() == "GPU pool 3,200 tokens"
