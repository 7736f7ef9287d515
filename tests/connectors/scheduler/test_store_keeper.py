"""StoreKeeper: what it asks the store, in which order, and what it says about the answers."""

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from connectors.scheduler.keeper_news import MAX_SEEN_BATCHES, DocumentRead, KeysChecked
from connectors.scheduler.keeper_queues import MAX_DELETES, MAX_DOCUMENTS, MAX_EVENTS, MAX_QUESTIONS
from connectors.scheduler.keeper_worker import BATCH_KEYS
from connectors.stores.base import StoreCapabilities, StoreCapacity, StoreKey
from spm.breaker import BreakerState
from spm.config import SpmConfig
from spm.errors import StoreRefusedError, StoreUnavailableError
from spm.events import KeysGone, KeysSeen
from spm.keys import Fingerprint, KeySpace
from tests.connectors.scheduler.keeper_rig import LATER_S, Rig, block, blocks, numbers_of, settings
from tests.connectors.scheduler.scripted_store import ALL, PATIENCE_S, Call, Gate

OTHER = KeySpace("test", Fingerprint(b"o" * 16))
DOCUMENT = StoreKey("document")
MakeRig = Callable[..., Rig]


@pytest.fixture
def make() -> Iterator[MakeRig]:
    rigs: list[Rig] = []

    def make_rig(
        config: SpmConfig | None = None,
        capabilities: StoreCapabilities = ALL,
        world_size: int = 1,
    ) -> Rig:
        rigs.append(Rig(config, capabilities, world_size))
        return rigs[-1]

    yield make_rig
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(make: MakeRig) -> Rig:
    return make()


# --- keep-alive ---------------------------------------------------------------------------


def test_held_keys_are_touched_once_an_interval_until_dropped(rig: Rig) -> None:
    rig.keeper.hold(rig.stored(1, 2), LATER_S)
    rig.after(0.0)
    for _ in range(3):
        rig.after(10.0, steps=20)
        assert sorted(rig.touched()) == sorted(rig.names(1, 2))
    rig.keeper.drop(blocks(1))
    rig.after(20.0, steps=20)
    assert set(rig.touched()) == set(rig.names(2))


def test_the_worker_does_not_sleep_past_a_new_key(rig: Rig) -> None:
    rig.keeper.hold(rig.stored(1), LATER_S)
    rig.after(10.0)
    rig.after(0.0)
    last_s = rig.keeper._state.looks_again_s
    assert last_s > rig.clock.now_s + 1, "there is one key"
    rig.keeper.hold(rig.stored(*range(2, 500)), LATER_S)
    rig.settle()
    assert rig.keeper._state.looks_again_s < rig.clock.now_s + 0.5


def test_a_key_is_held_until_its_time_has_passed(rig: Rig) -> None:
    rig.keeper.hold(rig.stored(1), rig.clock.now_s + 15)
    rig.after(12.0, steps=12)
    assert rig.touched() == rig.names(1)
    rig.after(20.0, steps=20)
    assert rig.touched() == []
    assert rig.keeper.status()["keys"] == 0


def test_a_value_lives_at_least_as_long_as_its_key_is_protected(make: MakeRig) -> None:
    rig = make(settings(ttl_s=90))
    rig.keeper.hold(rig.stored(1), rig.clock.now_s + 1000)
    rig.keeper.hold(rig.stored(2), float("inf"))
    rig.after(0.0)
    rig.after(10.0, steps=10)
    lives = {call.names: call.detail for call in rig.calls("touch")}
    ((life_s,), (longest_s,)) = lives[tuple(rig.names(1))], lives[tuple(rig.names(2))]
    assert 989 <= life_s <= 1000
    assert longest_s == 30 * 86_400


@pytest.mark.parametrize(("ttl_s", "interval_s"), [(0, 10.0), (600, 10.0), (9, 3.0)])
def test_nothing_expires_between_two_touches(make: MakeRig, ttl_s: int, interval_s: float) -> None:
    assert make(settings(ttl_s=ttl_s)).keeper.status()["interval_s"] == interval_s


