"""What a round comes to, what its costs look like in a file, and what is made of both."""

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agents.e2e_client import Answered
from benchmarks.agents.e2e_costs import Costs, DecodePoint, PrefillPoint
from benchmarks.agents.e2e_counters import Counters, parse_counters, parse_pool_use
from benchmarks.agents.e2e_loop import RoundLog, TrajectoryDone, TurnDone
from benchmarks.agents.e2e_measures import RoundMeasures, RoundName, Seconds, measure_round
from benchmarks.agents.e2e_offloading import refusal
from benchmarks.agents.e2e_probe import BATCHES, Probe
from benchmarks.agents.e2e_report import AgentsReport
from benchmarks.report import Options
from spm.demo.metrics_client import TokenSources

LOG = RoundLog(
    turns=[
        TurnDone("a", 0, 0.0, 500, 20, 0, 0, 2.0, 3.0),
        TurnDone("a", 1, 4.0, 700, 20, 519, 384, 1.0, 2.0),
        TurnDone("b", 1, 5.0, 600, 20, 400, 512, 3.0, 4.0),
    ],
    trajectories=[
        TrajectoryDone("a", None, 10.0),
        TrajectoryDone("b", None, 20.0),
        TrajectoryDone("b/0", "b", 99.0),
    ],
    seconds=30.0,
)
MOVED = Counters(
    TokenSources(gpu=600, external=296, computed=904, host=200, remote=96),
    loaded_host_bytes=2000.0,
    loaded_remote_bytes=960.0,
    saved_host_bytes=5000.0,
    preemptions=2.0,
)
NAME = RoundName("host", 1, 7)
METRICS = """
# HELP vllm:kv_cache_usage_perc
vllm:kv_cache_usage_perc{engine="0",model_name="demo"} 0.75
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 900.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 600.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 300.0
vllm:num_preemptions_total{engine="0"} 3.0
spm:loaded_tokens_total{engine="0",tier="host"} 100.0
spm:loaded_tokens_total{engine="0",tier="remote"} 200.0
spm:loaded_bytes_total{engine="0",tier="host"} 1e+06
spm:loaded_bytes_total{engine="0",tier="remote"} 2e+06
spm:load_seconds_total{engine="0"} 0.5
spm:prefetched_blocks_total{engine="0",target="gpu"} 4.0
"""
COSTS = Costs(
    prefill=(PrefillPoint(128, 0, 0.1), PrefillPoint(512, 1024, 0.5)),
    decode=(DecodePoint(1, 1024, 0.02), DecodePoint(8, 1024, 0.05)),
    request_overhead_s=0.01,
    load_host_block_s=0.001,
    load_remote_block_s=None,
    block_bytes=2_949_120,
    block_tokens=128,
    step_tokens=512,
    max_seqs=8,
    pool_blocks=54,
)


def measured(moved: Counters = MOVED) -> RoundMeasures:
    return measure_round(NAME, LOG, moved, [0.5, 1.0], block_tokens=128, token_bytes=10)


def test_the_measures_of_a_round() -> None:
    one = measured()

    assert one.ttft_resumed == Seconds(2.0, 2.0, 3.0)
    assert one.ttft_all.mean_s == 2.0
    assert one.e2e_mean_s == 15.0  # tasks; a sub-agent's time is in its parent's
    assert (one.tasks, one.trajectories, one.requests) == (2, 3, 3)
    assert one.recomputed_tokens == 512 - 384  # whole blocks that it had; b found more than its own
    assert one.hit_tokens == 600 + 296
    assert one.hit_rate == pytest.approx(896 / 1800)
    assert one.trajectories_per_s == pytest.approx(0.1)
    assert (one.loaded_bytes, one.saved_bytes, one.preemptions) == (2960, 5000, 2)
    assert (one.pool_peak, one.pool_mean) == (1.0, 0.75)


def test_bytes_of_a_connector_that_does_not_tell_are_those_of_its_tokens() -> None:
    assert measured(Counters(TokenSources(external=300, remote=300))).loaded_bytes == 3000


def test_a_round_can_be_written_as_json() -> None:
    said = json.loads(json.dumps(measured().as_dict()))

    assert said["hit_tokens"] == 896
    assert said["ttft_resumed"] == {"mean_s": 2.0, "p50_s": 2.0, "p99_s": 3.0}
    assert (said["mode"], said["round"], said["workload_seed"]) == ("host", 1, 7)


