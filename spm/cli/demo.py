"""``spm demo``."""

import argparse
from collections.abc import Callable
from pathlib import Path

from spm.cli.connection import Commands
from spm.demo.phases import REDIS_STORE, STORES
from spm.demo.runner import DemoOptions


def add(commands: Commands, run_demo: Callable[[DemoOptions], int]) -> None:
    """Add the command; ``run_demo`` does it."""
    demo = commands.add_parser(
        "demo", help="agents outlive the GPU cache of a real vLLM server (5 to 12 minutes)"
    )
    demo.add_argument(
        "--store",
        choices=STORES,
        default=REDIS_STORE.name,
        help="where KV is kept: %(choices)s (default: %(default)s)",
    )
    demo.add_argument(
        "--phases",
        type=lambda text: text.split(","),
        metavar="NAME[,NAME]",
        help=f"run only these, and the reference: {_phase_names()}",
    )
    demo.add_argument("--model", type=Path, help="another model directory (default: build one)")

    def run(args: argparse.Namespace) -> int:
        names = [phase.name for phase in STORES[args.store].phases]
        unknown = sorted(set(args.phases or ()) - set(names))
        if unknown:
            demo.error(f"--phases {','.join(unknown)}: choose from {', '.join(names)}")
        return run_demo(DemoOptions(args.store, args.phases, args.model))

    demo.set_defaults(run=run)


def _phase_names() -> str:
    return "; ".join(
        f"{', '.join(phase.name for phase in store.phases)} ({name})"
        for name, store in STORES.items()
    )
