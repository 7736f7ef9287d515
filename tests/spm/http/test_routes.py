"""The management routes."""

import json
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.spm.http.server_under_test import Server, browsing, run, start

EVICT = {"edits": [{"type": "evict"}]}
visible = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)


def server_with(*session_ids: str, engines: int = 1, **sam: Any) -> Server:  # noqa: ANN401
    server = Server(engines=engines, **sam)
    for one in session_ids:
        server.engine.cores[0].add_session("default", one)
    return server


def test_edits() -> None:
    server = server_with("s")
    body = {
        "edits": [{"type": "offload", "block_start": 1, "block_end": 3}],
        "cache_control": {"ttl": 60, "block_offset": 2},
        "state": "waiting_tool",
        "expected_resume_s": 5,
        "parent_session_id": "p",
        "operation_id": "op-1",
    }
    response = server.request("POST", "/v1/sessions/s/edits", json=body)
    assert response.status_code == 200
    answer = response.json()
    assert (answer["object"], answer["status"]) == ("session.edits", "ok")
    assert (answer["session_id"], answer["operation_id"]) == ("s", "op-1")
    assert answer["retention"]["class"] == "later"
    assert answer["edits"] == [
        {"type": "offload", "status": "ok", "block_start": 1, "block_end": 3, "blocks": 4}
    ]
    (asked,) = server.engine.asked("apply")
    del body["operation_id"]
    assert asked["hint"] == {
        **{k: v for k, v in body.items() if k != "edits"},
        "session_id": "s",
        "context_management": {"edits": body["edits"]},
    }


def test_a_repeat_says_so() -> None:
    server = server_with("s")
    body = {**EVICT, "operation_id": "op"}
    assert "duplicate" not in server.request("POST", "/v1/sessions/s/edits", json=body).json()
    assert server.request("POST", "/v1/sessions/s/edits", json=body).json()["duplicate"] is True


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"edits": [{"type": "evict"}, {"type": "x"}]}, "edits[1].type"),
        ({"edits": {}}, "edits"),
        ({"edits": [{"type": "evict"}] * 17}, "edits"),
        ({"edits": [{"type": "evict", "block_start": 1}]}, "edits[0].block_end"),
        ({"edits": [{"type": "prefetch", "target": "disk"}]}, "edits[0].target"),
        ({"edits": [{"type": "evict"}, {"type": "evict", "target": "gpu"}]}, "edits[1].target"),
        ({"cache_control": {"ttl": -1}}, "cache_control.ttl"),
        ({"state": "?"}, "state"),
        ({"expected_resume_s": "soon"}, "expected_resume_s"),
        ({"parent_session_id": ""}, "parent_session_id"),
        ({**EVICT, "operation_id": "a b"}, "operation_id"),
        ({**EVICT, "operation_id": 5}, "operation_id"),
        ({**EVICT, "session_id": "s"}, "session_id"),
        ({**EVICT, "ed\ud800": 1}, "ed\\ud800"),
        ({}, None),
        ({"operation_id": "op", "edits": None}, None),
    ],
)
def test_bad_edits_name_the_field(body: dict[str, Any], param: str | None) -> None:
    server = server_with("s")
    headers = {"content-type": "application/json"}
    content = json.dumps(body)  # ASCII: httpx's own JSON has no lone surrogates
    response = server.request("POST", "/v1/sessions/s/edits", content=content, headers=headers)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["type"], error["code"]) == (param, "BadRequestError", 400)
    assert error["status"] == "failed"
    if param is not None:
        assert error["message"].startswith(param)
    assert "context_management" not in error["message"]
    assert "body." not in error["message"]
    assert server.engine.requests == []


def test_ranges_switched_off() -> None:
    server = server_with("s", ranges=False)
    body = {"edits": [{"type": "evict", "block_start": 0, "block_end": 1}]}
    response = server.request("POST", "/v1/sessions/s/edits", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "edits[0].block_start"
    assert server.request("POST", "/v1/sessions/s/edits", json=EVICT).status_code == 200


@pytest.mark.parametrize(
    ("content", "media_type", "code"),
    [
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"edits":[{"type":"evict"}]}', "text/plain", 415),
        (b" " * ((1 << 20) + 1), "application/json", 413),
    ],
)
def test_bodies_that_are_none(content: bytes, media_type: str, code: int) -> None:
    server = server_with("s")
    headers = {"content-type": media_type}
    response = server.request("POST", "/v1/sessions/s/edits", content=content, headers=headers)
    assert response.status_code == code
    assert response.json()["error"]["code"] == code
    assert server.engine.requests == []


