"""``spm status``: engines, their tiers and queues."""

import argparse
from collections.abc import Iterator

from spm.cli.connection import Commands, add_command, connect
from spm.cli.outcomes import EXIT_OK, print_json
from spm.cli.tables import NOTHING, count, duration, plain, size, speed, table
from spm.client import EngineStatus, RemoteTier, ServerStatus


def add(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, "status", "engines, tiers and queues of a server")
    command.set_defaults(run=_status)


def _status(args: argparse.Namespace) -> int:
    with connect(args) as client:
        status = client.status()
    if args.json:
        print_json(status.raw)
    else:
        print("\n".join(render(status)))
    return EXIT_OK


def render(status: ServerStatus) -> Iterator[str]:
    """The lines for people."""
    for n, engine in enumerate(status.engines):
        yield from [""] * (n > 0)
        yield from _engine(engine)
    for silent in status.silent:
        why = silent.detail or "no reason given"
        yield f"engine {silent.engine}: {silent.status} ({plain(why)})"


def _engine(engine: EngineStatus) -> Iterator[str]:
    yield (
        f"engine {engine.engine}: {count(engine.sessions)} sessions, "
        f"{count(engine.active_requests)} active requests, "
        f"{count(engine.session_keys)} keys of sessions, "
        f"{count(engine.operations)} operations in progress"
    )
    yield ""
    yield from table(("TIER", "STATE", "BLOCKS", "FREE", "PROTECTED", "SIZE"), _tiers(engine), 2)
    yield ""
    yield from table(
        ("QUEUE", "WAITING", "IN FLIGHT", "BYTES"),
        (
            (name, count(q.waiting), count(q.in_flight), size(q.in_flight_bytes))
            for name, q in engine.queues.items()
        ),
    )
    yield ""
    yield f"keep-alive  {_keep_alive(engine)}"
    yield (
        f"loads       host {speed(engine.host_bytes_per_s)}, "
        f"remote {speed(engine.remote_bytes_per_s)}"
    )
    yield f"offers      {_names(engine, True)}"
    yield f"lacks       {_names(engine, False)}"


def _tiers(engine: EngineStatus) -> Iterator[tuple[str, ...]]:
    gpu, host, remote = engine.gpu, engine.host, engine.remote
    if gpu is not None:
        yield (
            "gpu",
            f"{size(gpu.block_bytes)} a block",
            count(gpu.blocks),
            count(gpu.free_blocks),
            count(gpu.protected_blocks),
            size(gpu.blocks * gpu.block_bytes),
        )
    if host is not None:
        held = (count(host.blocks), NOTHING, NOTHING, size(host.capacity_bytes))
        yield ("host", NOTHING, *held)
    if remote is not None:
        state = f"{remote.kind} {remote.url}, breaker {_breaker(remote)}"
        yield ("remote", state, count(remote.known_blocks), NOTHING, NOTHING, _fullness(remote))


def _breaker(remote: RemoteTier) -> str:
    """Sides are named only if they differ."""
    shown = remote.breaker
    if len(set(remote.breakers.values())) > 1:
        sides = ", ".join(f"{side} {state}" for side, state in remote.breakers.items())
        shown += f" ({sides})"
    return f"{plain(shown)}, slower than computing" if remote.slow else plain(shown)


def _fullness(remote: RemoteTier) -> str:
    if remote.used_bytes is None:
        return NOTHING
    if remote.limit_bytes is None:
        return f"{size(remote.used_bytes)} used"
    return f"{size(remote.used_bytes)} of {size(remote.limit_bytes)}"


def _keep_alive(engine: EngineStatus) -> str:
    kept = engine.keep_alive
    if kept is None:
        return "none"
    return (
        f"{count(kept.keys)} keys every {duration(kept.interval_s)}, "
        f"{kept.keys_per_s:,.0f} keys/s, {duration(kept.behind_s)} behind"
    )


def _names(engine: EngineStatus, offered: bool) -> str:
    names = [name for name, has in engine.capabilities.items() if has is offered]
    return plain(", ".join(names)) or "nothing"