def test_a_block_is_seen_when_every_rank_has_it_and_gone_when_one_has_not(make: MakeRig) -> None:
    rig = make(world_size=2)
    rig.keeper.hold(rig.stored(1, 2, 3), LATER_S)
    rig.store.present.discard(rig.names(2)[1])
    rig.store.unanswered.add(rig.names(3)[0])
    rig.after(0.0)
    rig.after(10.0)
    news = rig.news()
    assert [numbers_of(one.keys) for one in news if isinstance(one, KeysSeen)] == [[1]]
    assert [numbers_of(one.keys) for one in news if isinstance(one, KeysGone)] == [[2]]
    assert rig.counted() == {
        "spm:keep_alive_keys|touched": 1,
        "spm:keep_alive_keys|gone": 1,
        "spm:keep_alive_keys|failed": 1,
    }
    rig.after(10.0)
    assert set(rig.names(1, 2, 3)) == set(rig.touched()), "gone keys are still the owner's to drop"


def test_touches_go_in_batches_at_a_capped_rate(make: MakeRig) -> None:
    rig = make(settings(max_keys_per_s=1000), world_size=2)
    rig.keeper.hold(rig.stored(*range(6000)), LATER_S)
    rig.after(0.0)
    rig.calls()
    rig.after(30.0, steps=600)
    batches = [len(call.names) for call in rig.calls("touch")]
    assert max(batches) <= BATCH_KEYS
    assert 28_000 <= sum(batches) <= 30_000 + BATCH_KEYS
    status = rig.keeper.status()
    assert status["keys"] == 6000
    assert status["behind_s"] == pytest.approx(2.0, abs=1.0), "12,000 values take 12 seconds"
    assert status["keys_per_s"] == pytest.approx(1000, rel=0.1)
    assert rig.keeper.gauges()["spm:keep_alive_held|"] == 6000


def test_a_store_that_cannot_touch_keeps_nothing_alive(make: MakeRig) -> None:
    rig = make(capabilities=StoreCapabilities(True, delete=True, touch=False, exact_ttl=False))
    assert not rig.keeper.keep_alive_supported
    assert rig.keeper.hold(rig.stored(1), LATER_S) == 0
    rig.after(50.0, steps=5)
    assert rig.calls() == []
    assert rig.keeper.check(1, blocks(1, 2), LATER_S)
    assert rig.news() == [KeysChecked(1, (True, False))]
    assert [call.method for call in rig.calls()] == ["contains"]


def test_no_more_keys_than_allowed_are_held(make: MakeRig) -> None:
    rig = make(settings(max_keys=2))
    assert rig.keeper.hold(blocks(1, 2, 3), LATER_S) == 2
    assert rig.keeper.status()["keys"] == 2


def test_an_idle_engines_news_stays_bounded(rig: Rig) -> None:
    gone = rig.stored(*range(1000))
    rig.keeper.hold(gone, LATER_S)
    rig.keeper.hold(rig.stored(*range(1000, 3000)), LATER_S)
    rig.store.present.difference_update(rig.names(*range(1000)))
    rig.after(0.0)
    rig.after(100.0, steps=200)
    news = rig.news()
    assert sum(isinstance(one, KeysSeen) for one in news) == MAX_SEEN_BATCHES
    missed = [key for one in news if isinstance(one, KeysGone) for key in one.keys]
    assert sorted(missed) == sorted(gone), "each once"
    assert min(one.asked_s for one in news if isinstance(one, KeysGone)) > rig.clock.now_s - 11


def test_a_gone_key_that_came_back_is_not_reported(rig: Rig) -> None:
    rig.keeper.hold(blocks(1), LATER_S)
    rig.after(0.0)
    rig.after(10.0)
    rig.stored(1)
    rig.after(10.0)
    assert [type(one) for one in rig.news()] == [KeysSeen]


# --- questions ----------------------------------------------------------------------------


