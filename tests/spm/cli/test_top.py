"""``spm top``."""

import io
from collections.abc import Callable

import pytest

from spm.cli.top import LOOKED_AT, SHOWN, look, watch
from spm.client import SpmClient
from tests.spm.cli.command import Spm
from tests.spm.client.documents import LISTED, STATUS, error, page
from tests.spm.client.fake_server import FakeServer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def busy(session_id: str, active: int, idle_s: float) -> dict[str, object]:
    return {**LISTED, "id": session_id, "active_requests": active, "idle_s": idle_s}


def serve(server: FakeServer) -> None:
    sessions = [busy("a", 0, 9.0), busy("b", 2, 5.0), busy("c", 0, 1.0)]
    server.answers("GET", "/v1/spm/status", STATUS)
    server.answers("GET", "/v1/sessions", {**page(), "data": sessions})


def sleeping(
    rounds: int, meanwhile: Callable[[int], None] = lambda _: None
) -> Callable[[float], None]:
    """A sleep that is interrupted in its last round; ``meanwhile`` is told which one it is."""
    slept: list[float] = []

    def sleep(delay_s: float) -> None:
        slept.append(delay_s)
        meanwhile(len(slept))
        if len(slept) == rounds:
            raise KeyboardInterrupt

    return sleep


def watching(server: FakeServer, out: io.StringIO, sleep: Callable[[float], None]) -> str:
    with SpmClient("http://server", transport=server.transport) as client:
        watch(client, look(client), 2.0, out, sleep)
    return out.getvalue()


def test_once(spm: Spm) -> None:
    serve(spm.server)
    outcome = spm("top", "--once")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == (
        "ENGINE  SESSIONS  ACTIVE   GPU FREE  PROTECTED   HOST  REMOTE  LOAD  PREFETCH  BEHIND"
        "  OPERATIONS\n"
        "0             12       3  700/1,024        200  2,048      up   0+1       5+2   0.5 s"
        "           2\n"
        "\n"
        "SESSION  CLASS    TTL LEFT  ACTIVE   IDLE  BLOCKS\n"
        "b        soon   1 min 59 s       2  5.0 s      41\n"
        "c        soon   1 min 59 s       0  1.0 s      41\n"
        "a        soon   1 min 59 s       0  9.0 s      41\n"
    )


def test_once_for_machines(spm: Spm) -> None:
    serve(spm.server)
    document = spm("top", "--once", "--json").document
    assert (document["object"], document["status"]) == ("spm.top", STATUS)
    assert [one["id"] for one in document["sessions"]] == ["b", "c", "a"]


def test_one_page_is_looked_at_and_its_busiest_are_shown(spm: Spm) -> None:
    serve(spm.server)
    ids = [f"s{n:02}" for n in range(SHOWN + 1)]
    spm.server.answers("GET", "/v1/sessions", page(*ids, has_more=True))
    out = spm("top", "--once").out
    assert (ids[-2] in out, ids[-1] in out) == (True, False)
    assert out.endswith(f"(the busiest of the first {LOOKED_AT:,} by id)\n")
    assert spm.server.requests[1].query == f"limit={LOOKED_AT}"


def test_a_server_that_is_not_there_at_first(spm: Spm) -> None:
    assert spm("top").code == 1


def test_a_terminal_is_redrawn_in_place_and_left_as_it_was() -> None:
    server = FakeServer()
    serve(server)
    drawn = watching(server, Terminal(), sleeping(3))
    assert drawn.startswith("\x1b[2J\x1b[H")
    assert drawn.count("\x1b[H") == drawn.count("\x1b[J") == 3
    assert drawn.endswith("\x1b[J\n")
    assert len(server.requests) == 2 * 3
    assert "?" not in drawn.replace("\x1b", "")  # no mode is set, so none has to be reset


def test_lines_do_not_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("LINES", "4")
    server = FakeServer()
    serve(server)
    drawn = watching(server, Terminal(), sleeping(1))
    lines = drawn.removeprefix("\x1b[2J\x1b[H").removesuffix("\x1b[J\n").split("\n")
    assert [len(line.removesuffix("\x1b[K")) for line in lines] == [30, 30, 0]


def test_a_file_gets_one_view_after_the_other() -> None:
    server = FakeServer()
    serve(server)
    written = watching(server, io.StringIO(), sleeping(2))
    assert "\x1b" not in written
    assert written.count("ENGINE") == 2


def test_trouble_is_shown_and_outlived() -> None:
    server = FakeServer()
    serve(server)

    def change(turn: int) -> None:
        if turn == 1:
            server.answers("GET", "/v1/spm/status", error(503, "restarting", "failed"), code=503)
        else:
            serve(server)

    views = watching(server, io.StringIO(), sleeping(3, change)).split("ENGINE")[1:]
    assert ["stale: restarting" in view for view in views] == [False, True, False]
    assert all("700/1,024" in view for view in views)


def test_an_interrupt_ends_it_well(spm: Spm, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(spm.server)
    monkeypatch.setattr("spm.cli.top.time.sleep", sleeping(2))
    assert spm("top", "--interval", "0.5").code == 0
