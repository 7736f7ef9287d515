"""What became of edits, ends and operations, typed.

All of it is frozen. ``raw`` is the whole JSON object, with what this version does not know.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spm.client.fields import Fields
from spm.operation import UNFINISHED

_UNFINISHED: frozenset[str] = UNFINISHED


@dataclass(frozen=True, slots=True)
class EditOutcome:
    """What became of one edit. ``blocks``: those it was about; ``done_blocks``: None: not said."""

    type: str
    status: str
    blocks: int
    done_blocks: int | None
    block_start: int | None
    block_end: int | None
    detail: str | None


@dataclass(frozen=True, slots=True)
class Retention:
    """How the session's blocks are kept from now on."""

    retention_class: str
    ttl_s: float
    blocks: int


@dataclass(frozen=True, slots=True)
class EditsResult:
    """The answer to edits and retention. ``duplicate``: the operation id was a repeat."""

    session_id: str
    operation_id: str
    status: str
    edits: tuple[EditOutcome, ...]
    retention: Retention | None
    duplicate: bool
    detail: str | None
    raw: Mapping[str, Any] = field(repr=False, compare=False)

    @property
    def done(self) -> bool:
        """Nothing of it goes on in the background."""
        return _done(self.status, self.edits)


@dataclass(frozen=True, slots=True)
class EndResult:
    """The answer to ending a session: the ids of all that ended, children first."""

    id: str
    deleted: bool
    status: str
    operation_id: str
    ended: tuple[str, ...]
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Operation:
    """What has become of an earlier operation so far."""

    id: str
    status: str
    edits: tuple[EditOutcome, ...]
    done: bool
    raw: Mapping[str, Any] = field(repr=False, compare=False)


def parse_edits(answer: Fields) -> EditsResult:
    """``POST /v1/sessions/{id}/edits``. All parsers raise :class:`ProtocolError`."""
    kept = answer.optional_object("retention")
    return EditsResult(
        session_id=answer.text("session_id"),
        operation_id=answer.text("operation_id"),
        status=answer.text("status"),
        edits=_parse_outcomes(answer),
        retention=None
        if kept is None
        else Retention(kept.text("class"), kept.number("ttl_s"), kept.count("blocks")),
        duplicate=answer.flag("duplicate", False),
        detail=answer.optional_text("detail"),
        raw=answer.raw,
    )


def parse_end(answer: Fields) -> EndResult:
    """The answer of ``DELETE /v1/sessions/{id}``."""
    return EndResult(
        id=answer.text("id"),
        deleted=answer.flag("deleted"),
        status=answer.text("status"),
        operation_id=answer.text("operation_id"),
        ended=answer.texts("ended"),
        raw=answer.raw,
    )


def parse_operation(answer: Fields) -> Operation:
    """The answer of ``GET /v1/operations/{id}``; one without ``done`` says it by its statuses."""
    status, edits = answer.text("status"), _parse_outcomes(answer)
    done = answer.flag("done", _done(status, edits))
    return Operation(answer.text("id"), status, edits, done, answer.raw)


def _parse_outcomes(answer: Fields) -> tuple[EditOutcome, ...]:
    return tuple(
        EditOutcome(
            type=one.text("type"),
            status=one.text("status"),
            blocks=one.count("blocks"),
            done_blocks=one.optional_count("done_blocks"),
            block_start=one.optional_count("block_start"),
            block_end=one.optional_count("block_end"),
            detail=one.optional_text("detail"),
        )
        for one in answer.optional_objects("edits")
    )


def _done(status: str, edits: tuple[EditOutcome, ...]) -> bool:
    return _UNFINISHED.isdisjoint({status, *(one.status for one in edits)})