def test_edits_of_an_unknown_session() -> None:
    server = server_with()
    response = server.request("POST", "/v1/sessions/s/edits", json={**EVICT, "operation_id": "op"})
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["status"], error["type"]) == ("not_found", "NotFoundError")
    assert response.json()["result"]["operation_id"] == "op"


def test_rejected_edits() -> None:
    server = server_with("s")
    rejected: dict[str, Any] = {
        "status": "rejected",
        "detail": "try later",
        "edits": [],
        "retention": None,
    }
    server.engine.answers = [rejected]
    response = server.request("POST", "/v1/sessions/s/edits", json=EVICT)
    assert response.status_code == 429
    error = response.json()["error"]
    assert (error["message"], error["status"]) == ("try later", "rejected")


@pytest.mark.parametrize(
    ("status", "code"),
    [("partial", 200), ("accepted", 202), ("deferred", 202), ("unsupported", 200), ("failed", 200)],
)
def test_any_other_outcome_of_edits_is_an_answer(status: str, code: int) -> None:
    server = server_with("s")
    server.engine.answers = [{"status": status, "edits": [], "retention": None}]
    response = server.request("POST", "/v1/sessions/s/edits", json=EVICT)
    assert (response.status_code, response.json()["status"]) == (code, status)


def test_a_prefetch_goes_on_in_the_background() -> None:
    server = server_with("s", engines=2)
    here, _ = server.engine.cores
    here.background = True
    prefetch = {"type": "prefetch", "target": "host"}
    body = {"edits": [{"type": "evict"}, prefetch], "operation_id": "op"}
    begun = server.request("POST", "/v1/sessions/s/edits", json=body)
    assert (begun.status_code, begun.json()["status"]) == (202, "accepted")
    assert [e["status"] for e in begun.json()["edits"]] == ["ok", "accepted"]
    (asked,) = server.engine.asked("apply")
    assert asked["hint"]["context_management"]["edits"][1] == prefetch

    def operation() -> dict[str, Any]:
        response = server.request("GET", "/v1/operations/op")
        assert response.status_code == 200
        answer: dict[str, Any] = response.json()
        return answer

    under_way = operation()
    assert (under_way["object"], under_way["id"]) == ("operation", "op")
    assert (under_way["status"], under_way["done"]) == ("accepted", False)
    assert [(e["blocks"], e.get("done_blocks")) for e in under_way["edits"]] == [(4, None), (4, 0)]
    here.finish("default", "op")
    ended = operation()
    assert (ended["status"], ended["done"]) == ("ok", True)
    assert [(e["status"], e["done_blocks"]) for e in ended["edits"]] == [("ok", 4)] * 2


def test_an_end_that_goes_on_in_the_background_is_one() -> None:
    server = server_with("s")
    server.engine.answers = [{"status": "accepted", "ended": ["s"]}]
    response = server.request("DELETE", "/v1/sessions/s")
    assert (response.status_code, response.json()["deleted"]) == (202, True)


def test_a_session_on_two_engines() -> None:
    server = server_with("a/b", engines=3)
    server.engine.cores[2].add_session("default", "a/b", **{"class": "soon", "ttl_left_s": 9.0})
    response = server.request("GET", "/v1/sessions/a%2Fb")
    assert response.status_code == 200
    assert response.json() == {
        "object": "session",
        "id": "a/b",
        "parent_session_id": None,
        "children": 0,
        "active_requests": 0,
        "idle_s": 1.0,
        "ttl_left_s": 9.0,
        "class": "soon",
        "blocks": 8,
        "residency": {"gpu": 8, "host": 0, "remote": 0},
    }