def test_a_check_touches_and_is_answered_once(make: MakeRig) -> None:
    rig = make(world_size=2)
    rig.stored(1, 2, 3)
    rig.store.present.discard(rig.names(2)[1])
    assert rig.keeper.check(7, blocks(1, 2, 3, 4), rig.clock.now_s + 5)
    assert rig.news() == [KeysChecked(7, (True, False, True, False))]
    assert [call.method for call in rig.calls()] == ["touch"]
    assert rig.store.deadlines_s == [rig.clock.now_s + 5]
    assert rig.told == 1
    assert rig.news() == []


def test_a_large_check_goes_in_batches(rig: Rig) -> None:
    rig.stored(*range(0, 2000, 2))
    assert rig.keeper.check(1, blocks(*range(2000)), LATER_S)
    assert rig.news() == [KeysChecked(1, (True, False) * 1000)]
    assert [len(call.names) for call in rig.calls()] == [512, 512, 512, 464]


def test_a_check_does_not_shorten_a_life(rig: Rig) -> None:
    rig.keeper.hold(rig.stored(1), rig.clock.now_s + 500)
    rig.keeper.check(1, blocks(1, 2), LATER_S)
    assert [call.detail for call in rig.calls("touch")] == [(500, 0)]


def test_a_check_that_finds_a_key_takes_back_that_it_is_gone(rig: Rig) -> None:
    rig.keeper.hold(blocks(1, 2), LATER_S)
    rig.after(0.0)
    rig.after(10.0)
    rig.keeper.check(1, rig.stored(1), LATER_S)
    answer, gone = rig.news()
    assert isinstance(answer, KeysChecked)
    assert isinstance(gone, KeysGone)
    assert numbers_of(gone.keys) == [2]


def test_a_partly_answered_check_is_no_answer(rig: Rig) -> None:
    rig.store.unanswered.update(rig.names(2))
    rig.keeper.check(1, rig.stored(1, 2), LATER_S)
    assert rig.news() == [KeysChecked(1, None)]


def test_documents_are_read(rig: Rig) -> None:
    rig.store.documents[DOCUMENT] = b"content"
    assert rig.keeper.read_document(1, DOCUMENT, 100, LATER_S)
    assert rig.keeper.read_document(2, StoreKey("other"), 100, LATER_S)
    assert rig.news() == [DocumentRead(1, b"content"), DocumentRead(2, None)]
    assert rig.calls() == [Call("get", (DOCUMENT,), 100), Call("get", (StoreKey("other"),), 100)]
    assert rig.told == 2


def test_questions_that_waited_too_long_never_reach_the_store(rig: Rig) -> None:
    rig.keeper.check(1, blocks(1), rig.clock.now_s)
    rig.keeper.read_document(2, DOCUMENT, 100, rig.clock.now_s)
    assert rig.news() == [KeysChecked(1, None), DocumentRead(2, None)]
    assert rig.calls() == []
    assert rig.counted() == {"spm:keeper_dropped|check": 1, "spm:keeper_dropped|document": 1}


def test_a_question_is_answered_even_if_something_unexpected_happens(rig: Rig) -> None:
    def fail(call: Call) -> None:
        raise RuntimeError("a bug")

    rig.store.before = fail
    rig.keeper.check(1, blocks(1), LATER_S)
    assert rig.news() == [KeysChecked(1, None)]
    assert rig.told == 1
    rig.store.before = lambda call: None
    rig.keeper.check(2, rig.stored(1), LATER_S)
    assert rig.news() == [KeysChecked(2, (True,))], "the thread lives on"
    assert rig.counted() == {"spm:internal_errors|keeper": 1}


def test_questions_are_bounded_also_by_answers_nobody_reads(rig: Rig) -> None:
    gate = rig.hold_up()
    asked = [rig.keeper.check(n, blocks(n), LATER_S) for n in range(MAX_QUESTIONS + 1)]
    assert asked == [True] * MAX_QUESTIONS + [False]
    gate.opened.set()
    rig.settle()
    assert not rig.keeper.read_document(1, DOCUMENT, 1, LATER_S)
    assert len(rig.news()) == MAX_QUESTIONS + 1
    assert rig.keeper.read_document(1, DOCUMENT, 1, LATER_S)
    assert rig.counted() == {"spm:keeper_dropped|check": 1, "spm:keeper_dropped|document": 1}


