"""``spm plan``: what to provision for a model and a workload, or what a server's metrics say."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from spm.cli.arguments import whole_number
from spm.cli.connection import Commands
from spm.cli.outcomes import EXIT_OK, print_json
from spm.cli.plan_view import as_json, plan_lines
from spm.cli.tables import table
from spm.errors import ConfigError
from spm.plan.advice import advise
from spm.plan.capacity import make_plan
from spm.plan.config_fields import read_config
from spm.plan.drawing import draw_plan
from spm.plan.model_shape import DTYPE_BYTES, model_shape
from spm.plan.quantities import bandwidth, size_bytes
from spm.plan.workload import TAIL, Workload, gpu_kv_bytes

_TIMEOUT_S = 10.0
_MOST = 10**9


def add(commands: Commands) -> None:
    """Add the command."""
    plan = commands.add_parser("plan", help="what to provision for a model and a workload")
    plan.add_argument("model", nargs="?", type=Path, help="config.json, or the model's directory")
    plan.add_argument(
        "--from", dest="url", metavar="URL", help="a running server: what to change, and why"
    )
    _add_workload(plan)
    _add_machine(plan)
    plan.add_argument("--json", metavar="FILE", default=False, help="as JSON; - is the output")
    plan.add_argument("--png", type=Path, metavar="FILE", help="a picture of hold against reload")

    def run(args: argparse.Namespace) -> int:
        if (args.model is None) == (args.url is None):
            plan.error("a model, or --from URL: one of them is needed")
        return _advise(args) if args.url else _plan(args)

    plan.set_defaults(run=run)


def _add_workload(plan: argparse.ArgumentParser) -> None:
    tokens = whole_number(1, _MOST)
    plan.add_argument("--context", type=tokens, default=15_000, help="tokens of a session")
    plan.add_argument("--turn", type=tokens, default=1_000, help="tokens that a turn adds")
    plan.add_argument("--gap", type=float, default=1.1, help="mean seconds between two turns")
    plan.add_argument("--gap-p99", type=float, help="its 99th percentile (default: 4.6 x --gap)")
    plan.add_argument("--concurrency", type=tokens, default=32, help="sessions at a time")


def _add_machine(plan: argparse.ArgumentParser) -> None:
    plan.add_argument(
        "--link", type=bandwidth, default=bandwidth("pcie5x16"), help="pcie4x16, ... or GB/s"
    )
    plan.add_argument(
        "--remote-link", type=bandwidth, default=3.1e9, help="to Redis, GB/s (default: 3.1)"
    )
    plan.add_argument("--dtype", choices=["auto", *DTYPE_BYTES], default="auto", help="of the KV")
    plan.add_argument("--gpu-kv-bytes", type=size_bytes, help="of one GPU for KV, as 60GiB")
    plan.add_argument("--gpu-memory", type=size_bytes, help="of one GPU; with --weights")
    plan.add_argument("--weights", type=size_bytes, help="of the whole model, as 65.6GB")
    plan.add_argument("--host-bytes", type=size_bytes, help="of one worker's host tier")
    plan.add_argument("--tp", type=whole_number(1, 1024), default=1, help="tensor parallel ranks")
    plan.add_argument("--block-size", type=whole_number(1, 4096), default=16, help="tokens")


def _plan(args: argparse.Namespace) -> int:
    shape = model_shape(read_config(args.model), args.dtype)
    load = _workload(args)
    made = make_plan(shape, load)
    _show(args, as_json(made), lambda: plan_lines(made, load))
    if args.png is not None:
        draw_plan(args.png, shape, made, load)
        print(f"picture: {args.png}", file=sys.stderr)
    return EXIT_OK


def _workload(args: argparse.Namespace) -> Workload:
    """Raises ConfigError for numbers that make no sense together."""
    kv_bytes = args.gpu_kv_bytes
    if (args.gpu_memory is None) != (args.weights is None):
        raise ConfigError("--gpu-memory and --weights: both are needed, or --gpu-kv-bytes")
    if args.gpu_memory is not None:
        kv_bytes = gpu_kv_bytes(args.gpu_memory, args.weights, args.tp)
    return Workload(
        context_tokens=args.context,
        gap_s=args.gap,
        gap_p99_s=args.gap * TAIL if args.gap_p99 is None else args.gap_p99,
        concurrency=args.concurrency,
        link_bytes_per_s=args.link,
        remote_bytes_per_s=args.remote_link,
        turn_tokens=args.turn,
        tensor_parallel=args.tp,
        block_tokens=args.block_size,
        gpu_kv_bytes=kv_bytes,
        host_bytes=args.host_bytes,
    )


def _advise(args: argparse.Namespace) -> int:
    url = args.url.rstrip("/") + "/metrics"
    try:
        answer = httpx.get(url, timeout=_TIMEOUT_S).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"--from {args.url}: {url} gave no metrics: {error}") from error
    found = advise(answer.text)
    rows = [(one.change, one.why) for one in found]
    _show(
        args,
        {"advice": [{"change": change, "why": why} for change, why in rows]},
        lambda: (
            table(("change", "why"), rows, left=2)
            if rows
            else ["Nothing to change, as far as these metrics say."]
        ),
    )
    return EXIT_OK


def _show(
    args: argparse.Namespace, document: dict[str, Any], lines: Callable[[], Sequence[str]]
) -> None:
    """A table, or JSON in its place or beside it."""
    if args.json != "-":
        print("\n".join(lines()))
    else:
        print_json(document)
    if args.json and args.json != "-":
        Path(args.json).write_text(json.dumps(document, indent=2) + "\n")
