"""``spm sessions`` and ``spm session ID``."""

import argparse
from collections.abc import Iterable

from spm.cli.arguments import whole_number
from spm.cli.connection import Commands, add_command, connect
from spm.cli.outcomes import EXIT_OK, print_json
from spm.cli.session_view import render
from spm.cli.tables import count, duration, table
from spm.client import Session

MAX_LIMIT = 1000


def add(commands: Commands) -> None:
    """Add both commands."""
    many = add_command(commands, "sessions", "list sessions by id")
    many.add_argument(
        "--limit", type=whole_number(1, MAX_LIMIT), default=100, help="how many (default: 100)"
    )
    many.add_argument("--after", metavar="ID", help="only ids above this one")
    many.set_defaults(run=_sessions)
    one = add_command(commands, "session", "where a session's blocks are, and what is done with it")
    one.add_argument("id", metavar="ID")
    one.set_defaults(run=_session)


def session_rows(sessions: Iterable[Session]) -> list[str]:
    """A table of sessions."""
    return table(
        ("SESSION", "CLASS", "TTL LEFT", "ACTIVE", "IDLE", "BLOCKS"),
        (
            (
                one.id,
                one.retention_class,
                duration(one.ttl_left_s),
                count(one.active_requests),
                duration(one.idle_s),
                count(one.blocks),
            )
            for one in sessions
        ),
        left=2,
    )


def _sessions(args: argparse.Namespace) -> int:
    with connect(args) as client:
        page = client.sessions(args.limit, args.after)
    if args.json:
        print_json(page.raw)
        return EXIT_OK
    print("\n".join(session_rows(page.sessions)) if page.sessions else "no sessions")
    if page.next_after is not None:
        print(f"there are more: --after {page.next_after}")
    return EXIT_OK


def _session(args: argparse.Namespace) -> int:
    with connect(args) as client:
        session = client.get_session(args.id)
    if args.json:
        print_json(session.raw)
    else:
        print("\n".join(render(session)))
    return EXIT_OK
