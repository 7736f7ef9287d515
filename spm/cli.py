"""The ``spm`` command."""

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

from spm.demo.phases import SELECTABLE
from spm.demo.runner import DemoOptions, run_demo
from spm.errors import SpmError

_DISTRIBUTION = "vllm-spm"
_EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the process's exit code."""
    args = _build_parser().parse_args(argv)
    try:
        exit_code: int = args.run(args)
    except SpmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    return exit_code


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spm", description="Session-aware pooling for vLLM.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_version(commands)
    return parser


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    demo = commands.add_parser(
        "demo", help="agents outlive the GPU cache of a real vLLM server (5 to 12 minutes)"
    )
    names = [phase.name for phase in SELECTABLE]
    demo.add_argument(
        "--phases",
        type=lambda text: text.split(","),
        metavar="NAME[,NAME]",
        help=f"run only these, and the reference: {', '.join(names)}",
    )
    demo.add_argument("--model", type=Path, help="another model directory (default: build one)")
    demo.set_defaults(run=lambda args: _demo(args, demo, names))


def _demo(args: argparse.Namespace, parser: argparse.ArgumentParser, known: list[str]) -> int:
    unknown = sorted(set(args.phases or ()) - set(known))
    if unknown:
        parser.error(f"--phases {','.join(unknown)}: choose from {', '.join(known)}")
    return run_demo(DemoOptions(phases=args.phases, model=args.model))


def _add_version(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=_version)


def _version(_args: argparse.Namespace) -> int:
    print(f"{_DISTRIBUTION} {importlib.metadata.version(_DISTRIBUTION)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