# --- deletes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grace_s", "can", "expected"),
    [
        (60, {"delete": True, "exact_ttl": True}, ("expire", 60)),
        (5, {"delete": True, "exact_ttl": True}, ("expire", 20)),  # two intervals at least
        (0, {"delete": True, "exact_ttl": True}, ("delete", None)),
        (60, {"delete": True, "exact_ttl": False}, ("delete", None)),
        (60, {"delete": False, "exact_ttl": True}, ("expire", 60)),
        (0, {"delete": False, "exact_ttl": True}, None),
        (60, {"delete": False, "exact_ttl": False}, None),
    ],
)
def test_deletes_are_as_gentle_as_the_store_allows(
    make: MakeRig, grace_s: int, can: dict[str, bool], expected: tuple[str, object] | None
) -> None:
    capabilities = StoreCapabilities(remote=True, touch=True, **can)
    rig = make(settings(delete_grace_s=grace_s), capabilities, world_size=2)
    rig.stored(1)
    assert rig.keeper.delete(blocks(1, 2)) == (2 if expected else 0)
    if expected:
        method, detail = expected
        assert rig.calls() == [Call(method, tuple(rig.names(1, 2)), detail)]
        assert rig.counted() == {"spm:store_deleted_keys|": 2}
    else:
        assert rig.calls() == []
        assert rig.counted() == {"spm:keeper_dropped|delete": 2}


def test_a_key_held_again_before_its_turn_is_not_deleted(rig: Rig) -> None:
    gate = rig.hold_up()
    rig.keeper.delete(blocks(1, 2, 3))
    rig.keeper.hold(blocks(2), LATER_S)
    rig.keeper.drop(blocks(2))
    gate.opened.set()
    (call,) = rig.calls("expire")
    assert call.names == tuple(rig.names(1, 3))


def test_a_key_still_held_is_not_deleted(rig: Rig) -> None:
    rig.keeper.hold(blocks(1), LATER_S)
    rig.keeper.hold(blocks(2), rig.clock.now_s - 1)
    rig.keeper.delete(blocks(1, 2))
    (call,) = rig.calls("expire")
    assert call.names == tuple(rig.names(2))


def test_deletes_are_bounded_and_go_at_the_capped_rate(make: MakeRig) -> None:
    rig = make(settings(max_keys_per_s=1000))
    gate = rig.hold_up()
    assert rig.keeper.delete(blocks(*range(MAX_DELETES + 1))) == MAX_DELETES
    gate.opened.set()
    rig.after(3.0, steps=60)
    sizes = [len(call.names) for call in rig.calls("expire")]
    assert max(sizes) <= BATCH_KEYS
    assert 2400 <= sum(sizes) <= 3000 + BATCH_KEYS


# --- documents and events -----------------------------------------------------------------


def test_the_newest_document_of_a_name_wins(rig: Rig) -> None:
    gate = rig.hold_up()
    for version in range(3):
        rig.keeper.write_document(DOCUMENT, b"%d" % version, 100 + version)
    rig.keeper.write_document(StoreKey("other"), b"", 1)
    gate.opened.set()
    assert sorted(rig.calls(), key=lambda call: call.names) == [
        Call("put", (DOCUMENT,), (b"2", 102)),
        Call("put", (StoreKey("other"),), (b"", 1)),
    ]
    assert rig.counted() == {}


def test_documents_over_the_bound_are_dropped_oldest_first(rig: Rig) -> None:
    gate = rig.hold_up()
    for number in range(MAX_DOCUMENTS + 2):
        rig.keeper.write_document(StoreKey(str(number)), b"", 1)
    rig.keeper.write_document(StoreKey("large"), bytes(65 << 20), 1)
    gate.opened.set()
    assert rig.calls() == [], "the large one alone is too much"
    assert rig.counted() == {"spm:keeper_dropped|document": MAX_DOCUMENTS + 3}


