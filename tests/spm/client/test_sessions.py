"""The session context: what the server is told, and that it is never in the agent's way."""

import asyncio
import gc
import logging
from collections.abc import Callable

import httpx
import pytest

from spm.client import (
    AsyncSpmClient,
    InvalidArgumentError,
    NotFoundError,
    ServerUnreachableError,
    SpmClient,
)
from spm.client.session_plan import PREFETCH_LEAD_S
from tests.clock import FakeClock
from tests.spm.client.documents import EDITS, error, operation
from tests.spm.client.driving import URL
from tests.spm.client.fake_server import FakeServer
from tests.spm.client.session_runs import PATH, RUNS, AsyncRun, SessionRun, SyncRun, refuse, tool

WAITING = "waiting_tool ttl 300"


@pytest.fixture(params=RUNS)
def agent(request: pytest.FixtureRequest) -> SessionRun:
    make: Callable[[], SessionRun] = request.param
    return make()


def what(agent: SessionRun) -> list[str]:
    return [said for said, _ in agent.said()]


# --- what is said, and when ------------------------------------------------------------


def test_a_session_says_that_it_is_finished(agent: SessionRun) -> None:
    agent.run()
    assert agent.said() == [("finished", 0.0)]


def test_a_short_tool_only_needs_its_session_kept(agent: SessionRun) -> None:
    agent.run([tool(took_s=0.5)])
    assert agent.said() == [(WAITING, 0.0), ("finished", 0.5)]


def test_a_tool_that_took_long_is_followed_by_a_prefetch(agent: SessionRun) -> None:
    agent.run([tool(took_s=1.0)])
    assert agent.said() == [(WAITING, 0.0), ("prefetch", 1.0), ("finished", 1.0)]


def test_the_bound_can_be_set(agent: SessionRun) -> None:
    agent.run([tool(took_s=1.0), tool(took_s=5.0)], prefetch_after_s=2.0)
    assert what(agent) == [WAITING, WAITING, "prefetch", "finished"]


def test_a_tool_that_was_expected_to_take_long_is_followed_by_one_too(agent: SessionRun) -> None:
    agent.run([tool(took_s=0.2, expected_s=30, ttl_s=120)])
    retained = "waiting_tool for 30 ttl 120"
    assert agent.said() == [(retained, 0.0), ("prefetch", 0.2), ("finished", 0.2)]


def test_a_prefetch_starts_before_the_expected_end() -> None:
    agent = AsyncRun()
    agent.run([tool(took_s=5.0, expected_s=3.0)])
    assert agent.said()[1:] == [("prefetch", 3.0 - PREFETCH_LEAD_S), ("finished", 5.0)]


def test_a_prefetch_of_a_tool_that_is_done_does_not_start_later() -> None:
    agent = AsyncRun()
    agent.run([tool(took_s=0.2, expected_s=3.0), tool(took_s=4.0)])
    assert [at_s for said, at_s in agent.said() if said == "prefetch"] == [0.2, 4.2]


def test_without_an_event_loop_it_starts_when_the_tool_is_done() -> None:
    agent = SyncRun()
    agent.run([tool(took_s=5.0, expected_s=3.0)])
    assert agent.said()[1:] == [("prefetch", 5.0), ("finished", 5.0)]


def test_a_prefetch_whose_protection_is_over_is_repeated() -> None:
    agent = AsyncRun()
    agent.run([tool(took_s=14.0, expected_s=2.0, ttl_s=12), tool(took_s=5, expected_s=2, ttl_s=12)])
    assert [at_s for said, at_s in agent.said() if said == "prefetch"] == [1.5, 14.0, 15.5]


@pytest.mark.parametrize(("expected_s", "sent"), [(1e9, 86_400.0), (-5, 0.0), (float("nan"), 0.0)])
def test_estimates_are_brought_into_range(
    expected_s: float, sent: float, agent: SessionRun
) -> None:
    agent.run([tool(expected_s=expected_s, ttl_s=1e9)], prefetch_after_s=1e9)
    assert what(agent) == [f"waiting_tool for {sent:g} ttl 3600", "finished"]


def test_a_tool_that_failed_is_followed_by_a_prefetch_too(agent: SessionRun) -> None:
    agent.run([tool(took_s=2.0, error=ZeroDivisionError(), caught=True)])
    assert what(agent) == [WAITING, "prefetch", "finished"]


def test_a_tool_that_was_cancelled_is_not(agent: SessionRun) -> None:
    agent.run([tool(took_s=2.0, error=asyncio.CancelledError(), caught=True)])
    assert what(agent) == [WAITING, "finished"]


@pytest.mark.parametrize("expected_s", [None, 2.0])
def test_a_prefetch_is_waited_for_if_asked(expected_s: float | None, agent: SessionRun) -> None:
    agent.run([tool(took_s=3.0, expected_s=expected_s, wait_s=10)])
    assert what(agent)[1:] == ["prefetch", "look", "finished"]


def test_it_is_not_waited_for_longer(agent: SessionRun) -> None:
    agent.server.answers("GET", "/v1/operations/op-1", operation("accepted", done=False))
    agent.clock = AdvancingClock()
    agent.run([tool(took_s=3.0, wait_s=1e-6)], strict=True)
    assert what(agent)[1:] == ["prefetch", "look", "finished"]
    assert agent.failures == 0


