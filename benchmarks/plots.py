"""Pictures of results as PNG files, without a display."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # before pyplot: draws into files only

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_INCHES = (7.0, 4.0)
_DPI = 120

Interval = tuple[float, float, float]
"""A median, and the ends of its interval."""


def draw_bars(path: Path, title: str, unit: str, values: Mapping[str, Interval]) -> None:
    """A bar for each name, with its interval."""
    figure, axes = pyplot.subplots(figsize=_INCHES)
    medians = [median for median, _, _ in values.values()]
    below = [max(0.0, median - low) for median, low, _ in values.values()]
    above = [max(0.0, high - median) for median, _, high in values.values()]
    axes.bar(list(values), medians, yerr=[below, above], capsize=4, color="tab:blue")
    _finish(axes, title, unit)
    _save(figure, path)


def draw_stacks(
    path: Path, title: str, unit: str, values: Mapping[str, Mapping[str, float]]
) -> None:
    """A bar for each name, of the same parts in the same order."""
    figure, axes = pyplot.subplots(figsize=_INCHES)
    heights = dict.fromkeys(values, 0.0)
    for part in next(iter(values.values())):
        sizes = [parts[part] for parts in values.values()]
        axes.bar(list(values), sizes, bottom=list(heights.values()), label=part)
        heights = {name: heights[name] + values[name][part] for name in values}
    axes.legend()
    _finish(axes, title, unit)
    _save(figure, path)


def draw_lines(
    path: Path,
    title: str,
    x_label: str,
    unit: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    logarithmic: bool = False,
) -> None:
    """A line of (x, y) points for each name. ``logarithmic``: the x axis is."""
    figure, axes = pyplot.subplots(figsize=_INCHES)
    for name, points in series.items():
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
    if logarithmic:
        axes.set_xscale("log", base=2)
    axes.set_xlabel(x_label)
    axes.legend()
    _finish(axes, title, unit)
    _save(figure, path)


def _finish(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title)
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)


def _save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)