def test_a_document_the_store_refuses_is_dropped(rig: Rig) -> None:
    rig.store.refuses_writes = True
    rig.keeper.write_document(DOCUMENT, b"", 1)
    assert len(rig.calls()) == 1
    assert rig.counted() == {"spm:keeper_dropped|document": 1}


def test_a_document_that_failed_is_written_later_unless_there_is_a_newer_one(rig: Rig) -> None:
    rig.store.failure = StoreUnavailableError("down")
    rig.keeper.write_document(DOCUMENT, b"old", 1)
    rig.keeper.write_document(StoreKey("other"), b"", 1)
    rig.settle()
    rig.keeper.write_document(DOCUMENT, b"new", 1)
    rig.store.failure = None
    rig.calls()
    rig.after(8.0)
    assert {call.names[0]: call.detail for call in rig.calls()} == {
        DOCUMENT: (b"new", 1),
        StoreKey("other"): (b"", 1),
    }


def test_a_document_that_failed_does_not_replace_one_written_meanwhile(rig: Rig) -> None:
    def fail_after_a_newer_one(call: Call) -> None:
        rig.store.before = lambda call: None
        rig.keeper.write_document(DOCUMENT, b"new", 1)
        raise StoreUnavailableError("down")

    rig.store.before = fail_after_a_newer_one
    rig.keeper.write_document(DOCUMENT, b"old", 1)
    assert [call.detail[0] for call in rig.calls("put")] == [b"old", b"new"]


def test_events_are_appended_in_order_and_in_batches(rig: Rig) -> None:
    gate = rig.hold_up()
    events = [b"%d" % number for number in range(1000)]
    for at in range(0, 1000, 10):
        rig.keeper.publish(events[at : at + 10])
    gate.opened.set()
    calls = rig.calls()
    assert [call.method for call in calls] == ["append", "append"]
    assert [entry for call in calls for entry in call.detail[0]] == events
    assert {(call.names, call.detail[1]) for call in calls} == {(("events",), 1000)}


def test_events_over_the_bound_are_dropped_oldest_first(rig: Rig) -> None:
    gate = rig.hold_up()
    rig.keeper.publish([b"%d" % number for number in range(MAX_EVENTS + 5)])
    gate.opened.set()
    calls = rig.calls()
    assert calls[0].detail[0][0] == b"5"
    assert rig.counted() == {"spm:keeper_dropped|event": 5}


def test_events_the_store_does_not_take_are_counted(rig: Rig) -> None:
    rig.store.refuses_writes = True
    rig.keeper.publish([b"1", b"2"])
    rig.settle()
    rig.store.failure = StoreUnavailableError("down")
    rig.keeper.publish([b"3"])
    assert rig.counted() == {"spm:keeper_dropped|event": 3}


def test_without_documents_or_a_stream_nothing_is_written(make: MakeRig) -> None:
    rig = make(capabilities=StoreCapabilities(True, delete=True, touch=True, exact_ttl=True))
    rig.keeper.write_document(DOCUMENT, b"", 1)
    rig.keeper.publish([b"event"])
    assert rig.calls() == []
    assert rig.counted() == {"spm:keeper_dropped|document": 1}


# --- how full the store is ----------------------------------------------------------------


SAYS = replace(ALL, capacity=True)


def fullness(rig: Rig) -> tuple[float | None, float | None]:
    status = rig.keeper.status()
    return status["used_bytes"], status["limit_bytes"]


