"""That the micro benchmarks measure what they say they measure. No times are looked at."""

import itertools
import json
from pathlib import Path

import pytest

from benchmarks.micro.growth import SIZES, make_sizes, measure, measure_growth
from benchmarks.micro.growth_wheel import TurningWheel
from benchmarks.micro.growth_world import KEYS_A_SESSION, GrowthWorld
from benchmarks.micro.memory import measure_memory
from benchmarks.micro.steps import SIDES, add_steps
from benchmarks.report import Options, Report
from benchmarks.sam_conversations import SHORT
from benchmarks.sam_parts import Load, write_model
from spm.errors import ConfigError
from spm.hints import DEFAULT_TENANT
from tracker.ids import SessionRef

SESSIONS = 30
OPERATIONS = {
    "boundary",
    "idle_tick",
    "ttl_advance",
    "ttl_burst",
    "keep_alive_round",
    "residency_lookup",
    "session_end",
}


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report("micro", Options(quick=True, seed=1, json_path=tmp_path / "out.json"), 2)


@pytest.fixture
def world() -> GrowthWorld:
    return GrowthWorld(SESSIONS, seed=1)


def held(world: GrowthWorld) -> dict[SessionRef, tuple[bytes, ...]]:
    """The keys of each session."""
    tracker = world.manager.tracker
    refs = tracker.page(tenant=DEFAULT_TENANT, after=None, limit=1000)
    return {ref: tuple(tracker.keys_of(ref)) for ref in refs}


def test_a_world_has_all_its_sessions_and_keys(world: GrowthWorld) -> None:
    world.check()

    chains = held(world)
    assert len(chains) == SESSIONS
    assert {len(chain) for chain in chains.values()} == {KEYS_A_SESSION}
    keys = set(itertools.chain(*chains.values()))
    assert len(keys) == world.manager.tracker.num_keys == len(world.ring)
    assert all(key in world.ring for key in keys)


def test_a_boundary_changes_the_last_block_of_a_session_and_nothing_else(
    world: GrowthWorld,
) -> None:
    before = held(world)

    world.boundaries(1)

    after = held(world)
    changed = [ref for ref in before if before[ref] != after[ref]]
    assert len(changed) == 1
    (ref,) = changed
    assert before[ref][:-1] == after[ref][:-1]
    assert before[ref][-1] not in world.ring
    world.check()


def test_a_session_that_ends_gives_its_place_to_another(world: GrowthWorld) -> None:
    before = held(world)

    world.closings(1)

    after = held(world)
    (ref,) = (ref for ref in before if before[ref] != after[ref])
    assert set(before[ref]).isdisjoint(after[ref])
    assert not any(key in world.ring for key in before[ref])
    world.check()


def test_looking_and_waiting_change_nothing(world: GrowthWorld) -> None:
    before = held(world)

    world.idle_ticks(5)
    world.lookups(5)

    assert held(world) == before
    world.check()


def test_nothing_is_left_when_all_stay_away(world: GrowthWorld) -> None:
    world.expire_all()

    assert (world.manager.tracker.num_sessions, world.manager.tracker.num_keys) == (0, 0)
    assert len(world.ring) == 0
    world.manager.check_integrity()
    with pytest.raises(AssertionError, match="forgotten"):
        world.check()


def test_a_world_that_the_settings_do_not_allow_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_keys"):
        GrowthWorld(100_000_000 // KEYS_A_SESSION, seed=1)


def test_everybody_expires_and_begins_anew() -> None:
    wheel = TurningWheel(400)

    assert wheel.turn() > 0
    assert wheel.burst() > 0
    assert wheel.turn() > 0

    assert len(wheel.wheel) == 400
    wheel.wheel.check_integrity()


def test_every_operation_is_timed_equally_often_in_every_size() -> None:
    sizes = make_sizes(200, seed=1)

    times = measure(sizes, 2, seed=1)

    assert times.keys() == OPERATIONS
    for by_size in times.values():
        assert {name: len(series) for name, series in by_size.items()} == dict.fromkeys(SIZES, 2)
    for share, one in zip((0.01, 0.1, 1.0), sizes.values(), strict=True):
        assert one.world.manager.tracker.num_sessions == 200 * share
        assert len(one.wheel.wheel) == 200 * share
        assert len(one.ring.ring) == 200 * share * KEYS_A_SESSION
        one.world.check()


def test_growth_is_reported_for_every_operation(report: Report, tmp_path: Path) -> None:
    measure_growth(report, 200)
    report.finish(lambda line: None)

    result = json.loads((tmp_path / "out.json").read_text())
    assert result["ratios"].keys() == {
        f"{operation}_100_over_{share}" for operation in OPERATIONS for share in (1, 10)
    }
    assert result["counts"]["world_100_percent_keys"] == 200 * KEYS_A_SESSION
    assert result["counts"]["world_100_percent_bytes"] > result["counts"]["world_1_percent_bytes"]
    assert result["counts"]["all_expire_100_percent_us_per_session"] > 0


def test_every_part_weighs_something() -> None:
    by_part = measure_memory(50, KEYS_A_SESSION, seed=1)

    assert by_part["bytes_per_key_name"] > 36  # a hash of 32 bytes and the group
    assert all(size > 0 for size in by_part.values()), by_part


def test_steps_are_reported_over_stock(report: Report, tmp_path: Path) -> None:
    load = Load(SHORT, pool_blocks=800, sessions=20, max_num_seqs=8)

    add_steps(report, write_model(tmp_path), 30, load)

    assert report.ratios.keys() == {f"step_{n}_over_stock" for n in SIDES if n != "stock"}
    assert all(report.counts[f"step_{name}_us"] > 0 for name in SIDES)
