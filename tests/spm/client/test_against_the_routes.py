"""The client and the endpoint plugin understand each other."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spm.client import AsyncSpmClient, NotFoundError, UnsupportedError
from tests.spm.http.server_under_test import Server, run, start

_Result = TypeVar("_Result")
visible = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)


def talking(
    server: Server, talk: Callable[[AsyncSpmClient], Awaitable[_Result]], **headers: str
) -> _Result:
    async def scenario() -> _Result:
        await start(server.app, server.engine)
        transport = httpx.ASGITransport(app=server.app)
        async with AsyncSpmClient(
            "http://server/v1", headers=headers, transport=transport
        ) as client:
            return await talk(client)

    return run(scenario)


@settings(max_examples=40)
@given(visible | visible.map(lambda s: f"{s}/edits") | st.sampled_from([".", "..", "a/.."]))
def test_any_session_can_be_managed(session_id: str) -> None:
    server = Server()
    server.engine.cores[0].add_session("default", session_id)

    async def talk(client: AsyncSpmClient) -> None:
        assert (await client.get_session(session_id)).id == session_id
        edited = await client.evict(session_id, 0, 2)
        assert (edited.session_id, edited.status) == (session_id, "ok")
        assert (edited.edits[0].block_start, edited.edits[0].block_end) == (0, 2)
        found = await client.operation(edited.operation_id)
        assert (found.id, found.done) == (edited.operation_id, True)
        kept = await client.retain(session_id, 60, "waiting_tool", 2)
        assert kept.retention is not None
        ended = await client.end_session(session_id, tree=True)
        assert (ended.deleted, ended.ended) == (True, (session_id,))
        with pytest.raises(NotFoundError):
            await client.get_session(session_id)
        with pytest.raises(NotFoundError):
            await client.evict(session_id)

    talking(server, talk)


def test_pages() -> None:
    server = Server(engines=2)
    for n in range(7):
        server.engine.cores[n % 2].add_session("default", f"s{n}")

    async def talk(client: AsyncSpmClient) -> list[str]:
        return [one.id async for one in client.iter_sessions(page_size=3)]

    assert talking(server, talk) == [f"s{n}" for n in range(7)]


def test_tenants() -> None:
    server = Server(tenant_header="X-Tenant")
    server.engine.cores[0].add_session("acme", "s")

    async def ids(client: AsyncSpmClient) -> list[str]:
        return [one.id for one in (await client.sessions()).sessions]

    assert talking(server, ids, **{"X-Tenant": "acme"}) == ["s"]
    assert talking(server, ids, **{"X-Tenant": "other"}) == []


def test_switched_off() -> None:
    async def talk(client: AsyncSpmClient) -> None:
        with pytest.raises(UnsupportedError, match=r"sam\.enabled"):
            await client.sessions()

    talking(Server(enabled=False), talk)


def test_a_hint_of_a_session_is_accepted() -> None:
    server = Server()

    async def talk(client: AsyncSpmClient) -> int:
        hint = client.session("run/1", parent="run").hint(60, "waiting_tool", 2.0)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=server.app)) as http:
            body = {"messages": [], "agent_hint": hint}
            return (await http.post("http://server/v1/chat/completions", json=body)).status_code

    assert talking(server, talk) == 200
