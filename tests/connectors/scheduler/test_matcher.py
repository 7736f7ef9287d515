"""HitMatcher with scripted lookups: ask, wait a bounded time, answer from memory."""

from collections.abc import Sequence

import pytest

from connectors.scheduler.lookup import LookupAnswer, LookupQuery, LookupService
from connectors.scheduler.matcher import HitMatcher
from connectors.scheduler.records import RequestRecord
from spm.events import BlocksConfirmed, HostChanged
from spm.keys import Rank
from spm.metrics import Counters
from tests.clock import FakeClock
from tests.connectors.scheduler.kit import (
    KEY_SPACE,
    geometry_of,
    keys_of,
    manager_of,
    record_of,
)
from tests.connectors.scheduler.vllm_parts import FULL, HYBRID, UNEVEN, Attention

ASK_AGAIN = (None, False)
NOTHING = (0, False)
DEADLINE_S = 0.25


class ScriptedLookups(LookupService):
    def __init__(self) -> None:
        self.accepts = True
        self.queries: list[LookupQuery] = []
        self.answers: list[LookupAnswer] = []
        self.closed = False

    def submit(self, query: LookupQuery) -> bool:
        self.queries.append(query)
        return self.accepts

    def poll(self) -> Sequence[LookupAnswer]:
        answers, self.answers = self.answers, []
        return answers

    def close(self) -> None:
        self.closed = True


class Rig:
    """A matcher for requests of 33 tokens: eight full blocks and one token."""

    def __init__(self, world_size: int = 1, *, remote: bool = True) -> None:
        self.geometry = geometry_of(FULL)
        self.clock = FakeClock()
        self.counters = Counters()
        self.lookups = ScriptedLookups()
        self.manager = manager_of(self.counters, self.clock, world_size)
        self.matcher = HitMatcher(
            self.geometry,
            self.manager,
            self.lookups if remote else None,
            DEADLINE_S,
            world_size,
            self.counters,
            self.clock,
        )
        self.records: dict[str, RequestRecord] = {}

    def arrive(self, name: str, num_tokens: int = 33) -> RequestRecord:
        self.records[name] = record_of(self.geometry, name, num_tokens)
        return self.records[name]

    def ask(self, record: RequestRecord, local_tokens: int = 0) -> tuple[int | None, bool]:
        self.matcher.take_answers(self.records)
        return self.matcher.match(record, local_tokens, KEY_SPACE)

    def answer(self, query: LookupQuery, present: int | None) -> None:
        """The first ``present`` blocks are there; ``None``: no answer."""
        found = tuple(index < present for index in range(len(query.keys))) if present else None
        self.lookups.answers.append(LookupAnswer(query, found))


def test_asks_waits_and_answers_from_what_was_found() -> None:
    rig = Rig()
    record = rig.arrive("r")
    assert rig.ask(record) == ASK_AGAIN
    assert rig.ask(record) == ASK_AGAIN
    [query] = rig.lookups.queries
    assert list(query.keys) == keys_of(rig.geometry, record.request)
    assert query.deadline_s == rig.clock.now_s + DEADLINE_S
    rig.answer(query, present=5)
    assert rig.ask(record) == (20, True)
    assert record.hit is not None
    assert list(record.hit.keys[rig.geometry.groups[0].group]) == [0, 1, 2, 3, 4]
    assert rig.ask(record) == (20, True)
    assert len(rig.lookups.queries) == 1


@pytest.mark.parametrize("num_tokens", range(1, 14))
def test_at_least_one_token_is_left_to_compute(num_tokens: int) -> None:
    rig = Rig(remote=False)
    record = rig.arrive("r", num_tokens)
    rig.manager.handle(BlocksConfirmed(keys_of(rig.geometry, record.request)))
    external = rig.ask(record)[0]
    assert external == (num_tokens - 1) // 4 * 4
    assert external < num_tokens


def test_after_the_deadline_what_is_known_is_all_there_is() -> None:
    rig = Rig()
    record = rig.arrive("r")
    keys = keys_of(rig.geometry, record.request)
    rig.manager.handle(BlocksConfirmed(keys[:3]))
    assert rig.ask(record) == ASK_AGAIN
    assert rig.lookups.queries[0].keys == tuple(keys[3:])
    rig.clock.now_s += DEADLINE_S * 0.99
    assert rig.ask(record) == ASK_AGAIN
    rig.clock.now_s += DEADLINE_S * 0.02
    assert rig.ask(record) == (12, True)
    rig.answer(rig.lookups.queries[0], present=8)  # too late
    assert rig.ask(record) == (12, True)
    assert len(rig.lookups.queries) == 1
    assert rig.counters.drain() == {"spm:lookups|late": 1}


