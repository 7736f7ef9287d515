"""HitMatcher with scripted lookups: ask, wait a bounded time, answer from memory."""

import math
from collections.abc import Sequence

import pytest

from connectors.metadata import LoadResult
from connectors.scheduler.lookup import LookupAnswer, LookupQuery, LookupService
from connectors.scheduler.matcher import HitMatcher
from connectors.scheduler.records import RequestRecord
from connectors.scheduler.reload_choice import ReloadChoice
from connectors.scheduler.store_health import StoreHealth
from spm.breaker import BreakerState
from spm.config import SpmConfig
from spm.events import BlocksConfirmed, HostChanged
from spm.keys import Rank
from spm.metrics import Counters
from spm.remote_config import RemoteConfig
from spm.residency import Tier
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
BLOCK_BYTES = 1 << 20
CONFIG = SpmConfig(remote=RemoteConfig("redis://unused"))


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

    def __init__(self, world_size: int = 1, *, remote: bool = True, computes: bool = False) -> None:
        """``computes``: 100 tokens a second, so that a slow store is known for one."""
        self.geometry = geometry_of(FULL)
        self.clock = FakeClock()
        self.counters = Counters()
        self.lookups = ScriptedLookups()
        self.manager = manager_of(self.counters, self.clock, world_size)
        self.own = BreakerState.CLOSED
        self.health = StoreHealth(lambda: self.own, 15.0, self.clock)
        per_token_s = 0.01 if computes else math.inf
        self.choice = ReloadChoice(CONFIG, lambda tokens: tokens * per_token_s, self.clock)
        self.matcher = HitMatcher(
            self.geometry,
            self.manager,
            self.lookups if remote else None,
            DEADLINE_S,
            world_size,
            self.counters,
            self.clock,
            self.health if remote else None,
            self.choice if remote else None,
            lambda key: BLOCK_BYTES,
        )
        self.records: dict[str, RequestRecord] = {}

    def arrive(self, name: str, num_tokens: int = 33) -> RequestRecord:
        self.records[name] = record_of(self.geometry, name, num_tokens)
        return self.records[name]

    def ask(self, record: RequestRecord, local_tokens: int = 0) -> tuple[int | None, bool]:
        self.matcher.take_answers(self.records)
        return self.matcher.match(record, local_tokens, KEY_SPACE)

    def know(self, record: RequestRecord, near: int, far: int) -> None:
        """The first blocks are in the host tier, and so many after them in the remote store."""
        keys = keys_of(self.geometry, record.request)
        self.manager.handle(HostChanged(Rank(0), dict.fromkeys(keys[:near], True)))
        self.manager.handle(BlocksConfirmed(keys[near : near + far]))

    def measure(self, seconds: float, blocks: int = 1) -> None:
        """A load of so many blocks took so long."""
        size_bytes = blocks * BLOCK_BYTES
        result = LoadResult(1, None, speeds={Tier.REMOTE: (size_bytes, seconds)})
        self.choice.heard(Rank(0), result)

    def skipped(self) -> dict[str, float]:
        counted = self.counters.drain()
        return {k.split("|")[1]: n for k, n in counted.items() if "remote_skipped" in k}

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
@pytest.mark.fault("F29", breaks="what is in the GPU pool is fetched again")
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


def test_an_answer_that_nobody_gave_by_the_deadline_was_waited_for() -> None:
    """Catches a store that always misses the deadline, and counts as fast because that is
    told in the very step in which it passes."""
    rig = Rig(computes=True)
    assert rig.ask(rig.arrive("r")) == ASK_AGAIN
    rig.clock.now_s += DEADLINE_S
    rig.answer(rig.lookups.queries[0], present=None)
    assert rig.ask(rig.records["r"]) == NOTHING
    assert not rig.choice.favours_load(BLOCK_BYTES, 1, asks=True)
    assert rig.choice.favours_load(BLOCK_BYTES, 1, asks=False)


# --- a store that is left alone ---------------------------------------------------------


def leave_alone(rig: Rig, side: str) -> None:
    if side == "scheduler":
        rig.own = BreakerState.OPEN
    elif side == "scheduler probes":
        rig.own = BreakerState.HALF_OPEN
    else:
        rig.health.heard(Rank(0), BreakerState.OPEN)


