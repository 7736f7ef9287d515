"""The check value, sizes of tiers and the settings that follow."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spm.auto_policy import AutoAction, IdleSession, decide
from spm.config import SpmConfig
from spm.errors import ConfigError
from spm.plan.break_even import auto_hold_gap_s, break_even_tokens, reload_s
from spm.plan.capacity import make_plan, remote_ttl_s, retention_ttl_s, session_size
from spm.plan.model_shape import model_shape
from spm.plan.redis_memory import KEY_OVERHEAD_BYTES, allocated_bytes, stored_value_bytes
from spm.plan.workload import LINKS_GB_PER_S, Workload, gpu_kv_bytes
from spm.value_format import HEADER_BYTES
from tests.spm.plan import configs

_PCIE5 = LINKS_GB_PER_S["pcie5x16"] * 1e9
_LOAD = Workload(
    context_tokens=15_000,
    gap_s=1.1,
    gap_p99_s=60.0,
    concurrency=52,
    link_bytes_per_s=_PCIE5,
    remote_bytes_per_s=3.1e9,
    turn_tokens=501,
    tensor_parallel=1,
    block_tokens=16,
    gpu_kv_bytes=60 << 30,
)
_QWEN3 = model_shape(configs.QWEN3_32B)


def test_the_published_break_even() -> None:
    assert _QWEN3.token_bytes() == 262_144
    assert reload_s(262_144, 63.0e9) * 1e6 == pytest.approx(4.16, abs=0.005)
    assert break_even_tokens(_QWEN3, 0.18, 63.0e9) == pytest.approx(43_270, rel=0.001)


def test_break_even_with_windows_and_states() -> None:
    for config in (configs.GEMMA3_4B, configs.QWEN3_NEXT, configs.MISTRAL_7B):
        shape = model_shape(config)
        for context in (500, 1024, 3000):
            gap_s = shape.rank_bytes(context) / _PCIE5
            assert break_even_tokens(shape, gap_s, _PCIE5) == pytest.approx(context)
    assert break_even_tokens(model_shape(configs.MISTRAL_7B), 1.0, _PCIE5) is None
    assert break_even_tokens(model_shape(configs.QWEN3_NEXT), 1e-9, _PCIE5) == 0


def test_auto_mode_decides_as_the_plan_says() -> None:
    def action(gap_s: float, stored: bool) -> AutoAction:
        kv = 1 << 30
        idle = IdleSession(gap_s, kv, kv * stored, _PCIE5, None, 0.0, 60 << 30)
        return decide(idle).action

    for stored in (True, False):
        limit_s = auto_hold_gap_s(60 << 30, _PCIE5, stored)
        assert action(limit_s * 0.99, stored) is AutoAction.RETAIN
        assert action(limit_s * 1.01, stored) is AutoAction.OFFLOAD


def test_a_plan() -> None:
    plan = make_plan(_QWEN3, _LOAD)
    blocks = 938
    assert plan.session.rank_bytes == blocks * 16 * 262_144
    assert plan.session.values == blocks
    assert plan.session.redis_bytes == blocks * ((5 << 20) + KEY_OVERHEAD_BYTES)
    assert plan.fit_gpu == (60 << 30) // plan.session.rank_bytes == 16
    assert plan.fit_host >= 52
    assert plan.fit_redis >= 52
    assert not plan.hold
    assert plan.recommend.host_bytes >= 52 * blocks * (HEADER_BYTES + 16 * 262_144)
    assert (plan.recommend.hint_ttl_s, plan.recommend.session_ttl_s) == (60, 300)
    assert plan.recommend.remote_ttl_s == 390
    assert plan.recommend.prefetch_reserve_share == 0.05


def test_long_contexts_are_held() -> None:
    assert make_plan(_QWEN3, replace(_LOAD, gap_s=0.18, context_tokens=50_000)).hold
    assert not make_plan(_QWEN3, replace(_LOAD, gap_s=0.18, context_tokens=40_000)).hold


def test_without_a_pool_the_reserve_is_the_default() -> None:
    plan = make_plan(_QWEN3, replace(_LOAD, gpu_kv_bytes=None))
    assert (plan.fit_gpu, plan.auto_hold_gap_s) == (None, None)
    assert plan.recommend.prefetch_reserve_share == SpmConfig().prefetch_reserve_share


def test_ranks_share_a_session() -> None:
    one, four = (session_size(_QWEN3, replace(_LOAD, tensor_parallel=n)) for n in (1, 4))
    assert four.rank_bytes * 4 == four.total_bytes == one.total_bytes
    assert four.values == one.values * 4
    assert four.redis_bytes > one.redis_bytes * 0.8


def test_windows_keep_one_block_more_than_they_hold() -> None:
    size = session_size(model_shape(configs.MISTRAL_7B), _LOAD)
    assert size.values == 4096 // 16 + 1


@pytest.mark.parametrize(
    ("size_bytes", "allocated"),
    [
        (1, 16),
        (64, 64),
        (65, 80),
        (128, 128),
        (129, 160),
        (4 << 20, 4 << 20),
        ((4 << 20) + 1, 5 << 20),
        (369_162, 384 << 10),
    ],
)
def test_size_classes(size_bytes: int, allocated: int) -> None:
    assert allocated_bytes(size_bytes) == allocated


def test_what_redis_itself_says_of_a_value() -> None:
    """``MEMORY USAGE`` of Redis 7.0.15 with jemalloc, without the entry of its expiry."""
    for payload, used in ((4 << 20, 5_243_032), (368_640, 393_368)):
        assert used < stored_value_bytes(payload) < used + 2 * KEY_OVERHEAD_BYTES


@pytest.mark.parametrize(
    "change",
    [
        {"context_tokens": 0},
        {"gap_s": 0.0},
        {"gap_p99_s": 1.0},
        {"link_bytes_per_s": float("inf")},
        {"host_bytes": -1},
    ],
)
def test_senseless_workloads_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        replace(_LOAD, **change)  # type: ignore[arg-type]


def test_what_weights_leave_for_kv() -> None:
    assert gpu_kv_bytes(100, 40, 2) == 72
    with pytest.raises(ConfigError, match="weights_bytes"):
        gpu_kv_bytes(100, 100, 1)


@given(st.floats(0.01, 1e5), st.floats(0.01, 1e5), st.floats(0.0, 1e5))
def test_more_gap_is_never_a_shorter_ttl(gap_s: float, p99_s: float, more_s: float) -> None:
    ttl_s = retention_ttl_s(gap_s, p99_s)
    assert 1 <= ttl_s <= 3600
    assert ttl_s <= retention_ttl_s(gap_s + more_s, p99_s)
    assert ttl_s <= retention_ttl_s(gap_s, p99_s + more_s)
    assert remote_ttl_s(ttl_s) > ttl_s


@given(st.integers(1, 200_000), st.integers(0, 100_000))
def test_more_context_never_needs_less(context: int, more: int) -> None:
    small = make_plan(_QWEN3, replace(_LOAD, context_tokens=context))
    large = make_plan(_QWEN3, replace(_LOAD, context_tokens=context + more))
    assert small.recommend.host_bytes <= large.recommend.host_bytes
    assert small.recommend.redis_maxmemory_bytes <= large.recommend.redis_maxmemory_bytes
    assert (small.fit_gpu or 0) >= (large.fit_gpu or 0)


@given(st.integers(1, 1 << 40))
def test_a_size_class_loses_a_quarter_at_most(size_bytes: int) -> None:
    assert size_bytes <= allocated_bytes(size_bytes) <= max(size_bytes * 1.25, size_bytes + 16)
