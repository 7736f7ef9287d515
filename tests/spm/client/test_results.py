"""Answers as typed results: new fields are no trouble, missing ones are named."""

import copy
from typing import Any

import pytest

from spm.client import (
    AutoDecision,
    EditOutcome,
    GpuTier,
    HostTier,
    KeepAlive,
    ProtocolError,
    Queue,
    RemoteTier,
    ResidencyRange,
    Retention,
    RunningOperation,
)
from spm.client.fields import Fields
from spm.client.operation_results import parse_edits, parse_end, parse_operation
from spm.client.session_results import parse_page, parse_session
from spm.client.status_results import parse_status
from tests.spm.client.documents import (
    EDITS,
    ENDED,
    ENGINE,
    LISTED,
    SESSION,
    STATUS,
    operation,
    page,
)


def said(document: object) -> Fields:
    return Fields(document, "answer")


def without(document: dict[str, Any], path: str) -> dict[str, Any]:
    changed = copy.deepcopy(document)
    *above, last = path.split(".")
    place: Any = changed
    for key in above:
        place = place[int(key) if key.isdigit() else key]
    del place[last]
    return changed


def test_a_session() -> None:
    session = parse_session(said(SESSION))
    assert (session.id, session.parent_session_id, session.children) == ("run/1", "run", 2)
    assert (session.retention_class, session.ttl_left_s, session.blocks) == ("soon", 118.75, 41)
    assert (session.active_requests, session.idle_s, session.origin) == (1, 1.25, "local")
    assert session.auto == AutoDecision("offload", "60 s of pause cost more than a reload")
    assert session.operations == (RunningOperation("op-7", "prefetch", "accepted"),)
    residency = session.residency
    assert residency is not None
    assert (residency.gpu_blocks, residency.host_blocks, residency.remote_blocks) == (10, 41, 30)
    sizes = (residency.gpu_bytes, residency.host_bytes, residency.remote_bytes)
    assert sizes == (10 << 20, 41 << 20, 30 << 20)
    assert residency.age_s == 12.5
    assert residency.ranges == (
        ResidencyRange(0, 10, ("gpu", "host", "remote"), 10 << 20, 12.5, None),
        ResidencyRange(10, 41, (), 0, None, None),
    )
    assert session.raw == SESSION


def test_a_session_of_a_list_says_less() -> None:
    listed = parse_session(said({**LISTED, "parent_session_id": None}))
    assert (listed.residency, listed.auto, listed.operations) == (None, None, ())
    assert (listed.parent_session_id, listed.origin) == (None, "local")


def test_a_page() -> None:
    assert parse_page(said(page("a", "b", has_more=True)), None).next_after == "b"
    last = parse_page(said(page("c")), "b")
    assert ([one.id for one in last.sessions], last.next_after) == (["c"], None)


def test_edits() -> None:
    result = parse_edits(said(EDITS))
    assert (result.session_id, result.operation_id) == ("run/1", "op-1")
    assert (result.status, result.done, result.duplicate) == ("accepted", False, False)
    assert result.retention == Retention("soon", 120.0, 41)
    assert result.edits == (
        EditOutcome("prefetch", "accepted", 41, 10, 0, 41, "31 blocks are on their way"),
    )


@pytest.mark.parametrize(
    ("status", "edit", "done"),
    [
        ("ok", "ok", True),
        ("partial", "accepted", False),
        ("partial", "failed", True),
        ("deferred", "deferred", False),
    ],
)
def test_edits_are_done_when_nothing_goes_on(status: str, edit: str, done: bool) -> None:
    document = copy.deepcopy(EDITS)
    document["status"], document["edits"][0]["status"] = status, edit
    assert parse_edits(said(document)).done is done


def test_an_end() -> None:
    result = parse_end(said(ENDED))
    assert (result.id, result.deleted, result.ended) == ("run/1", True, ("run/1/a", "run/1"))


def test_an_operation() -> None:
    assert parse_operation(said(operation("accepted", done=False))).done is False
    assert parse_operation(said(without(operation(), "done"))).done is True
    assert parse_operation(said(without(operation("accepted"), "done"))).done is False


