"""Prefetches over a wrapped connector: small, of the gap only, behind everything else, and
nothing that is not what it should be on every rank is ever published."""

from typing import Any

import pytest

from connectors.wrapping.envelope import FillCommand
from tests.connectors.wrapping.conftest import Build
from tests.connectors.wrapping.memory_connector import Memory, Move
from tests.connectors.wrapping.site import Site

PROMPT = list(range(3, 44))
BLOCKS = 11
"""Full blocks of the prompt and its answer."""
OTHER = [100 + at for at in range(41)]


def stored(build: Build, memory: Memory | None = None, **how: Any) -> Site:  # noqa: ANN401
    """A session's blocks are with the connector, and no longer in the GPU pool."""
    site = build(memory or Memory(), **how)
    site.next_prompt = site.turn("first", PROMPT, session="s")
    site.forget_gpu()
    return site


def fills(site: Site) -> list[FillCommand]:
    return [fill for orders in site.orders for fill in orders.fills]


def until_loading(site: Site) -> None:
    for _ in range(50):
        if site.half._fills.is_loading:
            return
        site.step()
    raise AssertionError("no fill began")


def test_a_resumed_session_finds_its_blocks_in_the_gpu_pool(build: Build) -> None:
    site = stored(build, world_size=2)
    operation = site.edit("s", "prefetch")
    assert site.connector.has_pending_push_work(), "it begins on an idle engine too"
    site.step()
    assert len(fills(site)) == 1, "in the next step"
    site.run()
    result = site.result(operation)
    assert (result["status"], result["blocks"], result["done_blocks"]) == ("ok", BLOCKS, BLOCKS)
    assert site.session("s")["residency"]["gpu"] == BLOCKS
    assert site.half.gauges()["spm:sam_protected_blocks|"] == BLOCKS, "it is expected back"
    site.turn("second", site.next_prompt, session="s")
    assert site.hits["second"] == (4 * BLOCKS, 0)


def test_only_the_gap_is_loaded(build: Build) -> None:
    site = stored(build)
    site.turn("others", PROMPT[:18])  # four of its blocks are back
    site.done("s", "prefetch")
    (fill,) = fills(site)
    assert (len(fill.prefix_block_ids), len(fill.block_ids)) == (4, BLOCKS - 4)
    assert site.memory.lookups[-1][1] == 16, "the connector was asked for the rest"


def test_a_range_brings_what_it_needs_and_counts_its_own(build: Build) -> None:
    site = stored(build)
    result = site.done("s", "prefetch", block_start=2, block_end=5)
    assert (result["status"], result["blocks"], result["done_blocks"]) == ("ok", 3, 3)
    assert site.session("s")["residency"]["gpu"] == 5
    assert site.done("s", "prefetch", block_start=2, block_end=5)["status"] == "ok"
    assert len(fills(site)) == 1, "what is there is not loaded again"


def test_a_long_one_is_several_small_loads(build: Build) -> None:
    site = stored(build)
    site.half._prefetches.block_bytes = site.half._prefetches._inflight_bytes // 4
    assert site.done("s", "prefetch")["status"] == "ok"
    assert [len(fill.block_ids) for fill in fills(site)] == [4, 4, 3]


def test_a_connector_that_stores_large_chunks_is_asked_for_enough(build: Build) -> None:
    site = stored(build, Memory(chunk_blocks=5))
    site.half._prefetches.block_bytes = site.half._prefetches._inflight_bytes // 2
    result = site.done("s", "prefetch")
    assert (result["status"], result["done_blocks"]) == ("partial", 10)
    assert result["detail"] == "the rest is not stored"
    assert all(len(fill.block_ids) % 5 == 0 for fill in fills(site))


def test_a_requests_load_goes_first(build: Build) -> None:
    site = stored(build)
    site.memory.load_steps = lambda: 5
    site.add("loading", PROMPT[:30], session="other")
    while not site.half._loads.going_on:
        site.step()
    site.edit("s", "prefetch")
    while site.half._loads.going_on:
        assert not fills(site)
        site.step()
    site.run()
    assert fills(site)


def test_a_request_waits_for_what_makes_its_hit_longer(build: Build) -> None:
    site = stored(build)
    site.memory.load_steps = lambda: 6
    site.edit("s", "prefetch")
    until_loading(site)
    site.add("resumed", site.next_prompt)
    site.add("other", OTHER)
    for _ in range(4):
        site.step()
    assert site.outputs["other"], "others do not wait"
    assert not site.outputs["resumed"]
    site.run()
    assert site.hits["resumed"] == (4 * BLOCKS, 0)


def test_it_does_not_wait_for_ever(build: Build) -> None:
    site = stored(build)
    site.memory.load_steps = lambda: -1
    operation = site.edit("s", "prefetch")
    until_loading(site)
    site.memory.load_steps = lambda: 0
    site.add("resumed", site.next_prompt)
    for _ in range(5):
        site.step()
    assert not site.outputs["resumed"]
    site.now_s += 10.0
    for _ in range(20):
        site.step()
    assert len(site.outputs["resumed"]) == 4
    site.now_s += 60.0  # as long as an idle engine still looks for the answer
    site.run()
    assert site.result(operation)["status"] == "failed"


