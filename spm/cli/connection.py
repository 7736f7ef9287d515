"""The options that say which server, and the client they make."""

import argparse
import os
from typing import TYPE_CHECKING

from spm.cli.arguments import header
from spm.client import SpmClient

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = argparse._SubParsersAction

DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE = "SPM_URL"
KEY_VARIABLES = ("SPM_API_KEY", "VLLM_API_KEY")


def add_command(commands: Commands, name: str, summary: str) -> argparse.ArgumentParser:
    """A command that talks to a server: with its options, and ``--json``."""
    command = commands.add_parser(name, help=summary, description=summary)
    command.add_argument("--json", action="store_true", help="print one JSON document")
    server = command.add_argument_group("server")
    server.add_argument(
        "--url",
        default=os.environ.get(URL_VARIABLE) or DEFAULT_URL,
        help=f"where it is (default: ${URL_VARIABLE}, or {DEFAULT_URL})",
    )
    server.add_argument(
        "--api-key",
        metavar="KEY",
        default=next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None),
        help=f"its --api-key (default: ${' or $'.join(KEY_VARIABLES)}, which `ps` does not show)",
    )
    server.add_argument(
        "--tenant-header",
        metavar="NAME=VALUE",
        type=header,
        action="append",
        default=[],
        help="send this header, as the gateway in front of the server does",
    )
    return command


def connect(args: argparse.Namespace) -> SpmClient:
    """The client that the options ask for; the caller closes it."""
    return SpmClient(args.url, args.api_key, headers=dict(args.tenant_header))
