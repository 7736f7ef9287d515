"""Many agents at once on vLLM's real server: hints good and bad, clients that leave, and
management in between. Nothing may fail, and nothing may be left behind."""

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.http_server import MODEL, HttpServer, HttpServerSpec, running
from tests.processes import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_SESSIONS, _TURNS = 50, 3
_STATES = ("waiting_tool", "waiting_user", "finished")


class Agent:
    """One session's client."""

    def __init__(self, number: int, http: httpx.AsyncClient) -> None:
        self.name = f"agent/{number}"
        self._http = http
        self._rng = random.Random(number)
        self._parent = f"agent/{number % 7}" if number >= 7 else None
        self._text = f"Agent {number}. " + "Think about rivers and towns. " * 10

    async def run(self) -> None:
        for turn in range(_TURNS):
            what = self._rng.random()
            if what < 0.15:
                await self._leave()
            elif what < 0.25:
                await self._say_nonsense()
            else:
                await self._ask(turn)
            await self._manage()

    def _hint(self) -> dict[str, Any]:
        hint: dict[str, Any] = {"session_id": self.name}
        if self._parent is not None:
            hint["parent_session_id"] = self._parent
        if self._rng.random() < 0.6:
            hint["cache_control"] = {"ttl": self._rng.choice([0, 1, 60, 3600])}
        if self._rng.random() < 0.5:
            hint["state"] = self._rng.choice(_STATES)
        if self._rng.random() < 0.3:
            hint["expected_resume_s"] = self._rng.choice([0.5, 30, 86_400])
        return hint

    def _body(self, **more: Any) -> dict[str, Any]:  # noqa: ANN401
        messages = [{"role": "user", "content": self._text}]
        return {"model": MODEL, "messages": messages, "max_tokens": 6, **more}

    async def _ask(self, turn: int) -> None:
        where = {"agent_hint": self._hint()}
        if self._rng.random() < 0.3:
            where = {"kv_transfer_params": where}
        answer = await self._http.post("/v1/chat/completions", json=self._body(**where))
        assert answer.status_code == 200, answer.text
        self._text += answer.json()["choices"][0]["message"]["content"] + f" And {turn}?"

    async def _leave(self) -> None:
        """The client disconnects while its answer is being streamed, or earlier."""
        body = self._body(agent_hint=self._hint(), stream=True, max_tokens=64)
        try:
            async with asyncio.timeout(self._rng.random()):
                async with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                    async for _ in answer.aiter_lines():
                        pass
        except TimeoutError:
            pass

    async def _say_nonsense(self) -> None:
        hint = {**self._hint(), "cache_control": {"ttl": "forever"}}
        answer = await self._http.post("/v1/chat/completions", json=self._body(agent_hint=hint))
        assert answer.status_code == 400
        params = {"agent_hint": hint}
        body = self._body(kv_transfer_params=params)
        answer = await self._http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text

    async def _manage(self) -> None:
        path = f"/v1/sessions/{self.name}"
        edits = {"edits": [{"type": "evict", "block_start": 1, "block_end": 3}]}
        calls = [
            ("GET", path, None),
            ("GET", "/v1/sessions?limit=7", None),
            ("POST", path + "/edits", edits),
            ("POST", path + "/edits", {"cache_control": {"ttl": 30}}),
        ]
        method, url, body = self._rng.choice(calls)
        answer = await self._http.request(method, url, json=body)
        assert answer.status_code in (200, 404), answer.text


async def _storm(server: HttpServer) -> None:
    limits = httpx.Limits(max_connections=_SESSIONS)
    headers = {"Authorization": f"Bearer {server.keys[0]}"}
    async with httpx.AsyncClient(
        base_url=server.url, headers=headers, limits=limits, timeout=280
    ) as http:
        await asyncio.gather(*(Agent(number, http).run() for number in range(_SESSIONS)))


@pytest.mark.timeout(400)
def test_fifty_agents_leave_nothing_behind(tmp_path: Path) -> None:
    spec = HttpServerSpec({"host_bytes": 64 << 20}, arguments=("--max-num-seqs", "16"))
    with running(spec, tmp_path / "vllm.log") as server, server.client() as client:
        asyncio.run(_storm(server))
        roots = {f"agent/{number}" for number in range(7)}
        for root in sorted(roots):
            client.delete(f"/v1/sessions/{root}", params={"tree": "true"})
        for one in client.get("/v1/sessions", params={"limit": 1000}).json()["data"]:
            assert client.delete(f"/v1/sessions/{one['id']}").status_code == 200
        assert client.get("/v1/sessions").json()["data"] == []
        # One more request, so that the last numbers are on the page.
        body = {"model": MODEL, "prompt": "Well?", "max_tokens": 2}
        wait_until(
            lambda: (
                client.post("/v1/completions", json=body).status_code == 200
                and server.metric("spm:sam_records") == 0
                and server.metric("spm:requests") <= 1
            ),
            "all records to be gone",
        )
        assert server.metric("spm:sessions") == 0
        assert server.metric("spm:hints_total", outcome="late") == 0
        assert server.metric("spm:hints_total", outcome="acted") > _SESSIONS
        assert server.metric("spm:internal_errors_total") == 0
        assert server.metric("vllm:num_requests_running") == 0
        assert "Traceback" not in server.log_path.read_text()
    # Told to stop, vLLM's API server may report the engine that it has just stopped as dead
    # (the cancelled reader of the engine's outputs says so): the engine's own lines count.
    lines = (tmp_path / "vllm.log").read_text().splitlines()
    engine = [line for line in lines if line.startswith(("(EngineCore", "(Worker"))]
    assert engine
    assert not [line for line in engine if "Traceback" in line]