def test_the_store_is_asked_how_full_it_is_once_an_interval(make: MakeRig) -> None:
    rig = make(capabilities=SAYS)
    assert len(rig.calls("capacity")) == 1, "at the start"
    rig.store.fullness = StoreCapacity(5, 8)
    rig.after(9.5, steps=19)
    assert rig.calls() == []
    rig.after(30.5, steps=61)
    assert len(rig.calls("capacity")) == 4
    assert rig.store.deadlines_s[-1] <= rig.clock.now_s + SpmConfig().batch_deadline_s
    assert fullness(rig) == (5, 8)
    gauges = rig.keeper.gauges()
    assert (gauges["spm:remote_used_bytes|"], gauges["spm:remote_limit_bytes|"]) == (5, 8)


def test_a_store_that_does_not_say_is_not_asked(rig: Rig) -> None:
    rig.store.fullness = StoreCapacity(5, 8)
    rig.after(50.0, steps=50)
    assert rig.calls() == []
    assert fullness(rig) == (None, None)
    gauges = rig.keeper.gauges()
    assert (gauges["spm:remote_used_bytes|"], gauges["spm:remote_limit_bytes|"]) == (0, 0)


def test_what_a_store_said_last_holds_until_it_says_something_else(make: MakeRig) -> None:
    rig = make(capabilities=SAYS)
    rig.store.fullness = StoreCapacity(5, None)
    rig.after(10.0)
    assert fullness(rig) == (5, None)
    rig.store.failure = StoreUnavailableError("down")
    rig.after(20.0, steps=2)
    assert fullness(rig) == (5, None)
    assert rig.keeper.breaker_state is BreakerState.OPEN, "failures count as anywhere"
    rig.store.failure = None
    rig.store.fullness = None
    rig.after(20.0, steps=40)
    assert fullness(rig) == (None, None), "the breaker has let it be asked again"


def test_nobody_looks_how_full_a_store_is_while_keys_are_due(make: MakeRig) -> None:
    rig = make(settings(max_keys_per_s=1000), SAYS)
    rig.keeper.hold(rig.stored(*range(20_000)), LATER_S)
    rig.after(0.0)
    rig.calls()
    rig.after(60.0, steps=1200)
    assert {call.method for call in rig.calls()} == {"touch"}, "it is behind all the time"
    rig.keeper.drop(blocks(*range(20_000)))
    rig.after(1.0)
    assert [call.method for call in rig.calls()] == ["capacity"]


# --- order --------------------------------------------------------------------------------


def test_the_classes_of_work_are_in_strict_order(make: MakeRig) -> None:
    rig = make(capabilities=SAYS)
    rig.keeper.hold(rig.stored(1), LATER_S)
    rig.after(0.0)
    gate = rig.hold_up()
    rig.keeper.delete(blocks(2))
    rig.clock.now_s += 10.0  # the held key is due
    rig.keeper.publish([b"event"])
    rig.keeper.write_document(DOCUMENT, b"", 1)
    rig.keeper.check(1, blocks(3), LATER_S)
    rig.keeper.read_document(2, DOCUMENT, 1, LATER_S)
    gate.opened.set()
    rig.after(0.1, steps=3)
    methods = [call.method for call in rig.calls()]
    assert methods == ["touch", "get", "put", "append", "touch", "expire", "capacity"]


def test_a_question_waits_for_no_more_than_the_call_under_way(rig: Rig) -> None:
    rig.keeper.hold(rig.stored(*range(3000)), LATER_S)
    rig.after(0.0)
    rig.calls()
    gate = rig.store.gate = Gate()
    with rig.keeper._state.condition:
        rig.clock.now_s += 10.0
        rig.keeper._state.wake()
    assert gate.entered.wait(PATIENCE_S)
    rig.keeper.read_document(1, DOCUMENT, 1, LATER_S)
    gate.opened.set()
    rig.after(0.1, steps=3)
    assert [call.method for call in rig.calls()][:3] == ["touch", "get", "touch"]


# --- a store that fails -------------------------------------------------------------------


