"""``spm prefetch``, ``spm offload``, ``spm evict``."""

import copy
from typing import Any

import pytest

from tests.spm.cli.command import Spm
from tests.spm.client.documents import EDITS, error, operation

PATH = "/v1/sessions/run%2F1/edits"


def edited(status: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
    document = copy.deepcopy(EDITS)
    document["status"] = document["edits"][0]["status"] = status
    document["edits"][0].update(fields)
    return document


@pytest.mark.parametrize(
    ("argv", "edit"),
    [
        (["prefetch", "run/1"], {"type": "prefetch"}),
        (["prefetch", "run/1", "--target", "host"], {"type": "prefetch", "target": "host"}),
        (["offload", "run/1"], {"type": "offload"}),
        (
            ["evict", "run/1", "--blocks", "0:8"],
            {"type": "evict", "block_start": 0, "block_end": 8},
        ),
    ],
)
def test_what_is_asked(argv: list[str], edit: dict[str, Any], spm: Spm) -> None:
    spm.server.answers("POST", PATH, EDITS)
    assert spm(*argv).code == 0
    assert spm.server.requests[0].body == {"edits": [edit]}


def test_what_is_told(spm: Spm) -> None:
    spm.server.answers("POST", PATH, EDITS)
    assert spm("prefetch", "run/1").out == (
        "prefetch run/1: accepted, 41 blocks, 10 done (31 blocks are on their way)\n"
        "operation op-1 goes on\n"
    )


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("ok", 0),
        ("accepted", 0),
        ("deferred", 0),
        ("not_found", 3),
        ("partial", 4),
        ("unsupported", 4),
        ("rejected", 4),
        ("failed", 4),
        ("anything new", 4),
    ],
)
def test_the_exit_code_is_the_outcome(status: str, code: int, spm: Spm) -> None:
    spm.server.answers("POST", PATH, edited(status))
    outcome = spm("offload", "run/1", "--json")
    assert (outcome.code, outcome.document) == (code, edited(status))


def test_waiting(spm: Spm) -> None:
    spm.server.answers("POST", PATH, EDITS)
    found = [operation("accepted", done=False), operation("partial")]
    spm.server.answers("GET", "/v1/operations/op-1", *found)
    outcome = spm("prefetch", "run/1", "--wait")
    assert (outcome.code, outcome.out) == (4, "prefetch run/1: partial, 41 blocks, 41 done\n")
    assert len(spm.server.requests) == 3


def test_waiting_for_machines_gives_the_operation(spm: Spm) -> None:
    spm.server.answers("POST", PATH, EDITS)
    spm.server.answers("GET", "/v1/operations/op-1", operation())
    outcome = spm("prefetch", "run/1", "--wait", "--json")
    assert (outcome.code, outcome.document) == (0, operation())


def test_what_is_done_is_not_waited_for(spm: Spm) -> None:
    spm.server.answers("POST", PATH, edited("ok"))
    assert spm("evict", "run/1", "--wait").code == 0
    assert len(spm.server.requests) == 1


def test_waiting_ends(spm: Spm) -> None:
    spm.server.answers("POST", PATH, EDITS)
    spm.server.answers("GET", "/v1/operations/op-1", operation("accepted", done=False))
    outcome = spm("prefetch", "run/1", "--wait", "--wait-timeout", "0")
    assert outcome.code == 4
    assert outcome.err == "error: not done after 0 s; it goes on\n"


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [(404, "not_found", 3), (429, "rejected", 4), (503, "failed", 1)],
)
def test_refusals(code: int, status: str, exit_code: int, spm: Spm) -> None:
    spm.server.answers("POST", PATH, error(code, "no", status), code=code)
    outcome = spm("evict", "run/1")
    assert (outcome.code, outcome.out, outcome.err) == (exit_code, "", "error: no\n")


@pytest.mark.parametrize(
    "argv",
    [
        ["prefetch"],
        ["prefetch", "a b"],
        ["prefetch", "s", "--target", "moon"],
        ["offload", "s", "--target", "host"],
        ["evict", "s", "--blocks", "5"],
        ["evict", "s", "--blocks", "5:5"],
        ["evict", "s", "--blocks", "-1:5"],
        ["evict", "s", "--blocks", "1:5:6"],
        ["evict", "s", "--wait-timeout", "nan"],
        ["sessions", "--limit", "0"],
        ["sessions", "--limit", "1001"],
        ["session", "s", "--tenant-header", "X-Tenant"],
        ["session", "s", "--url", "localhost:8000"],
        ["top", "--json"],
        ["top", "--interval", "0"],
    ],
)
def test_usage_errors(argv: list[str], spm: Spm) -> None:
    outcome = spm(*argv)
    assert (outcome.code, outcome.out) == (2, "")
    assert "error: " in outcome.err
    assert spm.server.requests == []
