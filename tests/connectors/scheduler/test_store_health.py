"""What both sides of an engine know of the store, and for how long that is believed."""

import pytest

from connectors.scheduler.store_health import StoreHealth
from spm.breaker import BreakerState
from spm.keys import Rank
from tests.clock import FakeClock

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
BELIEVED_S = 15.0


class Site:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.own = CLOSED
        self.health = StoreHealth(lambda: self.own, BELIEVED_S, self.clock)

    def shown(self) -> tuple[str, str, str]:
        status = self.health.status()
        sides = status["breakers"]
        return status["breaker"], sides["scheduler"], sides["worker"]


@pytest.fixture
def site() -> Site:
    return Site()


def test_it_is_usable_while_all_are_closed(site: Site) -> None:
    assert site.health.usable
    for state in (OPEN, HALF_OPEN):
        site.own = state
        assert not site.health.usable
    site.own = CLOSED
    site.health.heard(Rank(1), OPEN)
    assert not site.health.usable
    site.health.heard(Rank(0), CLOSED)
    assert not site.health.usable, "another rank's news"
    site.health.heard(Rank(1), CLOSED)
    assert site.health.usable


@pytest.mark.parametrize(
    ("own", "ranks", "shown"),
    [
        (CLOSED, (), ("closed", "closed", "closed")),
        (OPEN, (), ("open", "open", "closed")),
        (HALF_OPEN, (CLOSED, OPEN), ("open", "half_open", "open")),
        (CLOSED, (HALF_OPEN, CLOSED), ("half_open", "closed", "half_open")),
    ],
)
def test_the_worst_is_shown_and_each_side(
    site: Site,
    own: BreakerState,
    ranks: tuple[BreakerState, ...],
    shown: tuple[str, str, str],
) -> None:
    site.own = own
    for rank, state in enumerate(ranks):
        site.health.heard(Rank(rank), state)
    assert site.shown() == shown
    gauges = site.health.gauges()
    for side, name in zip(("scheduler", "worker"), shown[1:], strict=True):
        ones = [key for key, value in gauges.items() if value and f"|{side}," in key]
        assert ones == [f"spm:breaker_state|{side},{name}"]


def test_old_news_of_an_engine_that_was_idle_keep_nobody_from_the_store(site: Site) -> None:
    """Catches a store that is back and not used by the first turn after a pause."""
    site.health.heard(Rank(0), OPEN)
    site.clock.now_s += BELIEVED_S
    assert not site.health.usable
    site.clock.now_s += 0.1
    assert site.health.usable
    assert site.shown() == ("closed", "closed", "closed")
    site.health.heard(Rank(0), OPEN)
    assert not site.health.usable


def test_the_sizes_change_when_a_gauge_does(site: Site) -> None:
    seen = {site.health.sizes(): site.health.gauges()}
    for own in BreakerState:
        for worker in BreakerState:
            site.own = own
            site.health.heard(Rank(0), worker)
            gauges = seen.setdefault(site.health.sizes(), site.health.gauges())
            assert gauges == site.health.gauges()
    assert len(seen) == 9
