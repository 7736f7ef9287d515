"""A picture of a plan: how long a reload takes, against the gap, by context length."""

from pathlib import Path

from spm.errors import ConfigError
from spm.plan.break_even import reload_s
from spm.plan.capacity import Plan
from spm.plan.model_shape import ModelShape
from spm.plan.workload import Workload

_POINTS = 64
_BEYOND = 2.0
"""How far beyond the context, or the break-even, the picture goes."""


def draw_plan(path: Path, shape: ModelShape, plan: Plan, load: Workload) -> None:
    """Raises ConfigError where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError('--png needs matplotlib: pip install "vllm-spm[plots]"') from error
    longest = int(_BEYOND * max(load.context_tokens, plan.break_even_tokens or 0))
    contexts = [max(1, longest * step // _POINTS) for step in range(1, _POINTS + 1)]
    figure = Figure(figsize=(7.0, 4.0))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, speed, ranks in (
        ("host", load.link_bytes_per_s, 1),
        ("Redis", load.remote_bytes_per_s, load.tensor_parallel),
    ):
        sizes = [shape.rank_bytes(tokens, load.tensor_parallel) * ranks for tokens in contexts]
        axes.plot(contexts, [reload_s(one, speed) for one in sizes], label=f"reload from {name}")
    axes.axhline(load.gap_s, linestyle="--", color="tab:grey", label=f"gap of {load.gap_s:g} s")
    axes.axvline(load.context_tokens, linestyle=":", color="tab:grey", label="context")
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("seconds")
    axes.set_yscale("log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(str(path), dpi=120)
