"""Loading or computing: by what was measured, told once, and never for ever."""

import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.metadata import LoadFailure, LoadResult
from connectors.scheduler.reload_choice import SHORTEST_PATIENCE_S, ReloadChoice
from spm.config import SpmConfig
from spm.keys import Rank
from spm.remote_config import BreakerConfig, RemoteConfig
from spm.residency import Tier
from tests.clock import FakeClock
from tracker.ids import BlockHash, GroupId, make_block_key

MiB = 1 << 20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
KEY = make_block_key(BlockHash(bytes(32)), GroupId(0))
CONFIG = SpmConfig(
    load_threads=1,
    batch_bytes=16 * MiB,
    load_deadline_s=10.0,
    remote=RemoteConfig("redis://unused", breaker=BreakerConfig(3, FIRST_PAUSE_S, LONGEST_PAUSE_S)),
)


class Site:
    """An engine that computes 1,000 tokens a second, unless told otherwise."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.tokens_per_s: float | None = 1000.0
        self.choice = ReloadChoice(CONFIG, self._compute_s, self.clock)
        self._jobs = 0

    def _compute_s(self, num_tokens: int) -> float | None:
        return None if self.tokens_per_s is None else num_tokens / self.tokens_per_s

    def load(self, size_bytes: int, seconds: float, rank: int = 0) -> None:
        """A load of one rank, alone."""
        self._jobs += 1
        self.choice.started(self._jobs, size_bytes, 1000)
        result = LoadResult(self._jobs, "r", speeds={Tier.REMOTE: (size_bytes, seconds)})
        self.choice.heard(Rank(rank), result)
        self.choice.ended(self._jobs)

    def favours(self, size_bytes: int = MiB, tokens: int = 1000, *, asks: bool = False) -> bool:
        return self.choice.favours_load(size_bytes, tokens, asks=asks)


@pytest.fixture
def site() -> Site:
    return Site()


def test_what_is_not_known_is_tried(site: Site) -> None:
    assert site.favours()
    site.load(MiB, 100.0)
    site.tokens_per_s = None
    assert site.favours()
    assert not site.choice.skips


@pytest.mark.parametrize(("seconds", "favoured"), [(0.5, True), (1.0, True), (1.004, True)])
def test_loading_is_favoured_unless_it_is_really_slower(
    site: Site, seconds: float, favoured: bool
) -> None:
    site.load(MiB, seconds)
    assert site.favours() is favoured
    site.load(MiB, 3.0)
    assert not site.favours()


def test_a_load_that_takes_no_time_needs_no_second_look(site: Site) -> None:
    assert not site.choice.may_be_slow(MiB, asks=False)
    site.load(MiB, 0.002)
    assert not site.choice.may_be_slow(MiB, asks=False)
    site.load(MiB, 1.0)
    assert site.choice.may_be_slow(MiB, asks=False)


def test_the_slowest_rank_counts(site: Site) -> None:
    site.load(MiB, 0.1, rank=0)
    site.load(MiB, 2.0, rank=1)
    assert not site.favours()


def test_loads_ahead_and_tokens_ahead_count(site: Site) -> None:
    site.load(16 * MiB, 0.4)
    site.choice.started(100, 32 * MiB, 4000)
    assert not site.favours(16 * MiB, 1000), "it would be the third batch"
    assert site.favours(16 * MiB, 1300), "as it would be behind so many tokens"
    site.choice.ended(100)
    assert site.favours(16 * MiB, 1000)


def test_a_slow_lookup_counts_for_what_has_to_be_asked_for(site: Site) -> None:
    """Catches a store whose answers, always just in time, delay every new prompt."""
    site.choice.looked_up(0.2)
    assert site.favours(MiB, 100)
    assert not site.favours(MiB, 100, asks=True)
    site.choice.looked_up(0.001)
    assert site.favours(MiB, 100, asks=True)
    for no_time_s in (float("inf"), -1.0, float("nan")):
        site.choice.looked_up(no_time_s)
    assert site.favours(MiB, 100, asks=True)


def test_it_is_logged_once_when_it_begins_and_once_when_it_ends(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.load(MiB, 5.0)
    with caplog.at_level(logging.INFO):
        for _ in range(10):
            assert not site.favours()
            assert site.favours(MiB, 9000), "a longer hit is worth it"
            assert site.choice.skips
        site.load(MiB, 0.01)
        for _ in range(10):
            assert site.favours()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "1000 tokens in about 5.000 s instead of 1.000 s" in caplog.records[0].message


def test_a_store_about_as_fast_as_computing_does_not_fill_the_log(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(20):
            site.load(MiB, 5.0)
            assert not site.favours()
            site.load(MiB, 0.1)
            assert site.favours()
            site.clock.now_s += 1.0
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_while_it_skips_it_tries_ever_less_often(site: Site) -> None:
    site.load(MiB, 5.0)
    assert not site.favours()
    started_s, tried_s = site.clock.now_s, []
    for _ in range(1000):
        site.clock.now_s += 0.1
        assert not site.favours()
        if site.choice.grant_trial():
            tried_s.append(site.clock.now_s - started_s)
            site.load(MiB, 5.0)
    pauses = [later - sooner for sooner, later in zip([0.0, *tried_s], tried_s, strict=False)]
    expected = [0.5, 1.0, 2.0, 4.0, 8.0, 15.0]
    assert pauses[:6] == pytest.approx(expected, abs=0.11)
    assert max(pauses) <= LONGEST_PAUSE_S + 0.11


def test_what_measures_nothing_is_no_trial(site: Site) -> None:
    """Catches prompts that nobody has stored and that use up every trial, for ever."""
    site.load(MiB, 5.0)
    for _ in range(20):
        assert not site.favours(asks=True)
        site.clock.now_s += FIRST_PAUSE_S
        assert site.choice.grant_trial()
        assert not site.choice.grant_trial(), "one at a time"
        site.choice.looked_up(0.02)
    site.load(9 * MiB, 5.0)
    site.clock.now_s += FIRST_PAUSE_S
    assert not site.favours()
    assert not site.choice.grant_trial(), "a load that measures was one"


def test_a_hit_that_is_known_need_not_wait_for_a_prompt_that_asks(site: Site) -> None:
    site.load(MiB, 5.0)
    assert not site.favours(asks=True)
    site.clock.now_s += FIRST_PAUSE_S
    assert site.choice.grant_trial()
    assert not site.favours(asks=True)
    assert not site.choice.grant_trial()
    assert not site.favours()
    assert site.choice.grant_trial()
    assert not site.favours()
    assert not site.choice.grant_trial(), "that one measures"


@pytest.mark.parametrize("seconds", [1.1, CONFIG.lookup_deadline_s])
def test_a_question_that_took_too_long_was_a_trial(site: Site, seconds: float) -> None:
    """Catches a new prompt twice a second that waits for a slow answer."""
    site.load(MiB, 5.0)
    assert not site.favours(asks=True)
    site.clock.now_s += FIRST_PAUSE_S
    assert site.choice.grant_trial()
    site.choice.looked_up(seconds)
    site.clock.now_s += FIRST_PAUSE_S
    assert not site.favours(asks=True)
    assert not site.choice.grant_trial()


@pytest.mark.parametrize(("waited_s", "favoured"), [(0.0, False), (0.96, True), (math.inf, True)])
def test_waiting_for_its_turn_says_nothing_of_a_loads_speed(
    site: Site, waited_s: float, favoured: bool
) -> None:
    """Catches a store that counts as slow because one block waited behind prefetches."""
    site.load(MiB, 0.01)
    site.choice.started(100, MiB, 1000)
    late = LoadResult(100, "r", failed={KEY: LoadFailure.DEADLINE}, waited_s=waited_s)
    site.choice.heard(Rank(0), late)
    site.choice.ended(100)
    assert site.favours(MiB, 100) is favoured


def test_one_fast_load_is_enough(site: Site) -> None:
    for _ in range(20):
        site.load(MiB, 5.0)
    assert not site.favours()
    site.load(MiB, 0.01)
    assert not site.choice.skips
    assert site.favours()


def test_loads_that_never_end_in_time_are_measured_too(site: Site) -> None:
    """Catches a store so slow that no batch of it ever arrives whole, which looks just worth
    it for ever."""
    for _ in range(10):
        site.load(MiB, 0.01)
    site.choice.started(100, MiB, 1000)
    late = LoadResult(100, "r", failed={KEY: LoadFailure.DEADLINE})
    site.choice.heard(Rank(0), late)
    site.choice.ended(100)
    assert not site.favours(MiB, 1000)


def test_other_failures_say_nothing_of_speed(site: Site) -> None:
    for why in LoadFailure:
        if why is not LoadFailure.DEADLINE:
            site.choice.started(100, MiB, 1)
            site.choice.heard(Rank(0), LoadResult(100, "r", failed={KEY: why}))
            site.choice.ended(100)
    assert not site.choice.may_be_slow(MiB, asks=False)


def test_a_load_gets_as_long_as_computing_takes(site: Site) -> None:
    patience_s = {}
    for job_id, tokens in enumerate((1, 1000, 4000, 1_000_000)):
        site.choice.started(job_id, MiB, tokens)
        patience_s[tokens] = site.choice.patience_of(job_id)
    assert patience_s == {1: SHORTEST_PATIENCE_S, 1000: 1.0, 4000: 4.0, 1_000_000: 10.0}
    site.tokens_per_s = None
    site.choice.started(9, MiB, 1)
    assert site.choice.patience_of(9) == CONFIG.load_deadline_s
    assert site.choice.patience_of(77) == CONFIG.load_deadline_s


def test_a_store_that_was_left_alone_starts_anew(site: Site) -> None:
    site.load(MiB, 5.0)
    site.choice.looked_up(0.25)
    assert not site.favours()
    site.choice.forget()
    assert not site.choice.skips
    assert site.favours(asks=True)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["load", "ask", "wait", "start", "end", "lookup", "forget"]),
            st.integers(1, 64),
            st.floats(0.001, 30.0),
        ),
        max_size=60,
    )
)
def test_whatever_was_measured_a_store_that_is_fast_now_is_used_again(
    steps: list[tuple[str, int, float]],
) -> None:
    site, running = Site(), set()
    for number, (step, size, seconds) in enumerate(steps, 1000):
        if step == "load":
            site.load(size * MiB, seconds)
        elif step == "ask":
            site.favours(size * MiB, 100 * size, asks=size % 2 == 0)
        elif step == "wait":
            site.clock.now_s += seconds
        elif step == "start":
            site.choice.started(number, size * MiB, size)
            running.add(number)
        elif step == "end" and running:
            site.choice.ended(running.pop())
        elif step == "lookup":
            site.choice.looked_up(seconds)
        elif step == "forget":
            site.choice.forget()
    for job_id in running:
        site.choice.ended(job_id)
    if not site.favours(MiB, 1000, asks=True):
        site.clock.now_s += LONGEST_PAUSE_S
        assert site.choice.grant_trial()
        site.choice.looked_up(0.001)
        site.load(MiB, 0.001)
    assert site.favours(MiB, 1000, asks=True)
