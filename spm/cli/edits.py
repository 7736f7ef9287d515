"""``spm prefetch``, ``spm offload`` and ``spm evict``."""

import argparse
from collections.abc import Iterator

from spm.cli.arguments import blocks, seconds
from spm.cli.connection import Commands, add_command, connect
from spm.cli.outcomes import exit_code_of, print_json
from spm.cli.tables import count, plain
from spm.client import EditsResult, Operation, SessionEdit

WAIT_S, LONGEST_WAIT_S = 600.0, 86_400.0
_SUMMARIES = {
    "prefetch": "load what is missing of a session",
    "offload": "store a session, then release what the GPU pool keeps for it",
    "evict": "give a session's blocks up",
}
_TARGETS = ("gpu", "host")


def add(commands: Commands) -> None:
    """Add the three commands."""
    for kind, summary in _SUMMARIES.items():
        command = add_command(commands, kind, summary)
        command.add_argument("id", metavar="ID")
        command.add_argument(
            "--blocks", type=blocks, metavar="START:END", help="only these, END not among them"
        )
        if kind == "prefetch":
            command.add_argument("--target", choices=_TARGETS, help="load it there (default: gpu)")
        command.add_argument("--wait", action="store_true", help="until it is done")
        command.add_argument(
            "--wait-timeout",
            type=seconds(0, LONGEST_WAIT_S),
            default=WAIT_S,
            metavar="SECONDS",
            help=f"how long at most (default: {WAIT_S:g})",
        )
        command.set_defaults(run=_edit, kind=kind, target=None)


def _edit(args: argparse.Namespace) -> int:
    start, end = args.blocks or (None, None)
    edit = SessionEdit(args.kind, start, end, args.target)
    result: EditsResult | Operation
    with connect(args) as client:
        result = answer = client.edit(args.id, [edit])
        if args.wait and not answer.done:
            result = client.wait(answer.operation_id, args.wait_timeout)
    if args.json:
        print_json(result.raw)
    else:
        print("\n".join(_render(args.id, answer.operation_id, result)))
    return exit_code_of(result.status)


def _render(session_id: str, operation_id: str, result: EditsResult | Operation) -> Iterator[str]:
    for one in result.edits:
        done = "" if one.done_blocks is None else f", {count(one.done_blocks)} done"
        why = f" ({plain(one.detail)})" if one.detail else ""
        yield f"{one.type} {session_id}: {one.status}, {count(one.blocks)} blocks{done}{why}"
    if not result.done:
        yield f"operation {operation_id} goes on"
