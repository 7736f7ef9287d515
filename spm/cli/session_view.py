"""One session for people: how it is kept, where its blocks are, what goes on."""

from collections.abc import Iterator

from spm.cli.tables import NOTHING, count, duration, plain, size, table
from spm.client import Residency, ResidencyRange, Session


def render(session: Session) -> Iterator[str]:
    """The lines."""
    yield from _facts(session)
    if session.residency is not None:
        yield ""
        yield from _tiers(session.residency)
    if session.residency is not None and session.residency.ranges:
        yield ""
        yield from _ranges(session.residency.ranges)
    if session.operations:
        yield ""
        yield from table(
            ("OPERATION", "TYPE", "STATUS"),
            ((one.id, one.type, one.status) for one in session.operations),
            left=3,
        )


def _facts(session: Session) -> Iterator[str]:
    auto = session.auto
    facts = {
        "session": session.id,
        "parent": session.parent_session_id or NOTHING,
        "children": count(session.children),
        "known": {"local": "from its requests", "manifest": "only from the store"}.get(
            session.origin, session.origin
        ),
        "retention": f"{session.retention_class}, {duration(session.ttl_left_s)} left",
        "requests": f"{count(session.active_requests)} active, idle {duration(session.idle_s)}",
        "blocks": count(session.blocks),
        "auto": f"{auto.decision}: {auto.reason}" if auto is not None else "nothing decided",
    }
    for name, value in facts.items():
        yield f"{name:<10} {plain(value)}"


def _tiers(residency: Residency) -> Iterator[str]:
    tiers = {
        "gpu": (residency.gpu_blocks, residency.gpu_bytes, None),
        "host": (residency.host_blocks, residency.host_bytes, None),
        "remote": (residency.remote_blocks, residency.remote_bytes, residency.age_s),
    }
    yield from table(
        ("TIER", "BLOCKS", "SIZE", "ASKED AGO"),
        (
            (tier, count(blocks), size(size_bytes), duration(age_s))
            for tier, (blocks, size_bytes, age_s) in tiers.items()
        ),
    )


def _ranges(ranges: tuple[ResidencyRange, ...]) -> list[str]:
    """A line a range, with its engine where there are several."""
    return table(
        ("BLOCKS", "TIERS", "SIZE", "ASKED AGO"),
        (
            (
                f"{one.block_start}:{one.block_end}" + _engine(one),
                " ".join(one.tiers) or "nowhere",
                size(one.size_bytes),
                duration(one.age_s),
            )
            for one in ranges
        ),
        left=2,
    )


def _engine(one: ResidencyRange) -> str:
    return "" if one.engine is None else f" (engine {one.engine})"
