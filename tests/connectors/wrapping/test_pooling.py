"""What applications get of a wrapped connector: no more than is there, and said in words."""

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.connectors.scheduler.vllm_parts import HYBRID
from tests.connectors.wrapping.conftest import Build
from tests.connectors.wrapping.memory_connector import Memory
from tests.connectors.wrapping.site import Site
from tests.spm.sam.kit import ref_of

PROMPT = list(range(3, 44))
BLOCKS = 11


def with_session(build: Build, memory: Memory | None = None, **how: Any) -> Site:  # noqa: ANN401
    site = build(memory or Memory(), **how)
    site.next_prompt = site.turn("first", PROMPT, session="s")
    return site


def test_what_is_offered_and_what_is_not(build: Build) -> None:
    site = with_session(build)
    engine = site.manage("status")["engine"]
    offers = {name for name, has in engine["capabilities"].items() if has}
    assert offers == {"offload", "prefetch", "evict", "release", "query_residency"}
    assert engine["tiers"]["remote"]["kind"] == "MemoryConnector"
    assert engine["keep_alive"] is None
    to_host = site.done("s", "prefetch", target="host")
    assert to_host["status"] == "unsupported"
    assert "only be asked to load into the GPU pool" in to_host["detail"]


def test_several_groups_cannot_be_filled_ahead(build: Build) -> None:
    site = with_session(build, Memory(saves=False), model=HYBRID)
    assert site.done("s", "prefetch")["status"] == "unsupported"
    assert site.done("s", "offload")["status"] == "failed"
    residency = site.session("s")["residency"]
    assert residency["gpu"] > 0, "as the claims on the pool have it"
    assert residency["remote"] == 0


def test_an_offload_gives_up_what_is_stored_and_nothing_else(build: Build) -> None:
    site = with_session(build, Memory(chunk_blocks=4))
    site.manage("apply", hint={"session_id": "s", "cache_control": {"ttl": 900}}, operation_id="k")
    result = site.done("s", "offload")
    assert (result["status"], result["blocks"], result["done_blocks"]) == ("partial", BLOCKS, 8)
    assert result["detail"] == "the connector has not stored the rest"
    assert site.half.gauges()["spm:sam_protected_blocks|"] == BLOCKS - 8
    residency = site.session("s")["residency"]
    assert (residency["gpu"], residency["remote"]) == (BLOCKS, 8)


def test_a_whole_offload(build: Build) -> None:
    site = with_session(build)
    result = site.done("s", "offload")
    assert (result["status"], result["done_blocks"]) == ("ok", BLOCKS)
    assert site.session("s")["class"] == "demoted"
    inside = site.done("s", "offload", block_start=2, block_end=40)
    assert (inside["status"], inside["done_blocks"]) == ("partial", BLOCKS - 2)
    assert inside["detail"] == f"the session has {BLOCKS} logical blocks"
    assert site.done("s", "offload", block_start=20, block_end=40)["status"] == "not_found"
    assert site.done("nobody", "offload")["status"] == "not_found"


def test_saves_that_are_under_way_are_waited_for(build: Build) -> None:
    site = build(Memory(save_steps=lambda: 25, delays_free=False))
    site.add("first", PROMPT, session="s")
    while "first" not in site.ended:
        site.step()
    operation = site.edit("s", "offload")
    site.step()
    site.step()
    assert site.result(operation)["status"] == "accepted", "there is nothing yet"
    site.run()
    assert site.result(operation)["status"] == "ok"


def test_nothing_stored_nothing_given_up(build: Build) -> None:
    site = with_session(build, Memory(saves=False))
    site.manage("apply", hint={"session_id": "s", "cache_control": {"ttl": 900}}, operation_id="k")
    result = site.done("s", "offload")
    assert (result["status"], result["detail"]) == (
        "failed",
        "the connector has stored nothing of it",
    )
    assert site.half.gauges()["spm:sam_protected_blocks|"] == BLOCKS


def test_a_session_in_use_keeps_its_blocks(build: Build) -> None:
    site = with_session(build)
    site.manage("apply", hint={"session_id": "s", "cache_control": {"ttl": 900}}, operation_id="k")
    site.memory.lookup_steps = lambda: 3
    operation = site.edit("s", "offload")
    site.step()
    site.add("second", site.next_prompt, session="s")
    site.run()
    assert site.result(operation)["status"] == "ok"
    assert "in use again" in site.result(operation)["detail"]
    assert site.half.gauges()["spm:sam_protected_blocks|"] >= BLOCKS


def test_an_evicted_range_and_what_lies_behind_are_forgotten(build: Build) -> None:
    site = with_session(build)
    evicted = site.done("s", "evict", block_start=4, block_end=6)
    assert (evicted["status"], evicted["blocks"]) == ("ok", 2)
    assert site.half.wrapped.logical_blocks(ref_of("s")) == 4
    assert site.done("s", "evict")["status"] == "ok"
    assert site.half.wrapped.logical_blocks(ref_of("s")) == 0
    nothing = site.done("s", "prefetch")
    assert nothing["status"] == "not_found"
    assert "no full block" in nothing["detail"]
    assert site.memory.values, "stored values are not ours to delete"


def test_what_is_known_has_an_age_and_ends_with_the_path(build: Build) -> None:
    site = with_session(build)
    assert site.session("s")["residency"]["remote"] == 0, "nobody has asked"
    site.done("s", "offload")
    site.now_s += 5.0
    residency = site.session("s")["residency"]
    assert residency["remote"] == BLOCKS
    assert residency["age_s"] == pytest.approx(5.0, abs=0.5)
    site.turn("elsewhere", [*PROMPT[:9], 99, *PROMPT[10:]], session="s")
    assert site.session("s")["residency"]["remote"] == 0
    site.reset()
    assert site.session("s")["residency"]["remote"] == 0