def test_a_status() -> None:
    (engine,) = parse_status(said(STATUS)).engines
    assert engine.gpu == GpuTier(1024, 700, 200, 2 << 20)
    assert engine.host == HostTier(2048, 4 << 30)
    assert engine.remote == RemoteTier(
        "redis",
        "redis://store:6379/0",
        "closed",
        9000,
        5 << 30,
        8 << 30,
        {"scheduler": "closed", "worker": "closed"},
    )
    assert engine.queues == {"load": Queue(0, 1, 3 << 20), "prefetch": Queue(5, 2, 0)}
    assert engine.keep_alive == KeepAlive(4096, 30.0, 0.5, 136.5)
    assert engine.capabilities == {"offload": True, "prefetch": True, "events": False}
    assert (engine.host_bytes_per_s, engine.remote_bytes_per_s) == (4e9, None)
    assert (engine.sessions, engine.active_requests, engine.operations) == (12, 3, 2)


def test_what_an_engine_does_not_have() -> None:
    bare = {**ENGINE, "tiers": {**ENGINE["tiers"], "host": None, "remote": None}}
    (engine,) = parse_status(said({"engines": [{**bare, "keep_alive": None}]})).engines
    assert (engine.host, engine.remote, engine.keep_alive) == (None, None, None)


@pytest.mark.parametrize("missing", ["used_bytes", "limit_bytes"])
def test_how_full_a_store_is_may_not_be_said(missing: str) -> None:
    place = f"engines.0.tiers.remote.{missing}"
    absent, null = without(STATUS, place), copy.deepcopy(STATUS)
    null["engines"][0]["tiers"]["remote"][missing] = None
    for document in (absent, null):
        (engine,) = parse_status(said(document)).engines
        assert engine.remote is not None
        assert getattr(engine.remote, missing) is None


def test_an_engine_without_a_status() -> None:
    silent = {"engine": 1, "status": "unsupported", "detail": "upgrade it"}
    status = parse_status(said({"engines": [ENGINE, silent]}))
    assert [one.engine for one in status.engines] == [0]
    assert [(one.engine, one.detail) for one in status.silent] == [(1, "upgrade it")]


def test_new_fields_are_no_trouble() -> None:
    newer = {**SESSION, "new": {}, "residency": {**SESSION["residency"], "disk": "?"}}
    assert parse_session(said(newer)) == parse_session(said(SESSION))
    engine = {**ENGINE, "capabilities": {**ENGINE["capabilities"], "new": ["a"]}}
    assert parse_status(said({"engines": [engine]})) == parse_status(said(STATUS))


NEEDED = [key for key in LISTED if key not in ("object", "parent_session_id")]


@pytest.mark.parametrize(
    ("parse", "document", "path"),
    [
        *((parse_session, SESSION, key) for key in NEEDED),
        (parse_session, SESSION, "residency.gpu"),
        (parse_session, SESSION, "residency.ranges.0.tiers"),
        (parse_session, SESSION, "auto.reason"),
        (parse_session, SESSION, "operations.0.id"),
        (parse_edits, EDITS, "operation_id"),
        (parse_edits, EDITS, "edits.0.status"),
        (parse_edits, EDITS, "retention.class"),
        (parse_end, ENDED, "deleted"),
        (parse_end, ENDED, "ended"),
        (parse_operation, operation(), "status"),
        (parse_status, STATUS, "engines"),
        (parse_status, STATUS, "engines.0.tiers"),
        (parse_status, STATUS, "engines.0.tiers.gpu.free_blocks"),
        (parse_status, STATUS, "engines.0.queues.load.waiting"),
    ],
)
def test_what_is_missing_is_named(parse: Any, document: dict[str, Any], path: str) -> None:  # noqa: ANN401
    shown = ".".join(part for part in path.split(".") if not part.isdigit())
    with pytest.raises(ProtocolError) as caught:
        parse(said(without(document, path)))
    named = str(caught.value).partition(":")[0].partition(" ")[0]
    assert named.replace("[0]", "") == f"answer.{shown}"


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": 5},
        {"blocks": "41"},
        {"blocks": True},
        {"blocks": 1.5},
        {"idle_s": "soon"},
        {"idle_s": True},
        {"idle_s": float("nan")},
        {"residency": []},
        {"residency": {**SESSION["residency"], "ranges": {}}},
        {"residency": {**SESSION["residency"], "ranges": [5]}},
        {"operations": "none"},
    ],
)
def test_what_has_another_type_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=rf"answer\.{next(iter(wrong))}"):
        parse_session(said({**SESSION, **wrong}))