def test_a_failing_store_is_left_alone_and_caught_up_with_later(rig: Rig) -> None:
    rig.keeper.hold(rig.stored(*range(100)), LATER_S)
    rig.after(0.0)
    rig.store.failure = StoreUnavailableError("down")
    rig.after(3.0, steps=3)
    assert len(rig.calls()) == 2, "two failures open the breaker"
    assert rig.keeper.breaker_state is BreakerState.OPEN
    assert rig.keeper._state.looks_again_s > rig.clock.now_s, "not busy asking the breaker"
    failed = rig.counted()["spm:keep_alive_keys|failed"]
    assert 0 < failed < 60
    assert rig.keeper.delete(blocks(1000)) == 1
    rig.keeper.check(1, blocks(1), LATER_S)
    rig.keeper.read_document(2, DOCUMENT, 1, LATER_S)
    assert rig.news() == [KeysChecked(1, None), DocumentRead(2, None)]
    assert rig.calls() == []
    rig.store.failure = None
    rig.after(20.0, steps=40)
    assert set(rig.touched()) == set(rig.names(*range(100)))
    assert rig.keeper.status()["behind_s"] == 0


def test_while_the_store_is_left_alone_keys_are_late_not_skipped(rig: Rig) -> None:
    rig.keeper.hold(rig.stored(1), LATER_S)
    rig.after(0.0)
    rig.after(10.0)
    rig.calls()
    rig.breaker.trip()
    rig.after(15.0, steps=30)  # it lets a probe through after four seconds
    assert rig.touched() == rig.names(1)


def test_a_store_that_refuses_to_write_goes_on_being_asked(rig: Rig) -> None:
    """Catches lookups that stop because a replica does not let values be kept alive."""
    rig.store.failure = StoreRefusedError("read only")
    rig.keeper.hold(rig.stored(1), LATER_S)
    rig.keeper.write_document(DOCUMENT, b"content", 10)
    rig.after(20.0, steps=40)
    assert rig.breaker.state is BreakerState.CLOSED
    assert 5 < len(rig.calls()) <= 41, "not without a pause"


def test_a_store_that_hangs_until_the_deadline_is_left_alone(rig: Rig) -> None:
    def hang(call: Call) -> None:
        rig.clock.now_s = rig.store.deadlines_s[-1]

    rig.store.before = hang
    rig.stored(1)
    for number in range(3):
        rig.keeper.check(number, blocks(1), rig.clock.now_s + 1)
        rig.settle()
    assert [one.present for one in rig.news() if isinstance(one, KeysChecked)] == [
        (True,),
        (True,),
        None,
    ]
    assert len(rig.calls()) == 2


def test_background_calls_end_at_a_deadline_of_their_own(rig: Rig) -> None:
    rig.keeper.delete(blocks(1))
    rig.settle()
    assert rig.store.deadlines_s == [rig.clock.now_s + SpmConfig().batch_deadline_s]


def test_deletes_that_failed_are_left_to_expire(rig: Rig) -> None:
    rig.store.failure = StoreUnavailableError("down")
    rig.keeper.delete(blocks(1, 2))
    assert rig.counted() == {"spm:keeper_dropped|delete": 2}
    assert len(rig.calls()) == 1


def test_an_evicting_store_shows_in_the_news(rig: Rig) -> None:
    rig.keeper.hold(rig.stored(*range(50)), LATER_S)
    rig.after(0.0)
    rig.store.present.difference_update(rig.names(*range(0, 50, 5)))
    rig.after(10.0, steps=10)
    news = rig.news()
    gone = [key for one in news if isinstance(one, KeysGone) for key in one.keys]
    assert numbers_of(gone) == list(range(0, 50, 5))
    seen = [key for one in news if isinstance(one, KeysSeen) for key in one.keys]
    assert numbers_of(seen) == [n for n in range(50) if n % 5]


