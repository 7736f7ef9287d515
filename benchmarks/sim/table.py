"""Tables, ratios and pictures of simulated runs."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Report
from benchmarks.sim.measures import Run, quantile
from benchmarks.sim.mixes import Mix

_HEAD = (
    f"{'policy':20}{'tasks/h':>9}{'gpu hits':>10}{'all hits':>10}{'TTFT mean':>11}{'p50':>8}"
    f"{'p99':>8}{'E2E mean':>10}{'computed':>10}{'moved GB':>10}{'preempt':>9}"
)
_M = 1e6

Runs = dict[tuple[str, int], list[Run]]
"""By policy and concurrency: one for each seed."""


def table(mix: Mix, runs: Runs) -> list[str]:
    """Medians over seeds; times in virtual seconds, computed in millions of prompt tokens."""
    lines = [f"\n{mix.name}: {mix.about}; {mix.costs.name}"]
    for concurrency in mix.concurrencies:
        lines += [f"c = {concurrency}, {mix.tasks * concurrency} tasks, {mix.seeds} seed(s)", _HEAD]
        lines += [_row(name, runs[name, concurrency]) for name in mix.policies]
    return lines


def _row(name: str, runs: Sequence[Run]) -> str:
    def mid(values: list[float]) -> float:
        return statistics.median(values)

    return (
        f"{name:20}{3600 * mid([r.trajectories_per_s for r in runs]):9.1f}"
        f"{mid([r.gpu_hit_rate for r in runs]):10.3f}{mid([r.hit_rate for r in runs]):10.3f}"
        f"{mid([r.mean_ttft_s for r in runs]):11.2f}"
        f"{mid([quantile(r.resumed_ttft_s, 0.5) for r in runs]):8.2f}"
        f"{mid([quantile(r.resumed_ttft_s, 0.99) for r in runs]):8.1f}"
        f"{mid([statistics.fmean(r.e2e_s) for r in runs]):10.1f}"
        f"{mid([r.computed_tokens / _M for r in runs]):10.2f}"
        f"{mid([r.moved_bytes / 1e9 for r in runs]):10.0f}"
        f"{mid([r.preemptions for r in runs]):9.0f}"
    )


def add_ratios(report: Report, mix: Mix, runs: Runs) -> None:
    """Each policy over stock, and over the limit, by concurrency; pairs are seeds."""
    for concurrency in mix.concurrencies:
        lru, oracle = runs["lru", concurrency], runs["oracle", concurrency]
        for name in mix.policies:
            ours, at = runs[name, concurrency], f"{mix.name},{name},c={concurrency}"
            if name != "lru":
                report.add_ratio(f"gpu_hits_over_lru[{at}]", _gpu(ours), _gpu(lru))
                report.add_ratio(f"trajectories_over_lru[{at}]", _rate(ours), _rate(lru))
            if name != "oracle":
                report.add_ratio(f"trajectories_over_oracle[{at}]", _rate(ours), _rate(oracle))


def verdicts(mix: Mix, runs: Runs) -> list[str]:
    """How ours stands: against stock, the best other policy, and the limit."""
    lines = []
    for concurrency in mix.concurrencies:
        medians = {name: _median(runs[name, concurrency]) for name in mix.policies}
        hits, rate = medians["session-aware"]
        lru_hits, lru_rate = medians["lru"]
        others = {
            name: rate
            for name, (_, rate) in medians.items()
            if name != "oracle" and not name.startswith("session-aware")
        }
        best = max(others, key=lambda name: others[name])
        lines.append(
            f"{mix.name} c={concurrency}: GPU-local hits x{hits / lru_hits:.2f} and tasks/h "
            f"x{rate / lru_rate:.2f} over lru; tasks/h {rate / others[best] - 1:+.1%} against the "
            f"best other ({best}), {rate / medians['oracle'][1] - 1:+.1%} against the oracle"
        )
    return lines


def _median(runs: Sequence[Run]) -> tuple[float, float]:
    return statistics.median(_gpu(runs)), statistics.median(_rate(runs))


def _gpu(runs: Sequence[Run]) -> list[float]:
    return [run.gpu_hit_rate for run in runs]


def _rate(runs: Sequence[Run]) -> list[float]:
    return [run.trajectories_per_s for run in runs]


def as_rows(mix: Mix, runs: Runs) -> list[dict[str, Any]]:
    """Every run, for the JSON file."""
    return [
        {
            "mix": mix.name,
            "policy": name,
            "concurrency": concurrency,
            "seed": seed,
            "tasks_per_h": 3600 * run.trajectories_per_s,
            "gpu_hit_rate": run.gpu_hit_rate,
            "hit_rate": run.hit_rate,
            "ttft_resumed_mean_s": run.mean_ttft_s,
            "ttft_resumed_p50_s": quantile(run.resumed_ttft_s, 0.5),
            "ttft_resumed_p99_s": quantile(run.resumed_ttft_s, 0.99),
            "e2e_mean_s": statistics.fmean(run.e2e_s),
            "computed_tokens": run.computed_tokens,
            "moved_bytes": run.moved_bytes,
            "preemptions": run.preemptions,
            "peak_pool_share": run.peak_used_share,
            "simulated_s": run.elapsed_s,
            "steps": run.steps,
            "wall_s": run.wall_s,
        }
        for (name, concurrency), several in runs.items()
        for seed, run in enumerate(several)
    ]


def draw(mix: Mix, runs: Runs, stem: Path) -> list[Path]:
    """Tasks an hour and GPU-local hits over concurrency, where there are several."""
    from benchmarks.plots import draw_lines

    if len(mix.concurrencies) < 2:
        return []
    drawn = []
    for what, unit, of in (("tasks", "tasks/h", _rate), ("gpu-hits", "GPU-local hit rate", _gpu)):
        scale = 3600 if what == "tasks" else 1
        series = {
            name: [(c, scale * statistics.median(of(runs[name, c]))) for c in mix.concurrencies]
            for name in mix.policies
        }
        path = stem.with_name(f"{stem.name}-{mix.name}-{what}.png")
        title = f"Simulated: {mix.about}"
        draw_lines(path, title, "agents at a time", unit, series)
        drawn.append(path)
    return drawn
