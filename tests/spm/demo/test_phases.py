"""Which phases run, and with what."""

import pytest

from spm.demo.phases import HOST, RECOMPUTE, REDIS, REFERENCE, RESTART, Phase, select_phases


def names(chosen: list[str] | None, *, redis: bool = True) -> list[str]:
    return [phase.name for phase in select_phases(chosen, redis_installed=redis)]


def test_all_phases_run_by_default_the_reference_first() -> None:
    assert names(None) == ["reference", "recompute", "host", "redis", "restart"]


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


def test_the_restarted_engine_goes_on_where_the_first_stopped() -> None:
    assert RESTART.first_round == REDIS.last_round + 1
    assert RESTART.last_round == REFERENCE.last_round


def test_only_the_reference_has_room_for_all_sessions() -> None:
    assert REFERENCE.pool_blocks > 3 * max(
        phase.pool_blocks for phase in (RECOMPUTE, HOST, REDIS, RESTART)
    )


def test_the_pool_is_described_in_tokens() -> None:
    assert Phase("p", "t", pool_blocks=100).describe_pool() == "GPU pool 3,200 tokens"
