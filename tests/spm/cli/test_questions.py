"""``spm status``, ``spm sessions``, ``spm session``: what people and machines see."""

import os
import subprocess
import sys

import pytest

from tests.spm.cli.command import Spm
from tests.spm.client.documents import ENGINE, LISTED, SESSION, STATUS, error, page

SESSION_PATH = "/v1/sessions/run%2F1"


def test_status(spm: Spm) -> None:
    spm.server.answers("GET", "/v1/spm/status", STATUS)
    outcome = spm("status")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == (
        "engine 0: 12 sessions, 3 active requests, 4,096 keys of sessions, "
        "2 operations in progress\n"
        "\n"
        "TIER    STATE                                       BLOCKS  FREE  PROTECTED"
        "                SIZE\n"
        "gpu     2.0 MiB a block                              1,024   700        200"
        "             2.0 GiB\n"
        "host    -                                            2,048     -          -"
        "             4.0 GiB\n"
        "remote  redis redis://store:6379/0, breaker closed   9,000     -          -"
        "  5.0 GiB of 8.0 GiB\n"
        "\n"
        "QUEUE     WAITING  IN FLIGHT    BYTES\n"
        "load            0          1  3.0 MiB\n"
        "prefetch        5          2      0 B\n"
        "\n"
        "keep-alive  4,096 keys every 30.0 s, 136 keys/s, 0.5 s behind\n"
        "loads       host 3.7 GiB/s, remote -\n"
        "offers      offload, prefetch\n"
        "lacks       events\n"
    )


@pytest.mark.parametrize(
    ("fullness", "shown"),
    [
        ({"used_bytes": 5 << 30, "limit_bytes": None}, "5.0 GiB used"),
        ({"used_bytes": 0, "limit_bytes": 8 << 30}, "0 B of 8.0 GiB"),
        ({"used_bytes": None, "limit_bytes": None}, "-"),
        ({}, "-"),
    ],
)
def test_how_full_the_store_is(spm: Spm, fullness: dict[str, int | None], shown: str) -> None:
    remote = {"kind": "redis", "url": "redis://s", "breaker": "closed", "known_blocks": 1}
    tiers = {**ENGINE["tiers"], "remote": {**remote, **fullness}}
    spm.server.answers("GET", "/v1/spm/status", {"engines": [{**ENGINE, "tiers": tiers}]})
    (line,) = [line for line in spm("status").out.splitlines() if line.startswith("remote")]
    assert line.endswith(f"  {shown}")


@pytest.mark.parametrize(
    ("health", "shown"),
    [
        ({"breaker": "closed"}, "breaker closed"),
        (
            {"breaker": "open", "breakers": {"scheduler": "closed", "worker": "open"}},
            "breaker open (scheduler closed, worker open)",
        ),
        ({"breaker": "open", "breakers": {"scheduler": "open", "worker": "open"}}, "breaker open"),
        ({"breaker": "closed", "slow": True}, "breaker closed, slower than computing"),
    ],
)
def test_how_the_store_is(spm: Spm, health: dict[str, object], shown: str) -> None:
    remote = {"kind": "redis", "url": "redis://s", "known_blocks": 1, **health}
    tiers = {**ENGINE["tiers"], "remote": remote}
    spm.server.answers("GET", "/v1/spm/status", {"engines": [{**ENGINE, "tiers": tiers}]})
    (line,) = [line for line in spm("status").out.splitlines() if line.startswith("remote")]
    assert line.startswith(f"remote  redis redis://s, {shown}  ")


def test_status_of_engines_that_have_little(spm: Spm) -> None:
    bare = {
        **ENGINE,
        "tiers": {"gpu": None, "host": None, "remote": None},
        "keep_alive": None,
        "capabilities": {},
    }
    silent = {"engine": 1, "status": "unsupported", "detail": "upgrade it"}
    spm.server.answers("GET", "/v1/spm/status", {"engines": [bare, silent]})
    outcome = spm("status")
    assert outcome.code == 0
    assert "keep-alive  none\n" in outcome.out
    assert "offers      nothing\nlacks       nothing\n" in outcome.out
    assert outcome.out.endswith("engine 1: unsupported (upgrade it)\n")


def test_sessions(spm: Spm) -> None:
    spm.server.answers("GET", "/v1/sessions", page("a", "run/1", has_more=True))
    outcome = spm("sessions", "--limit", "2", "--after", "A")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == (
        "SESSION  CLASS    TTL LEFT  ACTIVE   IDLE  BLOCKS\n"
        "a        soon   1 min 59 s       1  1.2 s      41\n"
        "run/1    soon   1 min 59 s       1  1.2 s      41\n"
        "there are more: --after run/1\n"
    )
    assert spm.server.requests[0].query == "limit=2&after=A"


