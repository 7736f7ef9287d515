"""Management requests as API servers send them, answered on the scheduler's thread.

No model runs, nothing is waited for: what only the store can answer is answered later, by a
future. Every request is scoped to a tenant; another tenant's session is simply not found. The
wire is a dictionary of plain values with a version.
"""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from time import perf_counter
from typing import Any

from spm.agent_hint import AgentHint, EditType, HintError, parse_agent_hint, parse_session_id
from spm.capability import NoPooling, PoolingCapability
from spm.events import SessionEnded, SessionRefreshed
from spm.manager import SessionAwarePoolingManager
from spm.metrics import Counters, Metric
from spm.operation import UNFINISHED, Status, overall
from spm.sam.edits import EditResult
from spm.sam.manager import SessionAwareManager
from spm.sam.operations import OperationLog, Render
from spm.tenancy import TenantVerifier, parse_tenant
from tracker.ids import SessionRef, TenantId

logger = logging.getLogger(__name__)

WIRE_VERSION = 1
_NO_SESSION = "no such session on this engine"
MAX_PAGE = 1000
_Answer = dict[str, Any]


class SessionManagement:
    """Answers one engine's management requests."""

    def __init__(
        self,
        sam: SessionAwareManager,
        spm: SessionAwarePoolingManager,
        tenants: TenantVerifier,
        counters: Counters,
    ) -> None:
        self._sam = sam
        self._spm = spm
        self.pooling: PoolingCapability = NoPooling()
        """Who knows of what is beyond the pool; set once, before the first step."""
        self.engine_status: Callable[[], _Answer] = dict
        """Counts of the whole engine; set once, before the first step."""
        self.auto_state: Callable[[SessionRef], _Answer | None] = lambda ref: None
        """What was decided about a session without being asked; set once as well."""
        self._tenants = tenants
        self._counters = counters
        self._operations = OperationLog()
        self._handlers: dict[
            str, Callable[[TenantId, Mapping[str, Any]], _Answer | Future[_Answer]]
        ] = {
            "apply": self._apply,
            "get_session": self._get_session,
            "list_sessions": self._list_sessions,
            "end_session": self._end_session,
            "get_operation": self._get_operation,
            "status": self._get_status,
        }

    def handle(self, request: Mapping[str, Any]) -> "_Answer | Future[_Answer]":
        """Answer one request, or promise to. Never raises: an engine must not die of a
        question."""
        started_s = perf_counter()
        answer: _Answer | Future[_Answer]
        try:
            answer = self._dispatch(request)
        except HintError as error:
            answer = _refusal(Status.REJECTED, str(error))
        except Exception:
            logger.exception("a management request failed")
            self._counters.add(Metric.INTERNAL_ERRORS, label="management")
            answer = _refusal(Status.FAILED, "internal error; the engine's log has it")
        status = Status.ACCEPTED.value if isinstance(answer, Future) else answer["status"]
        self._counters.add(Metric.MANAGEMENT, label=status)
        self._counters.add(Metric.SAM_SECONDS, perf_counter() - started_s)
        return answer

    def _dispatch(self, request: Mapping[str, Any]) -> "_Answer | Future[_Answer]":
        if request.get("v") != WIRE_VERSION:
            detail = f"version {WIRE_VERSION} is spoken here; upgrade API servers and engines"
            return _refusal(Status.UNSUPPORTED, detail)
        if request.get("op") == "register_frontend":
            known = self._tenants.add_secret(request.get("secret", b""))
            return _answer(Status.OK) if known else _refusal(Status.REJECTED, "not a secret")
        handler = self._handlers.get(str(request.get("op")))
        tenant = parse_tenant(request.get("tenant"))
        if handler is None or tenant is None:
            return _refusal(Status.UNSUPPORTED, f"known operations: {sorted(self._handlers)}")
        return handler(tenant, request)

    # --- changes -----------------------------------------------------------------------

    def _once(
        self, tenant: TenantId, request: Mapping[str, Any], change: Callable[[str], Render]
    ) -> _Answer:
        """A repeated operation id gets the first answer, as it is by now, and changes nothing."""
        operation_id = str(request.get("operation_id", ""))[:64]
        before = self._operations.get(tenant, operation_id)
        if before is not None:
            return {**before, "duplicate": True}
        render = change(operation_id)
        self._operations.put(tenant, operation_id, lambda: _with_id(render(), operation_id))
        return _with_id(render(), operation_id)

    def _apply(self, tenant: TenantId, request: Mapping[str, Any]) -> _Answer:
        hint = parse_agent_hint(request.get("hint"))
        if hint.session_id is None:
            return _refusal(Status.REJECTED, "agent_hint.session_id is missing")
        ref = SessionRef(tenant, hint.session_id)
        return self._once(tenant, request, lambda name: self._apply_hint(ref, hint, name))

    def _apply_hint(self, ref: SessionRef, hint: AgentHint, operation_id: str) -> Render:
        said: _Answer = {"session_id": ref.session_id, "retention": None}
        known = self._spm.tracker.is_open(ref)
        if not known and not self._may_be_elsewhere(hint):
            refusal = {**said, "edits": [], **_refusal(Status.NOT_FOUND, _NO_SESSION)}
            return lambda: refusal
        keeps = hint.cache_control or hint.state or hint.expected_resume_s is not None
        if keeps and known:
            retention, done = self._sam.retain(ref, hint)
            self._spm.handle(SessionRefreshed(ref, retention.ttl_s))
            self.pooling.refreshed(ref)
            said["retention"] = {
                "class": retention.zone.name.lower(),
                "ttl_s": retention.ttl_s,
                "blocks": done.blocks,
            }
        results = [self._sam.edit(ref, edit, operation_id=operation_id) for edit in hint.edits]
        return lambda: _rendered(said, results)

    def _may_be_elsewhere(self, hint: AgentHint) -> bool:
        """Whether another engine's session is to be fetched."""
        return self.pooling.capabilities.manifests and any(
            edit.type is EditType.PREFETCH for edit in hint.edits
        )

    def _end_session(self, tenant: TenantId, request: Mapping[str, Any]) -> _Answer:
        ref = SessionRef(tenant, parse_session_id(request.get("session_id")))
        tree = bool(request.get("tree"))

        def end(_operation_id: str) -> Render:
            answer = self._end(ref, tree)
            return lambda: answer

        return self._once(tenant, request, end)

    def _end(self, ref: SessionRef, tree: bool) -> _Answer:
        if not self._spm.tracker.is_open(ref):
            return {**_refusal(Status.NOT_FOUND, _NO_SESSION), "ended": []}
        ended = self._spm.tracker.subtree(ref) if tree else [ref]
        for one in ended:
            self._sam.closed(one, told=True)
        self._spm.handle(SessionEnded(ref, tree))
        for one in ended:
            self.pooling.release(one)
        return {**_answer(Status.OK), "ended": [one.session_id for one in ended]}

    # --- questions ---------------------------------------------------------------------

    def _get_session(
        self, tenant: TenantId, request: Mapping[str, Any]
    ) -> "_Answer | Future[_Answer]":
        ref = SessionRef(tenant, parse_session_id(request.get("session_id")))
        if not self._spm.tracker.is_open(ref):
            return self._recalled(ref)
        described = self._describe(ref)
        session = {
            **described,
            "blocks": max(described["blocks"], self.pooling.logical_blocks(ref)),
            "origin": "local",
            "auto": self.auto_state(ref),
            "operations": self.pooling.in_progress(ref),
            "residency": {
                "gpu": self._sam.claims.num_resident(ref) if self._sam.claims else 0,
                "host": 0,
                "remote": 0,
                **self.pooling.query_residency(ref),
            },
        }
        return {**_answer(Status.OK), "session": session}

    def _recalled(self, ref: SessionRef) -> "_Answer | Future[_Answer]":
        """A session of another engine, as the store knows it."""
        promise: Future[_Answer] = Future()

        def tell(session: _Answer | None) -> None:
            if session is None:
                promise.set_result(_refusal(Status.NOT_FOUND, _NO_SESSION))
            else:
                described = {**self._describe(ref), "origin": "manifest", **session}
                promise.set_result({**_answer(Status.OK), "session": described})

        if self.pooling.recall(ref, tell):
            return promise
        return _refusal(Status.NOT_FOUND, _NO_SESSION)

    def _describe(self, ref: SessionRef) -> _Answer:
        tracker, claims = self._spm.tracker, self._sam.claims
        parent = tracker.parent_of(ref)
        zone, left_s = claims.state(ref) if claims else (None, 0.0)
        return {
            "id": ref.session_id,
            "parent_session_id": parent.session_id if parent else None,
            "children": len(tracker.children_of(ref)),
            "active_requests": self._spm.active_requests(ref),
            "idle_s": round(self._spm.idle_s(ref), 3),
            "ttl_left_s": round(left_s, 3),
            "class": zone.name.lower() if zone is not None else "ordinary",
            "blocks": claims.num_blocks(ref) if claims else len(tracker.keys_of(ref)),
        }

    def _list_sessions(self, tenant: TenantId, request: Mapping[str, Any]) -> _Answer:
        limit, after = request.get("limit"), request.get("after")
        if not isinstance(limit, int) or not 1 <= limit <= MAX_PAGE:
            return _refusal(Status.REJECTED, f"limit={limit!r}: 1 to {MAX_PAGE}")
        if after is not None:
            after = parse_session_id(after)
        page = self._spm.tracker.page(tenant, after, limit + 1)
        sessions = [self._describe(ref) for ref in page[:limit]]
        return {**_answer(Status.OK), "sessions": sessions, "has_more": len(page) > limit}

    def _get_operation(self, tenant: TenantId, request: Mapping[str, Any]) -> _Answer:
        found = self._operations.get(tenant, str(request.get("operation_id")))
        if found is None:
            return _refusal(Status.NOT_FOUND, "no such operation, or forgotten by now")
        return {**_answer(Status.OK), "operation": found}

    def _get_status(self, tenant: TenantId, request: Mapping[str, Any]) -> _Answer:
        return {**_answer(Status.OK), "engine": self.engine_status()}


def _rendered(said: _Answer, results: list[EditResult]) -> _Answer:
    """The answer to a hint, as it is by now."""
    statuses = [result.current for result in results]
    edits = [result.to_wire() for result in results]
    answer = {
        **said,
        "edits": edits,
        "done": not UNFINISHED.intersection(statuses),
        **_answer(overall(statuses)),
    }
    why = [edit["detail"] for edit in edits if edit["status"] != "ok" and "detail" in edit]
    return {**answer, "detail": why[0]} if why else answer


def _with_id(answer: _Answer, operation_id: str) -> _Answer:
    return {"done": True, **answer, "operation_id": operation_id}


def _answer(status: Status) -> _Answer:
    return {"status": status.value}


def _refusal(status: Status, detail: str) -> _Answer:
    return {"status": status.value, "detail": detail}