def test_seconds_of_nothing_and_of_many() -> None:
    assert Seconds.of([]) == Seconds(0.0, 0.0, 0.0)
    assert Seconds.of([float(n) for n in range(1, 201)]) == Seconds(100.5, 100.5, 198.0)


def test_counters_are_read_and_subtracted() -> None:
    now = parse_counters(METRICS, tiers=True)

    assert now.sources == TokenSources(600, 300, 900, 100, 200)
    assert (now.loaded_host_bytes, now.loaded_remote_bytes, now.load_s) == (1e6, 2e6, 0.5)
    assert (now.prefetched_gpu_blocks, now.preemptions) == (4.0, 3.0)
    assert now - now == Counters(TokenSources())
    assert parse_counters(METRICS, tiers=False).sources.remote == 300
    assert parse_pool_use(METRICS) == 0.75


def test_costs_survive_a_file() -> None:
    assert Costs.from_dict(json.loads(json.dumps(COSTS.as_dict()))) == COSTS


def test_costs_with_an_unknown_field_are_refused() -> None:
    with pytest.raises(TypeError):
        Costs.from_dict({**COSTS.as_dict(), "more": 1})


def test_a_probe_takes_steps_apart() -> None:
    """A server where a computed token takes 1 ms, a decode step 20 ms a request, a request 100."""
    cached: set[tuple[int, ...]] = set()

    async def ask(prompt: Sequence[int], answer_tokens: int, fields: Mapping[str, Any]) -> Answered:
        assert not fields
        whole = [len(known) for known in cached if tuple(prompt[: len(known)]) == known]
        hit = max(whole, default=0)
        cached.update(tuple(prompt[:n]) for n in range(128, len(prompt) + 1, 128))
        active.append(1)
        await asyncio.sleep(0)
        step_s = 0.02 * len(active)
        await asyncio.sleep(0)
        active.pop()
        ttft_s = 0.1 + (0.02 if len(prompt) - hit == 1 else 0.001 * (len(prompt) - hit))
        times_s = tuple(ttft_s + step_s * n for n in range(answer_tokens))
        return Answered(tuple(range(answer_tokens)), times_s, hit)

    active: list[int] = []
    probe = Probe(ask, random.Random(0))
    asyncio.run(probe.measure())

    assert probe.request_overhead_s == pytest.approx(0.1)
    assert [point.batch for point in probe.decode] == list(BATCHES)
    assert [point.seconds for point in probe.decode] == pytest.approx([0.02 * b for b in BATCHES])
    assert all(one.seconds == pytest.approx(0.001 * one.tokens) for one in probe.prefill)
    assert {one.context_tokens for one in probe.prefill} == {0, 1024, 2048}


def rounds_of(mode: str, ttft_s: float, computed: int) -> list[RoundMeasures]:
    seconds = Seconds(ttft_s, ttft_s, ttft_s)
    one = replace(measured(), mode=mode, ttft_resumed=seconds, computed_tokens=computed)
    return [replace(one, round=number) for number in range(5)]


def test_a_report_compares_every_mode_with_stock(tmp_path: Path) -> None:
    report = AgentsReport("agents_e2e", Options(True, 0, None), 5)
    report.costs = COSTS

    report.add_rounds([*rounds_of("stock", 4.0, 900), *rounds_of("redis", 1.0, 100)])

    said = json.loads(json.dumps(report.as_dict()))
    assert said["ratios"]["ttft_resumed_over_stock_redis"]["median"] == 0.25
    assert set(said["ratios"]) == {
        f"{key}_over_stock_redis"
        for key in ("ttft_resumed", "e2e", "hit_rate", "peak_pool", "trajectories")
    }
    assert len(said["rounds"]) == 10
    assert Costs.from_dict(said["costs"]) == COSTS
    assert [line.split()[0] for line in report.table()[1:]] == ["stock", "redis"]


def test_a_report_draws_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = AgentsReport("agents_e2e", Options(True, 0, None), 5)
    report.add_rounds([*rounds_of("stock", 4.0, 900), *rounds_of("redis", 1.0, 100)])

    paths = report.draw(tmp_path / "agents")

    assert [path.name for path in paths] == [
        "agents-ttft.png",
        "agents-e2e.png",
        "agents-tokens.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_refusal_is_quoted() -> None:
    log = (
        "INFO fine\nException: CPU Offloading is currently only supported on X\nError: engine died"
    )

    assert refusal(log) == "Exception: CPU Offloading is currently only supported on X"
    assert "does not tell" in refusal("nothing")
