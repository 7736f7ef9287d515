"""A phase's turns against a server that answers and counts as vLLM does."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from spm.demo.metrics_client import TokenSources
from spm.demo.phases import LMCACHE_RESTART, RESTART, Phase
from spm.demo.report import PhaseResults
from spm.demo.runner import _converse
from tests.spm.demo.test_client import chunk, sse
from tests.spm.demo.turn_results import results

EXTERNAL, COMPUTED = 32, 9


class CountingServer:
    """Every prompt is 41 tokens, most of which a connector loads; ours tells which tier."""

    def __init__(self, *, ours: bool) -> None:
        self._ours = ours
        self._answered = 0
        self.bodies: list[dict[str, object]] = []

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self._answered += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        usage = {"choices": [], "usage": {"prompt_tokens": EXTERNAL + COMPUTED}}
        for event in (chunk("text", [5, 6, 7], [-0.5, -0.25, -1.0]), usage):
            await response.write(sse(event))
        return response

    async def metrics(self, _request: web.Request) -> web.Response:
        name = "vllm:prompt_tokens_by_source_total"
        lines = [
            f'{name}{{source="external_kv_transfer"}} {EXTERNAL * self._answered}.0',
            f'{name}{{source="local_compute"}} {COMPUTED * self._answered}.0',
        ]
        if self._ours:
            lines.append(f'spm:loaded_tokens_total{{tier="host"}} {EXTERNAL * self._answered}.0')
        return web.Response(text="\n".join(lines))


def converse(phase: Phase, server: CountingServer) -> PhaseResults:
    async def run() -> PhaseResults:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", server.complete)
        app.router.add_get("/metrics", server.metrics)
        async with TestServer(app) as listening:
            url = str(listening.make_url("")).rstrip("/")
            return await _converse(phase, url, results(Phase("reference", "t")))

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (RESTART, TokenSources(external=EXTERNAL, computed=COMPUTED, host=EXTERNAL)),
        (LMCACHE_RESTART, TokenSources(external=EXTERNAL, computed=COMPUTED, remote=EXTERNAL)),
    ],
    ids=["ours", "lmcache"],
)
def test_every_turn_is_asked_once_and_accounted_for(phase: Phase, expected: TokenSources) -> None:
    server = CountingServer(ours=phase is RESTART)
    turns = converse(phase, server)
    assert [turn.sources for turn in turns.values()] == [expected] * 4
    assert {key.round for key in turns} == {3}
    assert len(server.bodies) == 1 + len(turns), "one to warm up"


def test_the_prompts_have_the_references_answers_in_them() -> None:
    server = CountingServer(ours=True)
    converse(RESTART, server)
    for body in server.bodies[1:]:
        messages = body["messages"]
        assert isinstance(messages, list)
        roles = [message["role"] for message in messages]
        assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
        assert messages[2]["content"] == "text"