def test_whatever_happens_every_question_is_answered_once(rig: Rig) -> None:
    """Both threads at full speed; the store fails now and then, and the names change."""
    rng = random.Random(1)

    def misbehave(call: Call) -> None:
        if rng.random() < 0.05:
            raise rng.choice([StoreUnavailableError("down"), RuntimeError("a bug")])

    rig.store.before = misbehave
    asked: list[int] = []
    answered: list[int] = []
    for number in range(3000):
        some = blocks(*rng.sample(range(200), 20))
        rig.keeper.hold(some, rig.clock.now_s + rng.uniform(-1, 30))
        rig.keeper.drop(some[:5])
        rig.keeper.delete(some[3:8])
        rig.keeper.publish([b"event"])
        rig.keeper.write_document(StoreKey(str(number % 7)), b"", 1)
        if rig.keeper.check(number, some, rig.clock.now_s + rng.uniform(0, 3)):
            asked.append(number)
        if number % 500 == 0:
            rig.keeper.use(OTHER)
        rig.clock.now_s += rng.uniform(0, 0.2)
        answered += [one.number for one in rig.keeper.poll() if isinstance(one, KeysChecked)]
    rig.keeper.close()
    answered += [one.number for one in rig.keeper.poll() if isinstance(one, KeysChecked)]
    assert sorted(answered) == asked
    assert len(asked) > 1000


# --- names and the end --------------------------------------------------------------------


def test_another_key_space_clears_what_had_the_old_names(rig: Rig) -> None:
    rig.keeper.hold(rig.stored(1), LATER_S)
    rig.keeper.hold(blocks(2), LATER_S)
    rig.after(0.0)
    rig.after(10.0)
    rig.store.documents[StoreKey("gate")] = b"of the old names"
    gate = rig.hold_up()
    rig.keeper.check(1, blocks(1), LATER_S)
    rig.keeper.delete(blocks(3))
    rig.keeper.write_document(DOCUMENT, b"", 1)
    rig.keeper.use(OTHER)
    rig.keeper.hold(blocks(4), LATER_S)
    gate.opened.set()
    assert rig.news() == [KeysChecked(1, None), DocumentRead(-1, None)], "seen and gone are void"
    assert rig.calls() == []
    rig.after(20.0, steps=20)
    assert set(rig.touched()) == {*rig.names(4, space=OTHER)}


def test_answers_of_the_old_key_space_are_dropped(rig: Rig) -> None:
    rig.keeper.hold(rig.stored(1), LATER_S)
    rig.after(0.0)
    gate = rig.store.gate = Gate()
    with rig.keeper._state.condition:
        rig.clock.now_s += 10.0
        rig.keeper._state.wake()
    assert gate.entered.wait(PATIENCE_S)
    rig.keeper.use(OTHER)
    gate.opened.set()
    assert rig.news() == []
    assert rig.counted() == {"spm:keep_alive_keys|touched": 1}


def test_without_names_no_keys_are_taken(rig: Rig) -> None:
    rig.keeper.use(None)
    assert rig.keeper.hold(blocks(1), LATER_S) == 0
    assert not rig.keeper.check(1, blocks(1), LATER_S)
    assert rig.keeper.delete(blocks(1)) == 0
    assert rig.keeper.read_document(2, DOCUMENT, 1, LATER_S)
    assert rig.news() == [DocumentRead(2, None)]


def test_closing_waits_for_the_call_under_way_and_answers_the_rest(rig: Rig) -> None:
    gate = rig.hold_up()
    rig.keeper.check(1, blocks(1), LATER_S)
    rig.keeper.hold(blocks(1), LATER_S)
    closer = threading.Thread(target=rig.keeper.close)
    closer.start()
    assert rig.store.closed == 0
    gate.opened.set()
    closer.join(PATIENCE_S)
    assert rig.store.closed == 1
    rig.keeper.close()
    answers = rig.keeper.poll()
    assert {type(one) for one in answers} == {KeysChecked, DocumentRead}
    assert len(answers) == 2
    assert not rig.keeper.check(2, blocks(1), LATER_S)
    assert rig.keeper.hold([block(1)], LATER_S) == 0
    assert rig.keeper.delete([block(1)]) == 0
    rig.keeper.write_document(DOCUMENT, b"", 1)
    rig.keeper.publish([b"event"])
    assert rig.keeper.poll() == []