def test_a_load_that_never_ends_keeps_its_blocks_and_nothing_else(build: Build) -> None:
    site = stored(build)
    site.memory.load_steps = lambda: -1
    operation = site.edit("s", "prefetch")
    until_loading(site)
    site.now_s += 10.0
    site.step()
    result = site.result(operation)
    assert (result["status"], result["detail"]) == (
        "failed",
        "the connector did not answer in time",
    )
    site.now_s += 60.0  # as long as an idle engine still looks for the answer
    site.run(limit=5)
    assert site.is_idle
    assert site.pool.num_taken == BLOCKS
    assert site.done("s", "prefetch")["status"] == "failed", "another one has no chance"
    assert site.pool.num_taken == BLOCKS
    worker = site.inner_workers[0]
    worker._loading = [(0, load, kv) for _, load, kv in worker._loading]
    site.memory.load_steps = lambda: 0
    site.turn("later", OTHER)
    assert site.pool.num_taken == 0
    assert site.session("s")["residency"]["gpu"] == 0, "what comes so late is not used"
    assert site.done("s", "prefetch")["status"] == "ok"


@pytest.mark.parametrize(("says", "arrives"), [("block", 3), ("blocks", 0), ("request", 0)])
def test_what_a_single_rank_lacks_is_not_published(build: Build, says: str, arrives: int) -> None:
    site = stored(build, world_size=2)
    fourth = site.half._chains.get(next(iter(site.half._chains._chains)))
    assert fourth is not None
    name = bytes(fourth.keys[3])[:-4]
    site.memory.fails = lambda rank, chunk: says if (rank, chunk) == (1, name) else ""
    result = site.done("s", "prefetch")
    assert result["status"] == ("partial" if arrives else "failed")
    assert result["done_blocks"] == arrives
    assert site.session("s")["residency"]["gpu"] == arrives
    site.memory.fails = lambda rank, chunk: ""
    site.turn("second", site.next_prompt)


def test_a_failed_load_does_not_disturb_requests_that_share_the_prefix(build: Build) -> None:
    site = stored(build, Memory(chunk_blocks=3))
    site.add("running", PROMPT[:18], max_tokens=40)
    while not site.outputs["running"]:
        site.step()
    site.memory.fails = lambda rank, chunk: "blocks"
    operation = site.edit("s", "prefetch")
    site.run()
    assert fills(site)[0].prefix_block_ids
    assert site.result(operation)["status"] == "partial"
    assert len(site.outputs["running"]) == 40


@pytest.mark.parametrize("how", ["reset", "end", "evict"])
def test_given_up_while_it_is_on_its_way(build: Build, how: str) -> None:
    site = stored(build)
    site.memory.load_steps = lambda: 4
    operation = site.edit("s", "prefetch")
    until_loading(site)
    if how == "reset":
        site.reset()
    elif how == "end":
        site.manage("end_session", session_id="s", operation_id="end")
    else:
        site.edit("s", "evict")
    assert site.result(operation)["status"] == "failed"
    assert site.pool.num_taken == BLOCKS, "a worker may still write"
    site.run()
    cached = len(site.pool._pool.cached_block_hash_to_block)
    assert cached == (0 if how == "reset" else BLOCKS)


def test_blocks_are_kept_until_every_rank_is_done_with_them(build: Build) -> None:
    site = stored(build, world_size=2)
    workers = site.inner_workers
    site.memory.load_steps = lambda: 1
    site.edit("s", "prefetch")
    until_loading(site)
    (fill,) = fills(site)
    for worker in workers:  # saves of the stand-in go on, says each
        save = Move(fill.request_id, [b""], [])
        worker._saving.append((6 + worker.rank, save, []))
    for _ in range(4):
        site.step()
    assert site.session("s")["residency"]["gpu"] == BLOCKS
    assert site.pool.num_taken == BLOCKS
    site.run()
    assert site.pool.num_taken == 0


def test_inference_keeps_its_room(build: Build) -> None:
    site = stored(build, extra={"prefetch_reserve_share": 1.0})
    result = site.done("s", "prefetch")
    assert (result["status"], result["done_blocks"]) == ("rejected", 0)
    assert not fills(site)


def test_at_most_half_of_what_is_free_is_taken(build: Build) -> None:
    site = stored(build, num_blocks=17, extra={"prefetch_reserve_share": 0.0})
    result = site.done("s", "prefetch")
    assert (result["status"], result["done_blocks"]) == ("partial", 8)
    assert "room" in result["detail"]


def test_a_connector_that_loads_within_steps_is_not_asked_twice(build: Build) -> None:
    site = stored(build, Memory(loads_in_step=True))
    assert site.done("s", "prefetch")["status"] == "unsupported"
    asked = len(site.memory.lookups)
    result = site.done("s", "prefetch")
    assert result["status"] == "unsupported"
    assert "within a request's own step" in result["detail"]
    assert len(site.memory.lookups) == asked
    assert not site.manage("status")["engine"]["capabilities"]["prefetch"]


def test_a_connector_that_raises_may_still_write(build: Build) -> None:
    """Nobody knows what it has begun: the blocks are not used for anything else."""
    site = stored(build)
    site.memory.raises_in = "allocate"
    assert site.done("s", "prefetch")["status"] == "failed"
    assert site.pool.num_taken == BLOCKS
    site.turn("second", site.next_prompt, session="s")


def test_the_session_comes_back_first(build: Build) -> None:
    site = stored(build)
    site.half._prefetches.block_bytes = site.half._prefetches._inflight_bytes // 4
    site.memory.load_steps = lambda: 3
    operation = site.edit("s", "prefetch")
    until_loading(site)
    site.add("resumed", site.next_prompt, session="s")
    assert site.result(operation)["status"] == "partial"
    site.run()
    assert len(fills(site)) == 1, "its request loads the rest"
    assert site.hits["resumed"] == (16, 4 * (BLOCKS - 4))