def test_a_request_that_is_kept_out_leaves_no_chain(build: Build) -> None:
    site = build(Memory())
    site.add("salted", PROMPT, session="s", cache_salt="tenant")
    while "salted" not in site.ended:
        site.step()
    site.forget_gpu()
    result = site.done("s", "prefetch")
    assert result["status"] == "not_found"
    assert "salts" in result["detail"]


def test_a_request_that_never_got_its_blocks_leaves_no_chain(build: Build) -> None:
    site = with_session(build)
    site.forget_gpu()
    site.memory.load_steps = lambda: 6
    request = site.add("second", site.next_prompt, session="t")
    while request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
        site.step()
    site.abort("second")
    assert site.half._chains.get(ref_of("t")) is None
    site.run()


def test_an_aborted_one_leaves_what_it_computed(build: Build) -> None:
    site = build(Memory(), step_tokens=16)
    site.add("first", PROMPT, session="s")
    site.step()
    site.step()
    site.abort("first")
    chain = site.half._chains.get(ref_of("s"))
    assert chain is not None
    assert 4 <= len(chain) <= 8
    assert chain.tokens.tolist() == PROMPT[: len(chain.tokens)]
    site.run()


def test_a_response_says_where_its_prompt_came_from(build: Build) -> None:
    site = with_session(build)
    site.forget_gpu()
    site.turn("others", PROMPT[:18])
    site.turn("second", site.next_prompt, session="s")
    told = site.params["second"]["spm"]
    names = ("prompt_tokens", "gpu_tokens", "remote_tokens", "computed_tokens")
    assert [told[name] for name in names] == [45, 16, 28, 1]
    assert site.params["second"]["memory"] == 1, "beside what the connector says"


def test_what_did_not_arrive_is_not_counted(build: Build) -> None:
    site = with_session(build)
    site.forget_gpu()
    chain = site.half._chains.get(ref_of("s"))
    assert chain is not None
    lost = bytes(chain.keys[6])[:-4]
    site.memory.fails = lambda rank, name: "block" if name == lost else ""
    site.turn("second", site.next_prompt, session="s")
    assert site.params["second"]["spm"]["remote_tokens"] == 24


def test_a_sleeping_engine_begins_nothing(build: Build) -> None:
    site = with_session(build)
    hint = {"session_id": "s", "context_management": {"edits": [{"type": "prefetch"}]}}
    request = {"v": 1, "op": "apply", "tenant": "default", "hint": hint, "operation_id": "op"}
    answer = site.connector.manage(request, asleep=True)
    assert isinstance(answer, dict)
    assert answer["status"] == "rejected"
    assert not site.connector.has_pending_push_work()


def test_there_are_not_too_many_at_a_time(build: Build) -> None:
    site = with_session(build, extra={"max_operations": 2})
    site.memory.lookup_steps = lambda: 2
    operations = [site.edit("s", "offload") for _ in range(3)]
    assert [site.result(one)["status"] for one in operations] == ["accepted"] * 2 + ["rejected"]
    assert [one["type"] for one in site.session("s")["operations"]] == ["offload"] * 2
    site.run()
    assert site.done("s", "offload")["status"] == "ok"


def test_edits_of_a_request_act_when_it_ends(build: Build) -> None:
    site = build(Memory())
    hint = {"context_management": {"edits": [{"type": "offload"}]}}
    site.turn("first", PROMPT, session="s", hint=hint)
    assert site.params["first"]["spm"]["edits"][0]["status"] == "accepted"
    assert site.session("s")["class"] == "demoted"


def lookups_of(site: Site) -> int:
    return len(site.memory.lookups)


def test_sessions_are_kept_alive_by_asking(build: Build) -> None:
    site = build(Memory(), lookup_refreshes=True, extra={"keep_alive": {"interval_s": 5.0}})
    site.turn("first", PROMPT, session="s")
    site.turn("second", PROMPT[::-1], session="t")
    assert site.manage("status")["engine"]["capabilities"]["touch"]
    before = lookups_of(site)
    site.turn("others", [50] * 9)
    assert lookups_of(site) == before + 1, "they were used just now"
    site.now_s += 6.0
    site.turn("more", [51] * 9, max_tokens=12)
    assert lookups_of(site) == before + 4
    assert site.session("s")["residency"]["remote"] == BLOCKS
    site.now_s += 1000.0
    site.turn("late", [52] * 9, max_tokens=12)
    site.turn("later", [53] * 9, max_tokens=12)
    assert lookups_of(site) == before + 6, "nobody wants them any more"
    assert site.manage("status")["engine"]["keep_alive"]["keys"] == 0


def test_an_idle_engine_is_not_kept_stepping_for_it(build: Build) -> None:
    site = build(Memory(), lookup_refreshes=True, extra={"keep_alive": {"interval_s": 5.0}})
    site.turn("first", PROMPT, session="s")
    site.now_s += 100.0
    assert not site.connector.has_pending_push_work()


def test_gauges_fall_back_to_nothing(build: Build) -> None:
    site = with_session(build)
    site.forget_gpu()
    site.memory.load_steps = lambda: 2
    site.edit("s", "prefetch")
    seen = set()
    while not site.is_idle:
        site.step()
        seen.add((gauges := site.half.gauges())["spm:loads_in_flight|"])
        assert gauges.keys() >= site.half.changed_gauges().keys()
    site.half.changed_gauges()
    assert seen == {0, 1}
    assert site.half.gauges()["spm:operations|"] == 0
