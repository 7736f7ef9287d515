"""Connectors that answer late, in parts or twice: nothing is asked for ever, no block is lost,
and a question is not broken off, as that may have to be waited for."""

from typing import Any

import pytest

from connectors.wrapping.envelope import STAND_IN
from connectors.wrapping.traits import traits_of
from spm.wrap_config import WrapConfig
from tests.connectors.wrapping.conftest import Build
from tests.connectors.wrapping.memory_connector import Memory, MemoryConnector, Move
from tests.connectors.wrapping.test_fills import PROMPT, stored, until_loading


def test_an_offer_of_less_than_a_block_ends_the_prefetch(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = stored(build)

    def ask(self: MemoryConnector, request: Any, local: int) -> tuple[int, bool]:  # noqa: ANN401
        self._heard(request, "ask", "new", "asked", "allocated").stage = "asked"
        self.records[request.request_id].local_tokens = local
        return (2, True) if local == 0 else (0, False)

    def allocate(self: MemoryConnector, request: Any, blocks: Any, tokens: int) -> None:  # noqa: ANN401
        record = self._heard(request, "allocate", "asked", "allocated")
        record.stage = "allocated"
        if tokens:
            record.loading = True
            self._planned.append(Move(request.request_id, [], [], 0))

    monkeypatch.setattr(MemoryConnector, "get_num_new_matched_tokens", ask)
    monkeypatch.setattr(MemoryConnector, "update_state_after_alloc", allocate)
    operation = site.edit("s", "prefetch")
    site.run()
    assert site.result(operation)["status"] == "not_found"


def test_an_idle_engine_looks_for_a_late_load(build: Build) -> None:
    site = stored(build, Memory(load_steps=lambda: 20))
    site.edit("s", "prefetch")
    until_loading(site)
    site.now_s += 11  # later than load_deadline_s
    site.run()
    assert site.scheduler.reset_prefix_cache()


def test_a_load_that_was_given_up_frees_its_blocks_when_it_is_over(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM frees an aborted request's blocks then; nobody need say that they were sent."""
    site = stored(build, Memory(load_steps=lambda: 20))
    finished = MemoryConnector.request_finished_all_groups

    def finish(self: MemoryConnector, request: Any, block_ids: Any) -> tuple[bool, Any]:  # noqa: ANN401
        return True, finished(self, request, block_ids)[1]

    monkeypatch.setattr(MemoryConnector, "request_finished_all_groups", finish)
    site.edit("s", "prefetch")
    until_loading(site)
    site.now_s += 3600
    site.add("other", [500 + at for at in range(20)], max_tokens=100)
    for _ in range(60):
        site.step()
    assert not site.half._fills.busy
    assert not site.half._fills.num_blocks


def test_a_question_nobody_wants_answered_is_not_broken_off(build: Build) -> None:
    site = stored(build, Memory(lookup_steps=lambda: 5))
    site.edit("s", "prefetch")
    site.step()
    site.add("second", site.next_prompt, session="s")
    for _ in range(3):
        site.step()
        assert site.half._stand_ins.num_open, "it was ended before there was an answer"
    site.run()
    assert site.half._stand_ins.num_open == 0
    assert any(name.startswith(STAND_IN) for name, _ in site.inner.memory.lookups)


def test_a_connector_whose_lookups_pin_is_not_asked() -> None:
    assert traits_of(WrapConfig("LMCacheConnectorV1")).lookups_pin
    children = {"connectors": [{"kv_connector": "LMCacheConnectorV1"}]}
    assert traits_of(WrapConfig("MultiConnector", "", children)).lookups_pin
    assert not traits_of(WrapConfig("LMCacheMPConnector")).lookups_pin


def test_what_would_have_to_be_asked_is_unsupported(build: Build) -> None:
    site = build(Memory())
    parts = site.half.wrapped._parts
    object.__setattr__(parts, "lookups_pin", True)
    site.turn("first", PROMPT, session="s")
    for edit in ("offload", "prefetch"):
        answer = site.result(site.edit("s", edit))
        assert answer["status"] == "unsupported"
    capabilities = site.half.wrapped.capabilities
    assert not capabilities.offload
    assert not capabilities.prefetch