@pytest.mark.parametrize("side", ["scheduler", "scheduler probes", "worker"])
def test_while_the_store_is_left_alone_requests_neither_ask_nor_load(side: str) -> None:
    """Catches a request that waits for what only a probe should find out, and one that plans
    a load from what is remembered of a store that does not answer."""
    rig = Rig()
    leave_alone(rig, side)
    cold = rig.arrive("cold")
    assert rig.ask(cold) == NOTHING
    known, mixed = rig.arrive("known", 29), rig.arrive("mixed", 33)
    rig.know(known, near=0, far=7)
    assert rig.ask(known) == NOTHING
    rig.know(mixed, near=3, far=5)
    for _ in range(3):
        assert rig.ask(mixed) == (12, True), "what is in the host tier is loaded"
    assert rig.lookups.queries == []
    assert rig.skipped() == {"breaker": 3}


def test_a_request_that_waits_for_an_answer_stops_when_the_store_is_given_up() -> None:
    rig = Rig()
    record = rig.arrive("r")
    rig.know(record, near=2, far=0)
    assert rig.ask(record) == ASK_AGAIN
    rig.own = BreakerState.OPEN
    assert rig.ask(record) == (8, True)
    rig.answer(rig.lookups.queries[0], present=6)
    assert rig.ask(record) == (8, True), "nobody waits for it any more"


def test_a_store_that_is_back_is_asked_and_loaded_from() -> None:
    rig = Rig()
    record = rig.arrive("r")
    rig.know(record, near=1, far=7)
    rig.health.heard(Rank(0), BreakerState.OPEN)
    assert rig.ask(record) == (4, True)
    rig.health.heard(Rank(0), BreakerState.CLOSED)
    assert rig.ask(record) == (32, True)
    assert rig.ask(rig.arrive("cold", 200)) == ASK_AGAIN


# --- a store that is slow ---------------------------------------------------------------


@pytest.mark.fault("F7", breaks="what is computed faster than loaded is loaded all the same")
def test_what_is_computed_faster_than_loaded_is_not_loaded() -> None:
    """Catches a time to first token that is worse with the store than without."""
    rig = Rig(computes=True)
    record = rig.arrive("r")
    rig.know(record, near=3, far=5)
    assert rig.ask(record) == (32, True), "nothing is known yet"
    rig.measure(0.1, blocks=5)
    assert rig.ask(record) == (32, True), "computing 20 tokens takes 0.2 s"
    for _ in range(10):
        rig.measure(1.0, blocks=5)
        assert rig.ask(record) == (12, True)
    assert rig.skipped() == {"slow": 1}


def test_a_prompt_computed_faster_than_the_store_answers_is_not_asked_about() -> None:
    rig = Rig(computes=True)
    rig.choice.looked_up(0.24)
    short, long = rig.arrive("short", 21), rig.arrive("long", 33)
    assert rig.ask(short) == NOTHING
    assert rig.ask(long) == ASK_AGAIN
    assert [query.request_id for query in rig.lookups.queries] == ["long"]


def test_answers_and_waits_in_vain_are_measured() -> None:
    rig = Rig(computes=True)
    record = rig.arrive("late")
    assert rig.ask(record) == ASK_AGAIN
    rig.clock.now_s += DEADLINE_S
    assert rig.ask(record) == NOTHING
    assert rig.ask(rig.arrive("short", 21)) == NOTHING
    assert len(rig.lookups.queries) == 1
    rig.clock.now_s += 0.5
    tries = rig.arrive("tries", 21)
    assert rig.ask(tries) == ASK_AGAIN, "one is sent to see"
    query = rig.lookups.queries[-1]
    rig.lookups.answers.append(LookupAnswer(query, (False,) * 5, query.asked_s + 0.001))
    assert rig.ask(tries) == NOTHING
    assert rig.ask(rig.arrive("next", 21)) == ASK_AGAIN


def test_now_and_then_one_request_tries_and_keeps_its_word() -> None:
    rig = Rig(computes=True)
    first, second = rig.arrive("first", 33), rig.arrive("second", 33)
    rig.know(first, near=0, far=8)
    rig.measure(5.0, blocks=8)
    assert rig.ask(first) == NOTHING
    rig.clock.now_s += CONFIG.remote.breaker.backoff_s if CONFIG.remote else 0.0
    assert rig.ask(first) == (32, True)
    assert rig.ask(second) == NOTHING
    assert rig.ask(first) == (32, True), "asked again because no blocks were free"
    rig.measure(0.01, blocks=8)
    assert rig.ask(second) == (32, True)


def test_closing_closes_the_lookups() -> None:
    rig = Rig()
    rig.matcher.close()
    assert rig.lookups.closed
    Rig(remote=False).matcher.close()
