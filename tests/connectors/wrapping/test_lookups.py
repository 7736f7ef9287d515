"""Questions on behalf of stand-ins: hooks in vLLM's order, once, and an end on every way out."""

from collections import Counter

import pytest

from connectors.wrapping.envelope import STAND_IN
from connectors.wrapping.lookups import AT_A_TIME
from spm.metrics import Metric, metric_key
from tests.connectors.wrapping.conftest import Build
from tests.connectors.wrapping.memory_connector import Memory
from tests.connectors.wrapping.site import Site
from tests.spm.sam.kit import ref_of

PROMPT = list(range(3, 44))
FAILED = metric_key(Metric.INTERNAL_ERRORS, "wrapped")


def with_session(build: Build, memory: Memory | None = None, **how: object) -> Site:
    site = build(memory or Memory(), **how)
    site.turn("first", PROMPT, session="s")
    return site


def ends_told(site: Site) -> set[int]:
    """How often workers were told of each stand-in's end, by rank."""
    return set(Counter(site.memory.ended).values())


@pytest.mark.fault("F26", breaks="a question to another connector's lookup is never ended")
def test_a_stand_in_is_asked_and_ended_once_on_every_rank(build: Build) -> None:
    site = with_session(build, world_size=2)
    site.memory.lookup_steps = lambda: 3
    operation = site.edit("s", "offload")
    assert site.connector.has_pending_push_work(), "an idle engine has to step"
    site.run()
    assert site.result(operation)["status"] == "ok"
    asked = [name for name, _ in site.memory.lookups if name.startswith(STAND_IN)]
    assert len(asked) == 1
    assert sorted(site.memory.ended) == [(0, asked[0]), (1, asked[0])]


def test_without_anything_to_ask_a_step_has_no_orders(build: Build) -> None:
    site = with_session(build)
    assert all(not one.fills and not one.ended for one in site.orders)
    assert not site.memory.ended
    assert all(not name.startswith(STAND_IN) for name, _ in site.memory.lookups)


def test_a_connector_that_never_answers(build: Build) -> None:
    site = with_session(build)
    site.memory.lookup_steps = lambda: -1
    operation = site.edit("s", "offload")
    site.step()
    assert site.result(operation)["status"] == "accepted"
    site.now_s += 10.0
    site.run()
    result = site.result(operation)
    assert (result["status"], result["done_blocks"]) == ("failed", 0)
    assert "could not say" in result["detail"]
    assert ends_told(site) == {1}


@pytest.mark.parametrize("how", ["end", "reset"])
def test_what_nobody_waits_for_any_more_is_ended_when_it_is_late(build: Build, how: str) -> None:
    site = with_session(build)
    site.memory.lookup_steps = lambda: -1
    operation = site.edit("s", "offload")
    site.step()
    if how == "end":
        site.manage("end_session", session_id="s", operation_id="end")
    else:
        site.reset()
    assert site.result(operation)["status"] == "failed"
    assert site.connector.has_pending_push_work(), "the connector is to hear of it"
    site.step()
    assert ends_told(site) == set(), "the connector might have to be waited for"
    site.now_s += 11  # later than load_deadline_s
    site.run(limit=5)
    assert ends_told(site) == {1}


@pytest.mark.parametrize("hook", ["on_new_request", "ask", "allocate", "finish"])
def test_what_a_connector_raises_for_a_stand_in_ends_no_engine(
    build: Build, hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    site = with_session(build)
    site.memory.raises_in = hook
    operation = site.edit("s", "offload")
    site.run()
    assert site.result(operation)["status"] == ("ok" if hook == "finish" else "failed")
    assert ends_told(site) == {1}, "ended all the same"
    assert site.counters.drain()[FAILED] == 1
    assert caplog.text.count("raised when it was asked for a session") == 1
    result = site.done("s", "prefetch")
    assert result["status"] == "unsupported"
    assert "failed when it was asked" in result["detail"]
    offers = site.manage("status")["engine"]["capabilities"]
    assert not offers["offload"]
    assert not offers["prefetch"]
    site.turn("second", [*PROMPT, 50], session="s")
    assert caplog.text.count("raised when it was asked for a session") == 1


def test_only_a_few_are_asked_at_once(build: Build) -> None:
    site = build(Memory())
    names = [f"s{at}" for at in range(AT_A_TIME + 2)]
    for at, name in enumerate(names):
        site.turn(name, [60 + at] * 9, session=name)
    site.memory.lookup_steps = lambda: 2
    operations = [site.edit(name, "offload") for name in names]
    site.step()
    assert site.half._stand_ins.num_open == AT_A_TIME
    site.run()
    assert {site.result(one)["status"] for one in operations} == {"ok"}


@pytest.mark.fault("F26", breaks="it is ended twice")
def test_a_stand_in_ends_once_whoever_ends_it(build: Build) -> None:
    site = with_session(build)
    chain = site.half._chains.get(ref_of("s"))
    assert chain is not None
    stand_in = site.half._stand_ins.new(chain, 2)
    assert stand_in.finish()
    assert not stand_in.finish(), "the connector is not told again"
    assert site.half._stand_ins.take_ended() == [stand_in.id]
    assert site.half._stand_ins.take_ended() == []


def test_at_the_end_of_the_engine_all_are_ended(build: Build) -> None:
    site = with_session(build)
    site.memory.lookup_steps = lambda: -1
    site.edit("s", "offload")
    site.step()
    assert site.half._stand_ins.num_open == 1
    site.half.shutdown()
    assert site.half._stand_ins.num_open == 0
    assert not site.inner.records