def test_everything_an_engine_says_about_a_session() -> None:
    tiers = {"gpu": 2, "host": 1, "remote": 4}
    sizes = {f"{tier}_bytes": blocks * 100 for tier, blocks in tiers.items()}
    known = {"bytes": 200, "age_s": None}
    ranges = [
        {"block_start": 0, "block_end": 2, "tiers": ["gpu", "remote"], **known},
        {"block_start": 2, "block_end": 4, "tiers": ["host", "remote"], **known},
    ]
    more = {
        "residency": {**tiers, **sizes, "age_s": 2.5, "ranges": ranges},
        "auto": {"decision": "offload", "reason": "a reload costs less"},
        "operations": [{"id": "op", "type": "prefetch", "status": "accepted"}],
        "origin": "manifest",
    }
    server = server_with(engines=2)
    server.engine.cores[1].add_session("default", "s", **more)
    answer = server.request("GET", "/v1/sessions/s").json()
    assert {key: answer[key] for key in more} == more


@settings(max_examples=60)
@given(st.one_of(visible, visible.map(lambda s: f"{s}/edits"), visible.map(lambda s: f"{s}/")))
def test_any_session_id_can_be_named(session_id: str) -> None:
    server = server_with(session_id)

    async def scenario() -> None:
        await start(server.app, server.engine)
        path = f"/v1/sessions/{quote(session_id, safe='').replace('.', '%2E')}"
        async with browsing(server.app) as http:
            assert (await http.get(path)).json()["id"] == session_id
            edited = await http.post(f"{path}/edits", json=EVICT)
            assert edited.json()["session_id"] == session_id
            assert (await http.delete(path)).json()["id"] == session_id
            assert (await http.get(path)).status_code == 404

    run(scenario)


@pytest.mark.parametrize("path", ["a%20b", "%C3%A4", "x" * 257, ""])
@pytest.mark.parametrize(
    ("method", "suffix", "fields"),
    [("GET", "", {}), ("DELETE", "", {}), ("POST", "/edits", {"json": EVICT})],
)
def test_bad_session_ids(path: str, method: str, suffix: str, fields: dict[str, Any]) -> None:
    server = server_with("s")
    response = server.request(method, f"/v1/sessions/{path}{suffix}", **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "session_id"
    assert server.engine.requests == []


def test_list() -> None:
    server = server_with("b", "a", engines=2)
    server.engine.cores[1].add_session("default", "c")
    first = server.request("GET", "/v1/sessions?limit=2").json()
    assert [s["id"] for s in first["data"]] == ["a", "b"]
    assert {s["object"] for s in first["data"]} == {"session"}
    assert "residency" not in first["data"][0]
    del first["data"]
    assert first == {"object": "list", "first_id": "a", "last_id": "b", "has_more": True}
    second = server.request("GET", "/v1/sessions?limit=2&after=b").json()
    assert [s["id"] for s in second["data"]] == ["c"]
    assert second["has_more"] is False
    assert [r["limit"] for r in server.engine.asked("list_sessions")] == [2, 2]


def test_an_empty_list() -> None:
    response = server_with().request("GET", "/v1/sessions")
    assert response.json() == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=x", "limit"),
        ("limit=-1", "limit"),
        ("limit=" + "9" * 5000, "limit"),
        ("limit=%C2%B2", "limit"),
        ("after=a%20b", "after"),
    ],
)
def test_bad_list_parameters(query: str, param: str) -> None:
    response = server_with().request("GET", f"/v1/sessions?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_list_the_engine_could_not_give() -> None:
    server = server_with()
    server.engine.answers = [{"status": "failed", "detail": "why"}]
    response = server.request("GET", "/v1/sessions")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "why"


@pytest.mark.parametrize(
    ("query", "tree"), [("", False), ("?tree=true", True), ("?tree=false", False)]
)
def test_delete(query: str, tree: bool) -> None:
    server = server_with("s")
    response = server.request("DELETE", f"/v1/sessions/s{query}", headers={"x-operation-id": "op"})
    assert response.json() == {
        "object": "session.deleted",
        "id": "s",
        "deleted": True,
        "status": "ok",
        "operation_id": "op",
        "ended": ["s"],
    }
    (asked,) = server.engine.asked("end_session")
    assert asked["tree"] is tree
    again = server.request("DELETE", "/v1/sessions/s")
    assert again.status_code == 404


def test_bad_tree() -> None:
    response = server_with("s").request("DELETE", "/v1/sessions/s?tree=maybe")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tree")


def test_operations_are_remembered_with_their_own_outcome() -> None:
    server = server_with("s", engines=2)
    server.request("POST", "/v1/sessions/s/edits", json={**EVICT, "operation_id": "op-1"})
    server.request("POST", "/v1/sessions/x/edits", json={**EVICT, "operation_id": "op-2"})
    for operation, status in (("op-1", "ok"), ("op-2", "not_found")):
        response = server.request("GET", f"/v1/operations/{operation}")
        assert response.status_code == 200
        answer = response.json()
        assert (answer["object"], answer["id"]) == ("operation", operation)
        assert (answer["status"], answer["operation_id"]) == (status, operation)
        assert answer["edits"][0]["type"] == "evict"
    assert server.request("GET", "/v1/operations/op-3").status_code == 404
    assert server.request("GET", "/v1/operations/a%20b").status_code == 400


def test_tenants_do_not_see_each_other() -> None:
    server = server_with("s", tenant_header="X-Tenant")
    server.engine.cores[0].add_session("acme", "s", blocks=1)
    acme, other = {"x-tenant": "acme"}, {"x-tenant": "other"}
    assert server.request("GET", "/v1/sessions/s", headers=acme).json()["blocks"] == 1
    assert server.request("GET", "/v1/sessions/s").json()["blocks"] == 4
    assert server.request("GET", "/v1/sessions/s", headers=other).status_code == 404
    assert server.request("GET", "/v1/sessions", headers=other).json()["data"] == []
    assert server.request("DELETE", "/v1/sessions/s", headers=other).status_code == 404
    body = {**EVICT, "operation_id": "op"}
    path = "/v1/sessions/s/edits"
    assert server.request("POST", path, json=body, headers=acme).status_code == 200
    assert server.request("GET", "/v1/operations/op", headers=other).status_code == 404
    assert server.request("GET", "/v1/operations/op", headers=acme).status_code == 200
    bad = server.request("GET", "/v1/sessions", headers={"x-tenant": "a b"})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "X-Tenant")


