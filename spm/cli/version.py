"""``spm version``."""

import argparse
import importlib.metadata

from spm.cli.connection import Commands
from spm.cli.outcomes import EXIT_OK

_DISTRIBUTION = "vllm-spm"


def add(commands: Commands) -> None:
    """Add the command."""
    commands.add_parser("version", help="print the version").set_defaults(run=_version)


def _version(_args: argparse.Namespace) -> int:
    print(f"{_DISTRIBUTION} {importlib.metadata.version(_DISTRIBUTION)}")
    return EXIT_OK
