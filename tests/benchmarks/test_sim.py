"""That the simulator runs vLLM's scheduler and our code as they are, and that its policies, clock
and costs are what they say. On a machine so small that a run takes a second."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.agents.e2e_costs import Costs, DecodePoint, PrefillPoint
from benchmarks.agents.tools import CODING_TOOLS
from benchmarks.agents.workload import Shape, Trajectory, draw_tasks
from benchmarks.sam_parts import write_model
from benchmarks.sim.check import shape_of
from benchmarks.sim.costs import QWEN3_32B_BF16, QWEN3_32B_FP8, CostModel, Work
from benchmarks.sim.fitting import fitted
from benchmarks.sim.links import Batch, Link
from benchmarks.sim.measures import Run
from benchmarks.sim.policies.all import BY_NAME
from benchmarks.sim.simulation import simulate
from benchmarks.sim.tool_times import ToolTimes

_BLOCK_TOKENS = 16
_SHAPE = Shape(64, (60, 120), (10, 40), 20, 0.4, (4, 6), fan_out_share=0.1, longest_gap_s=5.0)
_COSTS = CostModel(
    name="tiny",
    kv_bytes_per_token=4096,
    block_tokens=_BLOCK_TOKENS,
    pool_blocks=120,
    host_bytes=4096 * _BLOCK_TOKENS * 2000,
    step_tokens=256,
    max_seqs=16,
    link_bytes_per_s=1e9,
    link_latency_s=1e-4,
    step_s=0.01,
    decode_s=0.001,
    read_s=1e-6,
    prefill_s=0.001,
    attend_s=1e-6,
    request_s=0.001,
)
_TASKS, _CONCURRENCY = 16, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), 262_144)


@pytest.fixture(scope="module")
def tasks() -> list[Trajectory]:
    return draw_tasks(_SHAPE, _TASKS, 7)


@pytest.fixture(scope="module")
def runs(model: Path, tasks: list[Trajectory]) -> dict[str, Run]:
    """One of each policy; ``simulate`` itself checks that nothing is left over."""
    return {
        name: simulate(make(), tasks, _CONCURRENCY, _COSTS, model, 0.0)
        for name, make in BY_NAME.items()
    }


def turns(tasks: list[Trajectory]) -> int:
    return sum(len(one.turns) for task in tasks for one in task.whole_family())


@pytest.mark.parametrize("name", BY_NAME)
def test_every_turn_of_every_task_is_answered(
    runs: dict[str, Run], tasks: list[Trajectory], name: str
) -> None:
    run = runs[name]
    family = [one for task in tasks for one in task.whole_family()]
    assert len(run.ttft_s) == turns(tasks)
    assert len(run.e2e_s) == _TASKS
    assert run.decoded_tokens == sum(t.answer_tokens for one in family for t in one.turns)
    assert run.prompt_tokens == sum(
        one.prompt_tokens(at) for one in family for at in range(len(one.turns))
    )
    assert min(run.ttft_s) > 2 * _COSTS.request_s
    assert 0 < run.gpu_hit_rate <= run.hit_rate < 1


def test_the_same_seed_gives_the_same_run(
    runs: dict[str, Run], model: Path, tasks: list[Trajectory]
) -> None:
    again = simulate(BY_NAME["session-aware"](), tasks, _CONCURRENCY, _COSTS, model, 0.0)
    before = runs["session-aware"]
    assert (again.elapsed_s, again.gpu_tokens) == (before.elapsed_s, before.gpu_tokens)
    assert again.ttft_s == before.ttft_s


def test_nobody_computes_less_than_the_oracle(runs: dict[str, Run]) -> None:
    """But for the shared prefix, which several compute that begin at the same time."""
    least = 0.95 * runs["oracle"].computed_tokens
    assert all(run.computed_tokens >= least for run in runs.values())
    assert runs["lru"].computed_tokens > 1.2 * least, "the pool is meant to be too small"
    assert runs["oracle"].host_tokens == 0


def test_ours_keeps_more_in_the_pool_than_stock(runs: dict[str, Run]) -> None:
    assert runs["session-aware"].gpu_hit_rate > 1.1 * runs["lru"].gpu_hit_rate
    assert runs["session-aware-gpu"].trajectories_per_s > runs["lru"].trajectories_per_s


def test_only_policies_with_a_host_tier_move_anything(runs: dict[str, Run]) -> None:
    for name, run in runs.items():
        has_tier = name not in ("lru", "session-aware-gpu")
        assert (run.host_tokens > 0 or name == "oracle") == has_tier, name
        assert (run.moved_bytes > 0) == has_tier


@pytest.mark.parametrize("name", ["lru", "lru-host"])
def test_decoding_several_tokens_at_once_changes_no_hit(model: Path, name: str) -> None:
    """With room for all, what is hit does not depend on when steps end."""
    roomy = dataclasses.replace(_COSTS, pool_blocks=8000)
    tasks = draw_tasks(dataclasses.replace(_SHAPE, answer_median=200), 8, 7)
    many = simulate(BY_NAME[name](), tasks, 4, roomy, model, 0.0)
    single = simulate(BY_NAME[name](), tasks, 4, roomy, model, 0.0, quantum=1)
    assert single.steps > 1.5 * many.steps
    assert abs(many.gpu_tokens - single.gpu_tokens) <= 0.02 * single.gpu_tokens
    assert many.elapsed_s == pytest.approx(single.elapsed_s, rel=0.08)


def test_the_published_figures_are_in_the_presets() -> None:
    assert QWEN3_32B_BF16.kv_bytes_per_token == 262_144 == 64 * 2 * 8 * 128 * 2
    assert QWEN3_32B_FP8.kv_bytes_per_token == 131_072
    assert 44e9 < QWEN3_32B_FP8.link_bytes_per_s < 51e9
    assert [(tool.name, tool.share, tool.mean_s) for tool in CODING_TOOLS] == [
        ("file_editor", 2599, 0.10),
        ("terminal", 1191, 1.1),
        ("think", 438, 0.09),
    ]


def test_a_step_costs_what_the_formula_says() -> None:
    works = [Work(4, 100, decodes=True), Work(50, 30, decodes=False)]
    decode = 4 * (0.001 + 102 * 1e-6)
    prefill = 50 * (0.001 + 55 * 1e-6)
    assert _COSTS.step_seconds(works) == pytest.approx(4 * 0.01 + decode + prefill)
    assert _COSTS.step_seconds([]) == 0.0


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 1000), st.floats(0.001, 2.0)), max_size=30)
)
def test_a_link_is_one_server_with_priorities(asked: list[tuple[int, int, float]]) -> None:
    """Against a model that looks at everything each time."""
    link, arrived, now_s = Link(100.0, 0.5), list[tuple[int, float]](), 0.0
    jobs: list[tuple[float, int, int, int]] = []
    for number, (rank, size, pause_s) in enumerate(asked):
        now_s += pause_s
        link.advance(now_s)
        link.submit(Batch(size, lambda at_s, n=number: arrived.append((n, at_s))), rank, now_s)  # type: ignore[misc]
        jobs.append((now_s, rank, number, size))
    link.advance(1e9)
    expected, free_s = list[tuple[int, float]](), 0.0
    while jobs:
        start_s = max(free_s, min(job[0] for job in jobs))
        chosen = min((job for job in jobs if job[0] <= start_s), key=lambda job: job[1:3])
        jobs.remove(chosen)
        free_s = start_s + 0.5 + chosen[3] / 100.0
        expected.append((chosen[2], free_s))
    assert [n for n, _ in arrived] == [n for n, _ in expected]
    assert [s for _, s in arrived] == pytest.approx([s for _, s in expected])


def test_measured_steps_give_the_model_they_were_made_from() -> None:
    points = [(t, c) for t in (128, 256, 512) for c in (0, 1024)]
    measured = Costs(
        prefill=tuple(
            PrefillPoint(t, c, _COSTS.step_s + t * (_COSTS.prefill_s + (c + t / 2) * 1e-6))
            for t, c in points
        ),
        decode=tuple(DecodePoint(b, 1024, _COSTS.step_s + b * 0.002) for b in (1, 2, 4, 8)),
        request_overhead_s=0.01,
        load_host_block_s=0.004,
        load_remote_block_s=None,
        block_bytes=65_536,
        block_tokens=16,
        step_tokens=512,
        max_seqs=8,
        pool_blocks=33,
    )
    model = fitted(measured, 1 << 30)
    assert model.step_s == pytest.approx(_COSTS.step_s)
    assert model.prefill_s == pytest.approx(_COSTS.prefill_s)
    assert model.attend_s == pytest.approx(1e-6)
    assert model.decode_s == pytest.approx(0.002)
    assert model.load_seconds(16) == pytest.approx(0.004)


def test_a_shape_survives_json() -> None:
    assert shape_of(dataclasses.asdict(_SHAPE)) == _SHAPE


def test_the_usual_time_of_a_tool_is_not_that_of_its_worst_call() -> None:
    times = ToolTimes()
    for _ in range(50):
        times.note("terminal", 0.1)
    times.note("terminal", 600.0)
    assert times.mean_s("terminal") > 100
    assert times.typical_s("terminal") < 1.0
    assert times.typical_s("unknown") < 10.0