def test_the_status_of_every_engine_of_no_tenant() -> None:
    server = server_with("s", engines=2, tenant_header="X-Tenant")
    for headers in ({}, {"x-tenant": "acme"}, {"x-tenant": "a b"}):
        response = server.request("GET", "/v1/spm/status", headers=headers)
        assert response.json() == {
            "object": "spm.status",
            "engines": [
                {"engine": 0, "sessions": 1, "operations": 0},
                {"engine": 1, "sessions": 0, "operations": 0},
            ],
        }
    assert {asked["tenant"] for asked in server.engine.asked("status")} == {"default"}


def test_the_status_of_engines_that_know_none() -> None:
    server = server_with()
    server.engine.answers = [{"status": "unsupported", "detail": "known operations: []"}]
    response = server.request("GET", "/v1/spm/status")
    assert response.status_code == 501
    assert response.json()["error"]["message"] == "known operations: []"


ROUTES = [
    ("POST", "/v1/sessions/s/edits"),
    ("GET", "/v1/sessions/s"),
    ("GET", "/v1/sessions"),
    ("DELETE", "/v1/sessions/s"),
    ("GET", "/v1/operations/op"),
    ("GET", "/v1/spm/status"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_switched_off(method: str, path: str) -> None:
    response = Server(enabled=False).request(method, path)
    assert response.status_code == 501
    assert response.json()["error"]["status"] == "unsupported"
    assert "sam.enabled" in response.json()["error"]["message"]
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_dead_engine(method: str, path: str) -> None:
    server = server_with("s")
    server.engine.error = type("EngineDeadError", (Exception,), {})()
    fields = {"json": EVICT} if method == "POST" else {}
    response = server.request(method, path, **fields)
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "ServiceUnavailableError"


def test_under_a_root_path() -> None:
    server = Server(root_path="/api")
    server.engine.cores[0].add_session("default", "s")
    assert server.request("GET", "/api/v1/sessions/s").json()["id"] == "s"