def test_after_the_deadline_with_nothing_known_nothing_is_offered() -> None:
    rig = Rig()
    record = rig.arrive("r")
    assert rig.ask(record) == ASK_AGAIN
    rig.clock.now_s += DEADLINE_S
    assert rig.ask(record) == NOTHING
    assert record.hit is None


def test_a_store_that_cannot_say_is_not_asked_a_second_time() -> None:
    rig = Rig()
    record = rig.arrive("r")
    assert rig.ask(record) == ASK_AGAIN
    rig.answer(rig.lookups.queries[0], present=None)
    assert rig.ask(record) == NOTHING
    assert rig.ask(record) == NOTHING
    assert len(rig.lookups.queries) == 1


def test_a_refused_query_costs_no_step_and_is_not_repeated() -> None:
    rig = Rig()
    rig.lookups.accepts = False
    record = rig.arrive("r")
    assert rig.ask(record) == NOTHING
    assert rig.ask(record) == NOTHING
    assert len(rig.lookups.queries) == 1


def test_answers_for_finished_requests_are_dropped() -> None:
    rig = Rig()
    assert rig.ask(rig.arrive("gone")) == ASK_AGAIN
    del rig.records["gone"]
    rig.answer(rig.lookups.queries[0], present=8)
    rig.matcher.take_answers(rig.records)
    assert rig.manager.residency.num_remote_keys == 0


def test_an_answer_to_an_earlier_request_of_the_same_name_is_dropped() -> None:
    rig = Rig()
    assert rig.ask(rig.arrive("twice")) == ASK_AGAIN
    again = rig.arrive("twice")
    assert rig.ask(again) == ASK_AGAIN
    first, second = rig.lookups.queries
    rig.answer(first, present=8)
    assert rig.ask(again) == ASK_AGAIN
    rig.answer(second, present=2)
    assert rig.ask(again) == (8, True)


def test_what_was_found_missing_is_forgotten() -> None:
    rig = Rig()
    record = rig.arrive("r")
    keys = keys_of(rig.geometry, record.request)
    rig.manager.handle(BlocksConfirmed(keys))
    rig.clock.now_s += 301.0  # too old to be believed
    assert rig.ask(record) == ASK_AGAIN
    rig.answer(rig.lookups.queries[0], present=6)
    assert rig.ask(record) == (24, True)
    assert rig.manager.residency.num_remote_keys == 6


@pytest.mark.parametrize("reason", ["refused", "loading", "all local"])
def test_no_question_when_nothing_could_be_loaded(reason: str) -> None:
    rig = Rig()
    record = rig.arrive("r")
    rig.manager.handle(BlocksConfirmed(keys_of(rig.geometry, record.request)))
    record.external_refused = reason == "refused"
    record.job_id = 1 if reason == "loading" else None
    assert rig.ask(record, 32 if reason == "all local" else 0) == NOTHING
    assert rig.lookups.queries == []
    assert record.hit is None


def test_ranks_that_disagree_count_as_absent() -> None:
    rig = Rig(world_size=2, remote=False)
    record = rig.arrive("r")
    keys = keys_of(rig.geometry, record.request)
    rig.manager.handle(HostChanged(Rank(0), dict.fromkeys(keys, True)))
    rig.manager.handle(HostChanged(Rank(1), dict.fromkeys(keys[:3] + keys[4:], True)))
    assert rig.ask(record) == (12, True)


def test_every_rank_is_asked_for_every_block() -> None:
    rig = Rig(world_size=2)
    record = rig.arrive("r")
    rig.ask(record)
    [query] = rig.lookups.queries
    expected = [tuple(KEY_SPACE.store_key(k, Rank(r)) for r in (0, 1)) for k in query.keys]
    assert list(query.names) == expected


@pytest.mark.parametrize("model", [FULL, HYBRID, UNEVEN])
def test_only_blocks_beyond_the_local_hit_are_asked_for(model: tuple[Attention, ...]) -> None:
    rig = Rig()
    rig.geometry = geometry_of(model)
    rig.matcher = HitMatcher(
        rig.geometry, rig.manager, rig.lookups, DEADLINE_S, 1, rig.counters, rig.clock
    )
    record = rig.arrive("r")
    assert rig.ask(record, 16) == ASK_AGAIN
    [query] = rig.lookups.queries
    local = {
        key
        for group, part in enumerate(model)
        for key in keys_of(rig.geometry, record.request, group)[: 16 // part.block_tokens]
    }
    assert query.keys
    assert not local & set(query.keys)


def test_closing_closes_the_lookups() -> None:
    rig = Rig()
    rig.matcher.close()
    assert rig.lookups.closed
    Rig(remote=False).matcher.close()