def test_what_is_done_at_once_is_not_looked_at(agent: SessionRun) -> None:
    done = {**EDITS, "status": "ok", "edits": []}
    agent.server.answers("POST", PATH, done)
    agent.run([tool(took_s=3.0, wait_s=10)])
    assert what(agent)[1:] == ["prefetch", "finished"]


def test_an_agent_never_waits_long_for_an_answer(agent: SessionRun) -> None:
    agent.run([tool(took_s=3.0, wait_s=10)], timeout_s=0.25)
    assert [seen.timeout_s for seen in agent.server.requests] == [0.25] * 4


# --- failures --------------------------------------------------------------------------


def test_a_server_that_is_gone_does_not_break_the_agent(
    agent: SessionRun, caplog: pytest.LogCaptureFixture
) -> None:
    agent.server.error = httpx.ConnectError("Connection refused")
    with caplog.at_level(logging.DEBUG, logger="spm.client"):
        agent.run([tool(took_s=2.0), tool(took_s=2.0, wait_s=5)])
    assert agent.failures == 5
    ours = [record for record in caplog.records if record.name.startswith("spm.client")]
    assert [record.levelname for record in ours] == ["WARNING", *["DEBUG"] * 4]
    assert "retention of a session failed (ServerUnreachableError)" in ours[0].getMessage()


def test_logs_name_no_session(agent: SessionRun, caplog: pytest.LogCaptureFixture) -> None:
    refusal = error(400, "session_id='s-secret': no", "failed")
    agent.server.answers("POST", PATH, refusal, code=400)
    agent.run()
    (record,) = [one for one in caplog.records if one.name.startswith("spm.client")]
    assert "InvalidRequestError 400" in record.getMessage()
    assert "s-secret" not in record.getMessage()


def test_an_agents_own_error_is_never_replaced(agent: SessionRun) -> None:
    agent.server.error = httpx.ConnectError("Connection refused")
    with pytest.raises(ZeroDivisionError):
        agent.run(error=ZeroDivisionError(), strict=True)
    refuse(agent.server, "prefetch", "finished")
    agent.server.error = None
    for wait_s in (0.0, 5.0):
        failing = tool(took_s=3.0, expected_s=2.0, wait_s=wait_s, error=ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            agent.run([failing], strict=True)


@pytest.mark.parametrize("refused", [WAITING, "prefetch", "finished"])
def test_strict_sessions_raise(refused: str, agent: SessionRun) -> None:
    refuse(agent.server, refused)
    with pytest.raises(ServerUnreachableError):
        agent.run([tool(took_s=2.0)], strict=True)


def test_strict_sessions_raise_what_failed_in_the_background() -> None:
    agent = AsyncRun()
    refuse(agent.server, "prefetch")
    with pytest.raises(ServerUnreachableError):
        agent.run([tool(took_s=4.0, expected_s=2.0)], strict=True)
    assert what(agent)[1:] == ["prefetch", "finished"]


def test_a_background_failure_that_nobody_waits_for_is_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agent = AsyncRun()
    refuse(agent.server, "prefetch")
    cancelled = tool(took_s=4.0, expected_s=2.0, error=asyncio.CancelledError())
    with pytest.raises(asyncio.CancelledError):
        agent.run([cancelled], strict=True)
    gc.collect()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_a_session_that_made_no_request_is_no_failure(agent: SessionRun) -> None:
    agent.server.answers("POST", PATH, error(404, "no such", "not_found"), code=404)
    agent.run(strict=True)
    assert agent.failures == 0
    with pytest.raises(NotFoundError):
        agent.run([tool()], strict=True)


def test_a_prefetch_that_hangs_does_not_hold_the_end_up() -> None:
    server = FakeServer()
    server.answers("POST", PATH, {**EDITS, "session_id": "s"})
    broken_off = []

    async def handle(request: httpx.Request) -> httpx.Response:
        if b"prefetch" not in await request.aread():
            return server.handle(request)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            broken_off.append(True)
            raise
        raise AssertionError

    async def scenario() -> None:
        transport = httpx.MockTransport(handle)
        async with (
            AsyncSpmClient(URL, transport=transport) as client,
            client.session("s", prefetch_after_s=0) as session,
        ):
            async with session.tool():
                pass
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(scenario(), timeout=30))
    assert broken_off == [True]
    assert server.requests[-1].body == {"state": "finished"}


# --- hints -----------------------------------------------------------------------------


def test_hints() -> None:
    with SpmClient(URL) as client:
        child = client.session("run/1", parent="run")
        assert child.hint() == {"session_id": "run/1", "parent_session_id": "run"}
        assert client.session("run").hint(60, "waiting_user", 5) == {
            "session_id": "run",
            "cache_control": {"type": "ephemeral", "ttl": 60},
            "state": "waiting_user",
            "expected_resume_s": 5,
        }
    asynchronous = AsyncSpmClient(URL).session("run/1", "run")
    assert asynchronous.hint(ttl_s=1) == child.hint(ttl_s=1)


def test_bad_hints_name_the_field() -> None:
    with SpmClient(URL) as client:
        with pytest.raises(InvalidArgumentError, match="session_id"):
            client.session("a b")
        with pytest.raises(InvalidArgumentError, match="parent_session_id"):
            client.session("a", parent="")
        for fields in ({"ttl_s": 5000}, {"ttl_s": -1}, {"state": "asleep"}):
            with pytest.raises(InvalidArgumentError, match="hint"):
                client.session("a").hint(**fields)


class AdvancingClock(FakeClock):
    """Every look at it takes a moment."""

    def __call__(self) -> float:
        self.now_s += 1e-3
        return self.now_s
