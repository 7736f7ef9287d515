"""Asking the engines: answers, deadlines, dead engines, and nothing left behind."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from spm.http.engine import NOBODY, EngineCore, EngineOperations
from spm.http.errors import RequestError
from tests.spm.http.fake_engine import FakeEngineClient
from tests.spm.http.server_under_test import run


class EngineDeadError(Exception):
    """Named as vLLM's."""


class SaysAnything:
    """An engine core of some other version."""

    def __init__(self, answers: Any) -> None:  # noqa: ANN401
        self._answers = answers

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:  # noqa: ANN401
        answers: list[Any] = self._answers
        return answers


def refused(client: EngineCore) -> RequestError:
    async def scenario() -> RequestError:
        engine = EngineOperations(client)
        with pytest.raises(RequestError) as caught:
            await engine.ask("get_session", "t", session_id="s")
        return caught.value

    return run(scenario)


def test_every_engine_answers() -> None:
    client = FakeEngineClient(engines=3)
    client.cores[1].add_session("t", "s")

    async def scenario() -> list[str]:
        answers = await EngineOperations(client).ask("get_session", "t", session_id="s")
        return [a["status"] for a in answers]

    assert run(scenario) == ["not_found", "ok", "not_found"]
    assert client.requests == [{"v": 1, "op": "get_session", "tenant": "t", "session_id": "s"}]


@pytest.mark.parametrize(
    ("error", "code", "status", "says"),
    [
        (EngineDeadError("EngineCore encountered an issue."), 503, "failed", "not running"),
        (Exception("Server shutting down"), 503, "failed", "not running"),
        (
            Exception(
                "Call to spm_manage method failed: 'EngineCoreProc' object has no attribute "
                "'spm_manage'"
            ),
            501,
            "unsupported",
            "VLLM_PLUGINS",
        ),
        (AttributeError("no call_utility_all_async"), 501, "unsupported", "VLLM_PLUGINS"),
        (Exception("Call to spm_manage method failed: division by zero"), 503, "failed", "its log"),
    ],
)
def test_an_engine_in_trouble(error: Exception, code: int, status: str, says: str) -> None:
    client = FakeEngineClient()
    client.error = error
    told = refused(client)
    assert (told.code, told.status) == (code, status)
    assert says in told.message
    assert "division" not in told.message


@pytest.mark.parametrize("answers", [[], [None], [{"detail": "?"}], ["ok"], None])
def test_answers_of_another_version(answers: object) -> None:
    told = refused(SaysAnything(answers))
    assert (told.code, told.status) == (503, "failed")
    assert "same version" in told.message


def test_the_deadline() -> None:
    async def scenario() -> None:
        client = FakeEngineClient()
        client.gate = asyncio.Event()
        engine = EngineOperations(client, deadline_s=0.0)
        with pytest.raises(RequestError) as caught:
            await engine.ask("get_session", "t", session_id="s")
        assert (caught.value.code, caught.value.status) == (504, "failed")
        assert engine.unanswered == 1
        client.gate.set()
        await until(lambda: engine.unanswered == 0)

    run(scenario)


def test_a_client_that_leaves_is_forgotten_once_the_engine_answers() -> None:
    async def scenario() -> None:
        client = FakeEngineClient()
        client.gate = asyncio.Event()
        engine = EngineOperations(client)
        asking = asyncio.create_task(engine.ask("get_session", "t", session_id="s"))
        await until(lambda: len(client.requests) == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert engine.unanswered == 1
        client.error = Exception("nobody will hear this")
        client.gate.set()
        await until(lambda: engine.unanswered == 0)
        assert engine.failures == 1

    run(scenario)


def test_a_stuck_engine_is_not_asked_without_end() -> None:
    async def scenario() -> None:
        client = FakeEngineClient()
        client.gate = asyncio.Event()
        engine = EngineOperations(client, deadline_s=0.0, max_unanswered=3)
        codes = []
        for _ in range(5):
            with pytest.raises(RequestError) as caught:
                await engine.ask("get_session", "t", session_id="s")
            codes.append(int(caught.value.code))
        assert codes == [504, 504, 504, 429, 429]
        client.gate.set()
        await until(lambda: engine.unanswered == 0)
        assert len(client.requests) == 3
        client.gate = None
        assert await EngineOperations(client).ask("get_session", "t", session_id="s")

    run(scenario)


def test_one_tenant_cannot_use_up_the_bound() -> None:
    async def scenario() -> None:
        client = FakeEngineClient()
        client.gate = asyncio.Event()
        engine = EngineOperations(client, max_unanswered=4, max_of_tenant=2)
        flood = [asyncio.create_task(engine.ask("status", "flood")) for _ in range(2)]
        await until(lambda: len(client.requests) == 2)
        with pytest.raises(RequestError) as caught:
            await engine.ask("status", "flood")
        assert (caught.value.code, caught.value.status) == (429, "rejected")
        other = asyncio.create_task(engine.ask("status", "other"))
        status = asyncio.create_task(engine.ask("status", "flood", on_account_of=NOBODY))
        client.gate.set()
        await asyncio.gather(*flood, other, status)
        await engine.ask("status", "flood")

    run(scenario)


def test_a_burst_during_one_slow_step_is_answered() -> None:
    """Fifty agents with a dozen calls each wait for the same step, and none is refused."""
    callers = 600

    async def scenario() -> None:
        client = FakeEngineClient()
        client.cores[0].add_session("t", "s")
        client.gate = asyncio.Event()
        engine = EngineOperations(client)
        asking = [
            asyncio.create_task(engine.ask("get_session", "t", session_id="s"))
            for _ in range(callers)
        ]
        await until(lambda: engine.unanswered == callers or any(a.done() for a in asking))
        client.gate.set()
        answers = await asyncio.gather(*asking)
        assert [a["status"] for (a,) in answers] == ["ok"] * callers
        await until(lambda: engine.unanswered == 0)

    run(scenario)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)
