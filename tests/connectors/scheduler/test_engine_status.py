"""What an engine says about the store behind it."""

from typing import Any

from spm.residency import Tier
from tests.connectors.scheduler.scenarios import Build, parts
from tests.connectors.scheduler.simulated_worker import Conditions

full = parts("full")


def status_of(build: Build, tier: Tier) -> dict[str, Any]:
    engine = build(conditions=Conditions(tier))
    engine.add("turn", list(range(3, 64)), session="s")
    engine.run()
    status = engine.manage("status")["engine"]
    assert isinstance(status, dict)
    return status


@full
def test_how_full_the_store_is_is_told_with_the_store(build: Build) -> None:
    status = status_of(build, Tier.REMOTE)
    remote = status["tiers"]["remote"]
    assert remote["used_bytes"] > 0
    assert remote["limit_bytes"] is None
    assert status["keep_alive"].keys() == {"keys", "interval_s", "behind_s", "keys_per_s"}
    assert status["capabilities"]["residency"]
    assert status["capabilities"]["capacity"]


@full
def test_without_a_store_nothing_is_told_or_offered_about_one(build: Build) -> None:
    status = status_of(build, Tier.HOST)
    assert (status["tiers"]["remote"], status["keep_alive"]) == (None, None)
    assert not status["capabilities"]["residency"]
    assert not status["capabilities"]["capacity"]
