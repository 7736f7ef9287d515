"""``spm top``: a view that is drawn again and again.

Plain redrawing from the top left corner: nothing about the terminal is changed, so there is
nothing to restore, however the command ends.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from spm.cli.arguments import seconds
from spm.cli.connection import Commands, add_command, connect
from spm.cli.outcomes import EXIT_OK, print_json
from spm.cli.sessions import session_rows
from spm.cli.tables import NOTHING, count, duration, plain, table
from spm.client import EngineStatus, ServerStatus, Session, SpmClient, SpmClientError

LOOKED_AT = 1000
"""Sessions asked for each time: one page, so that looking never holds a scheduler up for long."""
SHOWN = 20
DEFAULT_INTERVAL_S = 2.0
SHORTEST_INTERVAL_S, LONGEST_INTERVAL_S = 0.2, 3600.0
_STORE_STATES = {"closed": "up", "half_open": "probed", "open": "down"}
"""How a store is, by its circuit breaker."""
_CLEAR, _HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[2J", "\x1b[H", "\x1b[K", "\x1b[J"


@dataclass(frozen=True, slots=True)
class View:
    """What one look found; ``more``: there are sessions that were not looked at."""

    status: ServerStatus
    busiest: Sequence[Session]
    more: bool


def add(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, "top", "a live view of engines and the busiest sessions")
    command.add_argument(
        "--interval",
        type=seconds(SHORTEST_INTERVAL_S, LONGEST_INTERVAL_S),
        default=DEFAULT_INTERVAL_S,
        metavar="SECONDS",
        help=f"between two looks (default: {DEFAULT_INTERVAL_S:g})",
    )
    command.add_argument("--once", action="store_true", help="look once and end")

    def run(args: argparse.Namespace) -> int:
        if args.json and not args.once:
            command.error("--json prints one document: use it with --once")
        return _top(args)

    command.set_defaults(run=run)


def _top(args: argparse.Namespace) -> int:
    with connect(args) as client:
        view = look(client)
        if args.json:
            sessions = [one.raw for one in view.busiest]
            print_json({"object": "spm.top", "status": view.status.raw, "sessions": sessions})
        elif args.once:
            print("\n".join(render(view)))
        else:
            watch(client, view, args.interval, sys.stdout, time.sleep)
    return EXIT_OK


def look(client: SpmClient) -> View:
    """Ask a server once; raises :class:`SpmClientError`."""
    status, page = client.status(), client.sessions(LOOKED_AT)
    busiest = sorted(page.sessions, key=lambda s: (-s.active_requests, s.idle_s, s.id))
    return View(status, busiest[:SHOWN], page.next_after is not None)


def watch(
    client: SpmClient, view: View, interval_s: float, out: TextIO, sleep: Callable[[float], None]
) -> None:
    """Draw ``view`` and what is found later, until interrupted. An error is shown and outlived."""
    trouble: str | None = None
    screen = _Screen(out)
    try:
        while True:
            lines = [*render(view), *([f"stale: {plain(trouble)}"] if trouble else [])]
            screen.draw(lines)
            sleep(interval_s)
            try:
                view, trouble = look(client), None
            except SpmClientError as error:
                trouble = str(error)
    except KeyboardInterrupt:
        out.write("\n")  # the shell's prompt goes below the view


class _Screen:
    """The terminal ``out`` is, or a file that gets one drawing after the other."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._tty = out.isatty()
        if self._tty:
            out.write(_CLEAR)

    def draw(self, lines: list[str]) -> None:
        if self._tty:
            columns, rows = shutil.get_terminal_size()
            cut = (line[:columns] + _END_OF_LINE for line in lines[: rows - 1])
            self._out.write(_HOME + "\n".join(cut) + _END_OF_SCREEN)
        else:
            self._out.write("\n".join(lines) + "\n\n")
        self._out.flush()


def render(view: View) -> Iterator[str]:
    """The lines of one drawing."""
    yield from _engines(view.status)
    for silent in view.status.silent:
        yield f"engine {silent.engine}: {silent.status}"
    yield ""
    yield from session_rows(view.busiest) if view.busiest else ["no sessions"]
    if view.more:
        yield f"(the busiest of the first {LOOKED_AT:,} by id)"


def _engines(status: ServerStatus) -> list[str]:
    queues = list(dict.fromkeys(name for one in status.engines for name in one.queues))
    return table(
        (
            *("ENGINE", "SESSIONS", "ACTIVE", "GPU FREE", "PROTECTED", "HOST", "REMOTE"),
            *(name.upper() for name in queues),
            *("BEHIND", "OPERATIONS"),
        ),
        (_engine(one, queues) for one in status.engines),
    )


def _engine(one: EngineStatus, queues: list[str]) -> tuple[str, ...]:
    """A queue is shown as ``waiting+in flight``."""
    gpu, host, remote = one.gpu, one.host, one.remote
    return (
        str(one.engine),
        count(one.sessions),
        count(one.active_requests),
        f"{count(gpu.free_blocks)}/{count(gpu.blocks)}" if gpu else NOTHING,
        count(gpu.protected_blocks) if gpu else NOTHING,
        count(host.blocks) if host else NOTHING,
        _STORE_STATES.get(remote.breaker, remote.breaker) if remote else NOTHING,
        *(
            f"{q.waiting}+{q.in_flight}" if (q := one.queues.get(name)) else NOTHING
            for name in queues
        ),
        duration(one.keep_alive.behind_s) if one.keep_alive else NOTHING,
        count(one.operations),
    )
