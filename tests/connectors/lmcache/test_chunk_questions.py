"""How much of a session is in Redis, asked while LMCache may still be writing it there."""

from collections.abc import Sequence
from typing import cast

import pytest

from connectors.lmcache.chunk_questions import ChunkQuestions
from connectors.scheduler.store_keeper import StoreKeeper
from spm.config import SpmConfig
from spm.manager import SessionAwarePoolingManager
from spm.metrics import Counters
from spm.residency import Tier
from tests.clock import FakeClock
from tracker.ids import BlockKey

KEYS = [BlockKey(bytes([at])) for at in range(4)]
PATIENCE_S = 5.0


class Keeper:
    """Takes questions; the test answers them."""

    def __init__(self) -> None:
        self.accepts = True
        self.open: list[int] = []

    def check(self, number: int, keys: Sequence[BlockKey], deadline_s: float) -> bool:
        self.open += [number] * self.accepts
        return self.accepts


class Site:
    def __init__(self) -> None:
        self.clock, self.keeper = FakeClock(), Keeper()
        self.manager = SessionAwarePoolingManager(SpmConfig(), 1, Counters(), self.clock)
        keeper = cast(StoreKeeper, self.keeper)
        self.questions = ChunkQuestions(keeper, self.manager, PATIENCE_S, self.clock)
        self.told: list[int | None] = []

    def answer(self, *present: int) -> None:
        number = self.keeper.open.pop(0)
        self.questions.checked(number, [at in present for at in range(len(KEYS))])

    def later(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.questions.tick()


@pytest.fixture
def site() -> Site:
    return Site()


def test_all_there_is_told_at_once(site: Site) -> None:
    site.questions.ask(KEYS, site.told.append)
    site.answer(0, 1, 2, 3)

    assert site.told == [4]
    assert not site.questions.pending
    assert site.manager.residency.is_stored(KEYS[3], Tier.REMOTE)


def test_as_long_as_more_arrives_it_is_asked_again(site: Site) -> None:
    site.questions.ask(KEYS, site.told.append)
    site.answer()
    for arrived in range(1, 4):
        assert site.keeper.open == []
        site.later(0.1)
        site.answer(*range(arrived))
    site.later(0.1)
    site.answer(0, 1, 2)  # no more than before

    assert site.told == [3]


def test_what_is_behind_a_hole_does_not_count(site: Site) -> None:
    site.questions.ask(KEYS, site.told.append)
    for _ in range(2):
        site.answer(0, 2, 3)
        site.later(0.1)

    assert site.told == [1]
    assert not site.manager.residency.is_stored(KEYS[1], Tier.REMOTE)
    assert site.manager.residency.is_stored(KEYS[2], Tier.REMOTE)


def test_patience_ends(site: Site) -> None:
    site.questions.ask(KEYS, site.told.append)
    site.answer()
    site.later(PATIENCE_S)
    site.answer(0)

    assert site.told == [1]


def test_no_answer_is_told_as_such(site: Site) -> None:
    site.questions.ask(KEYS, site.told.append)
    site.questions.checked(site.keeper.open.pop(), None)
    site.keeper.accepts = False
    site.questions.ask(KEYS, site.told.append)

    assert site.told == [None, None]
    assert not site.questions.pending


def test_a_withdrawn_question_is_not_answered(site: Site) -> None:
    withdraw = site.questions.ask(KEYS, site.told.append)
    withdraw()
    site.answer(0, 1, 2, 3)
    withdraw()

    assert site.told == []
    assert not site.questions.pending
