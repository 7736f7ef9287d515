"""Rounds of several modes as ratios over stock, a table, JSON and pictures."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.agents.e2e_costs import Costs
from benchmarks.agents.e2e_measures import RoundMeasures
from benchmarks.agents.e2e_modes import STOCK
from benchmarks.plots import Interval, draw_bars, draw_stacks
from benchmarks.report import Report, bootstrapped

Measure = Callable[[RoundMeasures], float]

_RATIOS: dict[str, Measure] = {
    "ttft_resumed_over_stock": lambda one: one.ttft_resumed.mean_s,
    "e2e_over_stock": lambda one: one.e2e_mean_s,
    "hit_rate_over_stock": lambda one: one.hit_rate,
    "peak_pool_over_stock": lambda one: one.pool_peak,
    "trajectories_over_stock": lambda one: one.trajectories_per_s,
}
_COLUMNS: dict[str, tuple[Measure, str]] = {
    "resumed mean s": (lambda one: one.ttft_resumed.mean_s, ".2f"),
    "p50": (lambda one: one.ttft_resumed.p50_s, ".2f"),
    "p99": (lambda one: one.ttft_resumed.p99_s, ".2f"),
    "all mean s": (lambda one: one.ttft_all.mean_s, ".2f"),
    "p50 ": (lambda one: one.ttft_all.p50_s, ".2f"),
    "p99 ": (lambda one: one.ttft_all.p99_s, ".2f"),
    "E2E s": (lambda one: one.e2e_mean_s, ".1f"),
    "recomputed": (lambda one: one.recomputed_tokens, ",.0f"),
    "hit gpu": (lambda one: one.hit_gpu_tokens, ",.0f"),
    "host": (lambda one: one.hit_host_tokens, ",.0f"),
    "remote": (lambda one: one.hit_remote_tokens, ",.0f"),
    "MB loaded": (lambda one: one.loaded_bytes / 1e6, ",.0f"),
    "MB saved": (lambda one: one.saved_bytes / 1e6, ",.0f"),
    "pool peak": (lambda one: one.pool_peak, ".0%"),
    "preempted": (lambda one: one.preemptions, ".0f"),
    "traj./s": (lambda one: one.trajectories_per_s, ".3f"),
}
_PARTS: dict[str, Measure] = {
    "GPU hit": lambda one: one.hit_gpu_tokens,
    "host hit": lambda one: one.hit_host_tokens,
    "remote hit": lambda one: one.hit_remote_tokens,
    "computed": lambda one: one.computed_tokens,
}


@dataclass
class AgentsReport(Report):
    """A report that also holds every round, and what a simulation needs to be checked by."""

    rounds: list[RoundMeasures] = field(default_factory=list)
    costs: Costs | None = None
    workload: dict[str, Any] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The result in its JSON form."""
        costs = None if self.costs is None else self.costs.as_dict()
        return super().as_dict() | {
            "workload": self.workload,
            "costs": costs,
            "rounds": [one.as_dict() for one in self.rounds],
            "not_run": self.not_run,
        }

    def add_rounds(self, rounds: Sequence[RoundMeasures]) -> None:
        """All rounds of all modes, and the ratios over stock that follow from them."""
        self.rounds = list(rounds)
        for mode in self.modes:
            if mode == STOCK:
                continue
            for key, measure in _RATIOS.items():
                series, stock = self._series(mode, measure), self._series(STOCK, measure)
                self.add_ratio(f"{key}_{mode}", series, stock)

    @property
    def modes(self) -> list[str]:
        """In the order in which they are shown."""
        return list(dict.fromkeys(one.mode for one in self.rounds))

    def table(self) -> list[str]:
        """Medians over the rounds, a line a mode."""
        rows = [["", *(name.strip() for name in _COLUMNS)]]
        for mode in self.modes:
            cells = [format(self._median(mode, of), form) for of, form in _COLUMNS.values()]
            rows.append([mode, *cells])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]

    def draw(self, stem: Path) -> list[Path]:
        """PNG files whose names begin with ``stem``."""
        pictures = {
            "ttft": ("Time to first token of resumed turns", _RATIOS["ttft_resumed_over_stock"]),
            "e2e": ("A task from its first prompt to its last answer", _RATIOS["e2e_over_stock"]),
        }
        paths = []
        for name, (title, measure) in pictures.items():
            paths.append(stem.with_name(f"{stem.name}-{name}.png"))
            values = {mode: self._interval(mode, measure) for mode in self.modes}
            draw_bars(paths[-1], title, "s, mean of a round", values)
        paths.append(stem.with_name(f"{stem.name}-tokens.png"))
        parts = {
            mode: {part: self._median(mode, measure) for part, measure in _PARTS.items()}
            for mode in self.modes
        }
        draw_stacks(paths[-1], "Where the prompts' tokens came from", "tokens a round", parts)
        return paths

    def _series(self, mode: str, measure: Measure) -> list[float]:
        return [measure(one) for one in self.rounds if one.mode == mode]

    def _median(self, mode: str, measure: Measure) -> float:
        return statistics.median(self._series(mode, measure))

    def _interval(self, mode: str, measure: Measure) -> Interval:
        said = bootstrapped(self._series(mode, measure), statistics.median, self.options.seed)
        return said["median"], said["low"], said["high"]


def describe_workload(
    shape: object, tasks: int, concurrency: int, need_blocks: int, pool_blocks: int
) -> dict[str, Any]:
    """What a simulation draws the same tasks from; ``shape`` is a dataclass."""
    return {
        "shape": asdict(shape),  # type: ignore[call-overload]
        "tasks": tasks,
        "concurrency": concurrency,
        "need_blocks": need_blocks,
        "pool_blocks": pool_blocks,
    }