def test_no_sessions(spm: Spm) -> None:
    spm.server.answers("GET", "/v1/sessions", page())
    assert spm("sessions").out == "no sessions\n"


def test_a_session(spm: Spm) -> None:
    spm.server.answers("GET", SESSION_PATH, SESSION)
    outcome = spm("session", "run/1")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == (
        "session    run/1\n"
        "parent     run\n"
        "children   2\n"
        "known      from its requests\n"
        "retention  soon, 1 min 59 s left\n"
        "requests   1 active, idle 1.2 s\n"
        "blocks     41\n"
        "auto       offload: 60 s of pause cost more than a reload\n"
        "\n"
        "TIER    BLOCKS      SIZE  ASKED AGO\n"
        "gpu         10  10.0 MiB          -\n"
        "host        41  41.0 MiB          -\n"
        "remote      30  30.0 MiB     12.5 s\n"
        "\n"
        "BLOCKS  TIERS                SIZE  ASKED AGO\n"
        "0:10    gpu host remote  10.0 MiB     12.5 s\n"
        "10:41   nowhere               0 B          -\n"
        "\n"
        "OPERATION  TYPE      STATUS\n"
        "op-7       prefetch  accepted\n"
    )


def test_a_session_that_is_only_in_the_store(spm: Spm) -> None:
    document = {**LISTED, "origin": "manifest", "parent_session_id": None, "auto": None}
    spm.server.answers("GET", SESSION_PATH, document)
    out = spm("session", "run/1").out
    assert "known      only from the store\n" in out
    assert "parent     -\n" in out
    assert out.endswith("auto       nothing decided\n")


def test_ranges_of_several_engines_name_theirs(spm: Spm) -> None:
    one = {"block_start": 0, "block_end": 4, "tiers": ["gpu"], "bytes": 8, "age_s": None}
    ranges = [{**one, "engine": 0}, {**one, "engine": 3}]
    residency = {**SESSION["residency"], "ranges": ranges}
    spm.server.answers("GET", SESSION_PATH, {**SESSION, "residency": residency})
    out = spm("session", "run/1").out
    assert "0:4 (engine 0)" in out
    assert "0:4 (engine 3)" in out


@pytest.mark.parametrize(
    ("argv", "path", "document"),
    [
        (["status"], "/v1/spm/status", {**STATUS, "new": {"x": 1}}),
        (["sessions"], "/v1/sessions", page("a")),
        (["session", "run/1"], SESSION_PATH, SESSION),
    ],
)
def test_machines_get_the_servers_document(
    argv: list[str], path: str, document: object, spm: Spm
) -> None:
    spm.server.answers("GET", path, document)
    outcome = spm(*argv, "--json")
    assert (outcome.code, outcome.document, outcome.err) == (0, document, "")


def test_a_reader_that_has_seen_enough(spm: Spm) -> None:
    spm.server.answers("GET", "/v1/sessions", page("a"))
    command = [sys.executable, "-m", "spm.cli", "sessions"]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(
        command, env=buffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as started:
        assert started.stdout is not None
        assert started.stderr is not None
        started.stdout.close()
        assert started.stderr.read() == b""
    assert started.returncode == 1


def test_an_unknown_session(spm: Spm) -> None:
    refusal = error(404, "no such session or operation of this tenant", "not_found")
    spm.server.answers("GET", SESSION_PATH, refusal, code=404)
    outcome = spm("session", "run/1")
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err == "error: no such session or operation of this tenant\n"


def test_errors_are_documents_for_machines(spm: Spm) -> None:
    refusal = error(429, "try later", "rejected")
    spm.server.answers("GET", "/v1/sessions", refusal, code=429)
    outcome = spm("sessions", "--json")
    assert outcome.code == 4
    assert outcome.document == {
        "error": {
            "type": "RejectedError",
            "message": "try later",
            "code": 429,
            "status": "rejected",
            "param": None,
        }
    }


def test_a_server_without_the_routes(spm: Spm) -> None:
    outcome = spm("sessions")
    assert (outcome.code, outcome.out) == (1, "")
    assert "VLLM_PLUGINS=spm" in outcome.err


@pytest.mark.parametrize("as_json", [False, True])
def test_a_server_that_is_not_there(as_json: bool, spm: Spm) -> None:
    outcome = spm("status", "--url", "http://127.0.0.1:1", *["--json"] * as_json)
    assert outcome.code == 1
    assert outcome.err.startswith("error: cannot reach http://127.0.0.1:1: ")
    if as_json:
        assert outcome.document["error"]["type"] == "ServerUnreachableError"
    else:
        assert outcome.out == ""
