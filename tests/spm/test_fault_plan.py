"""Faults on purpose: the same for a seed, as often as asked for, one kind at a time in bursts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spm.config import SpmConfig
from spm.errors import ConfigError
from spm.fault_plan import FaultKind, FaultPlan, FaultsConfig, StoreCall

OF_VALUES = {
    FaultKind.SHORT_READ,
    FaultKind.FLIPPED_BIT,
    FaultKind.LOST_WRITE,
    FaultKind.EVICTION,
}
CALLS = st.sampled_from(StoreCall)
SEEDS = st.integers(0, 2**63 - 1)


@given(SEEDS, CALLS, st.integers(0, 10**6), st.integers(0, 100), st.floats(0, 1e6))
def test_a_seed_says_it_all(
    seed: int, call: StoreCall, number: int, position: int, age_s: float
) -> None:
    config = FaultsConfig(seed=seed, share=0.5, burst_s=3.0)
    first, second = FaultPlan(config), FaultPlan(config)
    assert first.of_call(call, number, age_s) == second.of_call(call, number, age_s)
    values = first.of_value(call, number, position, age_s)
    assert values == second.of_value(call, number, position, age_s)
    assert values <= OF_VALUES
    assert not first.of_call(call, number, age_s) & OF_VALUES
    assert 0 <= first.delay_s(call, number) <= config.delay_s
    assert 0 <= first.place(call, number, 7) < 7


def test_seeds_differ() -> None:
    drawn = {
        tuple(FaultPlan(FaultsConfig(seed=seed)).of_call(StoreCall.GET, n, 0.0) for n in range(50))
        for seed in range(20)
    }
    assert len(drawn) == 20


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_the_share_is_kept(share: float) -> None:
    plan = FaultPlan(FaultsConfig(seed=5, kinds="error,flipped_bit", share=share))
    calls = sum(FaultKind.ERROR in plan.of_call(StoreCall.PUT, n, 0.0) for n in range(2000))
    values = sum(
        FaultKind.FLIPPED_BIT in plan.of_value(StoreCall.GET, n, n % 9, 0.0) for n in range(2000)
    )
    for count in (calls, values):
        assert count == pytest.approx(2000 * share, rel=0.3)


def test_a_burst_is_of_one_kind_and_all_take_their_turn() -> None:
    plan = FaultPlan(FaultsConfig(seed=1, share=1.0, burst_s=10.0))
    seen = set()
    for burst in range(100):
        kinds = plan.of_call(StoreCall.GET, 0, 10.0 * burst) | plan.of_value(
            StoreCall.GET, 0, 0, 10.0 * burst + 9.9
        )
        assert len(kinds) <= 1
        seen.add(kinds)
    assert seen == {frozenset()} | {frozenset((kind,)) for kind in FaultKind}


def test_the_beginning_may_be_slow() -> None:
    plan = FaultPlan(FaultsConfig(slow_start_s=5.0))
    assert plan.starting(4.9)
    assert not plan.starting(5.0)


def test_a_kind_nobody_knows_is_refused_by_name() -> None:
    raw = {"remote": {"url": "redis://h", "faults": {"kinds": "delay,lightning"}}}
    with pytest.raises(ConfigError, match=r"remote\.faults\.kinds has 'lightning': some of \["):
        SpmConfig.from_extra_config(raw)
