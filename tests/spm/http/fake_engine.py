"""A vLLM engine client whose engine cores are a few dictionaries."""

import asyncio
import copy
from types import SimpleNamespace
from typing import Any

import msgpack

Answer = dict[str, Any]


def connector_config(**extra: Any) -> SimpleNamespace:  # noqa: ANN401
    """The part of vLLM's configuration that is read."""
    return SimpleNamespace(
        kv_connector="SessionAwareConnector", kv_connector_extra_config=dict(extra)
    )


class FakeCore:
    """One engine core: sessions and operations by tenant.

    With ``background`` an offload or a prefetch is under way until :meth:`finish`.
    """

    def __init__(self) -> None:
        self.background = False
        self.secrets: list[bytes] = []
        self.sessions: dict[tuple[str, str], Answer] = {}
        self.operations: dict[tuple[str, str], Answer] = {}

    def add_session(self, tenant: str, session_id: str, **fields: Any) -> None:  # noqa: ANN401
        session = {
            "id": session_id,
            "parent_session_id": None,
            "children": 0,
            "active_requests": 0,
            "idle_s": 1.0,
            "ttl_left_s": 0.0,
            "class": "associated",
            "blocks": 4,
            "residency": {"gpu": 4, "host": 0, "remote": 0},
        }
        self.sessions[tenant, session_id] = {**session, **fields}

    def finish(self, tenant: str, operation_id: str) -> None:
        operation = self.operations[tenant, operation_id]
        operation["status"], operation["done"] = "ok", True
        for edit in operation["edits"]:
            edit["status"], edit["done_blocks"] = "ok", edit["blocks"]

    def manage(self, request: Answer) -> Answer:
        op, tenant = request["op"], request["tenant"]
        if op == "status":
            return {"status": "ok", "engine": {"sessions": len(self.sessions), "operations": 0}}
        if op == "register_frontend":
            self.secrets.append(request["secret"])
            return {"status": "ok"}
        if op == "list_sessions":
            return self._list(tenant, request["limit"], request["after"])
        if op == "get_session":
            session = self.sessions.get((tenant, request["session_id"]))
            return {"status": "ok", "session": session} if session else {"status": "not_found"}
        key = (tenant, request["operation_id"])
        first = self.operations.get(key)
        if op == "get_operation":
            return {"status": "ok", "operation": first} if first else {"status": "not_found"}
        if first is not None:
            return {**first, "duplicate": True}
        answer = self._end(request) if op == "end_session" else self._apply(request)
        done = answer["status"] != "accepted"
        self.operations[key] = {**copy.deepcopy(answer), "done": done}
        return answer

    def _list(self, tenant: str, limit: int, after: str | None) -> Answer:
        ids = sorted(i for t, i in self.sessions if t == tenant and (after is None or i > after))
        page = [dict(self.sessions[tenant, i]) for i in ids[:limit]]
        for one in page:
            del one["residency"]
        return {"status": "ok", "sessions": page, "has_more": len(ids) > limit}

    def _end(self, request: Answer) -> Answer:
        known = self.sessions.pop((request["tenant"], request["session_id"]), None)
        return {
            "status": "ok" if known else "not_found",
            "operation_id": request["operation_id"],
            "ended": [request["session_id"]] if known else [],
        }

    def _apply(self, request: Answer) -> Answer:
        hint = request["hint"]
        known = (request["tenant"], hint["session_id"]) in self.sessions
        wanted = (hint.get("context_management") or {}).get("edits", [])
        edits = [self._edit(edit, known) for edit in wanted]
        under_way = any(edit["status"] == "accepted" for edit in edits)
        retention = {"class": "later", "ttl_s": 300.0, "blocks": 4}
        return {
            "status": "accepted" if under_way else "ok" if known else "not_found",
            "operation_id": request["operation_id"],
            "session_id": hint["session_id"],
            "edits": edits,
            "retention": retention if known else None,
        }

    def _edit(self, edit: Answer, known: bool) -> Answer:
        answer = {
            "type": edit["type"],
            "status": "ok" if known else "not_found",
            "block_start": edit.get("block_start"),
            "block_end": edit.get("block_end"),
            "blocks": 4 if known else 0,
        }
        if known and self.background and edit["type"] != "evict":
            answer |= {"status": "accepted", "done_blocks": 0}
        return answer


class FakeEngineClient:
    """Client of ``engines`` cores. What is sent and answered has to survive msgpack.

    ``error`` is raised instead of an answer, ``answers`` given instead of the cores', and
    while ``gate`` is closed nothing is answered.
    """

    def __init__(self, config: SimpleNamespace | None = None, *, engines: int = 1) -> None:
        self.vllm_config = SimpleNamespace(kv_transfer_config=config)
        self.engine_core = self
        self.cores = [FakeCore() for _ in range(engines)]
        self.requests: list[Answer] = []
        self.error: Exception | None = None
        self.answers: list[Any] | None = None
        self.gate: asyncio.Event | None = None

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:  # noqa: ANN401
        assert method == "spm_manage"
        (request,) = (msgpack.unpackb(msgpack.packb(arg)) for arg in args)
        assert request["v"] == 1
        self.requests.append(request)
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        if self.answers is not None:
            return self.answers
        answers = [core.manage(request) for core in self.cores]
        return list(msgpack.unpackb(msgpack.packb(answers)))

    def asked(self, op: str) -> list[Answer]:
        return [request for request in self.requests if request["op"] == op]
