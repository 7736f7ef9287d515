"""The ``spm`` command. One file a group of commands, each with an ``add``.

Exit codes are in :mod:`spm.cli.outcomes`.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from spm.cli import demo, edits, plan, sessions, status, top, version
from spm.cli.outcomes import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_USAGE_HELP, report
from spm.demo.runner import run_demo
from spm.errors import SpmError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the process's exit code."""
    args = _build_parser().parse_args(argv)
    try:
        exit_code: int = args.run(args)
        sys.stdout.flush()
    except SpmError as error:
        return report(error, as_json=args.json)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    return exit_code


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spm", description="Session-aware pooling for vLLM.", epilog=EXIT_USAGE_HELP
    )
    parser.set_defaults(json=False)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    status.add(commands)
    sessions.add(commands)
    edits.add(commands)
    top.add(commands)
    plan.add(commands)
    demo.add(commands, run_demo)
    version.add(commands)
    return parser
