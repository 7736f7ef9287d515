"""What a server says about sessions, typed.

All of it is frozen. ``raw`` is the whole JSON object, with what this version does not know.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spm.client.errors import ProtocolError
from spm.client.fields import Fields


@dataclass(frozen=True, slots=True)
class ResidencyRange:
    """The session's blocks ``[block_start, block_end)`` are in the same ``tiers``.

    ``engine`` is given where several engines hold the session: each counts for itself.
    """

    block_start: int
    block_end: int
    tiers: tuple[str, ...]
    size_bytes: int | None
    age_s: float | None
    engine: int | None


@dataclass(frozen=True, slots=True)
class Residency:
    """How many of the session's blocks each tier holds, as last confirmed.

    ``age_s``: age of the oldest knowledge about the remote tier; None: there is none. Sizes
    are None where the server does not say.
    """

    gpu_blocks: int
    host_blocks: int
    remote_blocks: int
    gpu_bytes: int | None
    host_bytes: int | None
    remote_bytes: int | None
    age_s: float | None
    ranges: tuple[ResidencyRange, ...]


@dataclass(frozen=True, slots=True)
class AutoDecision:
    """What the auto mode decided: ``retain``, ``offload`` or ``drop``, and why."""

    decision: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunningOperation:
    """An operation of a session that is in progress."""

    id: str
    type: str
    status: str


@dataclass(frozen=True, slots=True)
class Session:
    """One session. ``residency`` is None in lists, where it is not asked for.

    ``origin``: ``local``, or ``manifest`` for a session that the engine only knows from the store.
    """

    id: str
    parent_session_id: str | None
    children: int
    active_requests: int
    idle_s: float
    ttl_left_s: float
    retention_class: str
    blocks: int
    residency: Residency | None
    auto: AutoDecision | None
    operations: tuple[RunningOperation, ...]
    origin: str
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class SessionPage:
    """Sessions ascending by id; ``next_after`` is where the next page starts, None: no more."""

    sessions: tuple[Session, ...]
    next_after: str | None
    raw: Mapping[str, Any] = field(repr=False, compare=False)


def parse_session(answer: Fields) -> Session:
    """All parsers raise :class:`ProtocolError` for what is missing or of another type."""
    residency, auto = answer.optional_object("residency"), answer.optional_object("auto")
    return Session(
        id=answer.text("id"),
        parent_session_id=answer.optional_text("parent_session_id"),
        children=answer.count("children"),
        active_requests=answer.count("active_requests"),
        idle_s=answer.number("idle_s"),
        ttl_left_s=answer.number("ttl_left_s"),
        retention_class=answer.text("class"),
        blocks=answer.count("blocks"),
        residency=None if residency is None else _parse_residency(residency),
        auto=None if auto is None else AutoDecision(auto.text("decision"), auto.text("reason")),
        operations=tuple(
            RunningOperation(one.text("id"), one.text("type"), one.text("status"))
            for one in answer.optional_objects("operations")
        ),
        origin=answer.text("origin", "local"),
        raw=answer.raw,
    )


def parse_page(answer: Fields, after: str | None) -> SessionPage:
    """A page of ``GET /v1/sessions``; one that does not lead on would be asked for endlessly."""
    sessions = tuple(parse_session(one) for one in answer.objects("data"))
    more = answer.flag("has_more")
    if more and (not sessions or sessions[-1].id <= (after or "")):
        raise ProtocolError(f"answer.has_more: this page does not lead beyond {after!r}")
    return SessionPage(sessions, sessions[-1].id if more else None, answer.raw)


def _parse_residency(said: Fields) -> Residency:
    return Residency(
        gpu_blocks=said.count("gpu"),
        host_blocks=said.count("host"),
        remote_blocks=said.count("remote"),
        gpu_bytes=said.optional_count("gpu_bytes"),
        host_bytes=said.optional_count("host_bytes"),
        remote_bytes=said.optional_count("remote_bytes"),
        age_s=said.optional_number("age_s"),
        ranges=tuple(
            ResidencyRange(
                block_start=one.count("block_start"),
                block_end=one.count("block_end"),
                tiers=one.texts("tiers"),
                size_bytes=one.optional_count("bytes"),
                age_s=one.optional_number("age_s"),
                engine=one.optional_count("engine"),
            )
            for one in said.optional_objects("ranges")
        ),
    )
