"""``/v1/sessions``, ``/v1/operations``, ``/v1/spm``: management without a generation endpoint.

What is about sessions is scoped to the request's tenant: another tenant's session is not
found. ``/v1/spm/status`` is about the engines and names no session.
"""

from typing import Any, NamedTuple

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse

from spm.http import operations
from spm.http.body import read_body
from spm.http.edit_request import parse_edit_request
from spm.http.engine import EngineOperations
from spm.http.errors import RequestError
from spm.http.frontend import Frontend, frontend_of
from spm.http.ids import checked_operation_id, checked_session_id, operation_id
from spm.http.operations import Result
from spm.operation import UNFINISHED
from tracker.ids import TenantId

MAX_BODY_BYTES = 1 << 20
DEFAULT_LIMIT, MAX_LIMIT = 100, 1000
_CODES = {"not_found": 404, "rejected": 429}
_UNFINISHED_CODE = 202
_NO_OBJECT_CODES = {"unsupported": 501}

router = APIRouter(tags=["sessions"])


# Before the routes of a session: an id may contain "/", and only POST ends in "edits".
@router.post("/v1/sessions/{session_id:path}/edits")
async def edit_session(session_id: str, request: Request) -> JSONResponse:
    """Apply edits and retention to a session without model execution. HTTP 202 if all went
    well so far and some of it goes on in the background."""
    frontend, tenant, engine = _asked(request)
    parsed = parse_edit_request(session_id, await _json_body(request), frontend.sam)
    operation = parsed.operation_id or operation_id(request.headers)
    result = await operations.apply(engine, tenant, operation, parsed.hint)
    return _answer("session.edits", result)


@router.get("/v1/sessions")
async def list_sessions(request: Request) -> JSONResponse:
    """The tenant's sessions, ascending by id; ``?limit=`` and ``?after=``."""
    _, tenant, engine = _asked(request)
    after = request.query_params.get("after")
    if after is not None:
        checked_session_id(after, "after")
    result = await operations.list_sessions(engine, tenant, _limit(request), after)
    data = [{"object": "session", **one} for one in _object(result, "sessions")]
    return JSONResponse(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": result["has_more"],
        }
    )


@router.get("/v1/sessions/{session_id:path}")
async def get_session(session_id: str, request: Request) -> JSONResponse:
    """What is known about a session and where its blocks are."""
    _, tenant, engine = _asked(request)
    checked_session_id(session_id, "session_id")
    result = await operations.get_session(engine, tenant, session_id)
    return JSONResponse({"object": "session", **_object(result, "session")})


@router.delete("/v1/sessions/{session_id:path}")
async def end_session(session_id: str, request: Request) -> JSONResponse:
    """End a session; with ``?tree=true`` its descendants too."""
    _, tenant, engine = _asked(request)
    checked_session_id(session_id, "session_id")
    tree = request.query_params.get("tree", "false")
    if tree not in ("true", "false"):
        raise _bad("tree", "true or false is needed")
    operation = operation_id(request.headers)
    result = await operations.end_session(engine, tenant, operation, session_id, tree == "true")
    ended = result["status"] == "ok" or result["status"] in UNFINISHED
    deleted = {"id": session_id, "deleted": ended}
    return _answer("session.deleted", {**deleted, **result})


@router.get("/v1/operations/{operation}")
async def get_operation(operation: str, request: Request) -> JSONResponse:
    """What became of an earlier operation; HTTP 200 whatever its own outcome is."""
    _, tenant, engine = _asked(request)
    checked_operation_id(operation, "operation_id")
    result = await operations.get_operation(engine, tenant, operation)
    found = _object(result, "operation")
    return JSONResponse({"object": "operation", "id": operation, **found})


@router.get("/v1/spm/status")
async def get_status(request: Request) -> JSONResponse:
    """What each engine holds and does, in counts."""
    result = await operations.get_status(_frontend(request).engine)
    return JSONResponse({"object": "spm.status", "engines": _object(result, "engines")})


async def request_error(_request: Request, error: Exception) -> JSONResponse:
    """Exception handler of :class:`RequestError`, for the application."""
    if not isinstance(error, RequestError):
        raise error
    return error.response()


class _Asked(NamedTuple):
    frontend: Frontend
    tenant: TenantId
    engine: EngineOperations


def _frontend(request: Request) -> Frontend:
    frontend = frontend_of(request.app)
    if not isinstance(frontend, Frontend):
        raise RequestError(501, frontend.reason, status="unsupported")
    return frontend


def _asked(request: Request) -> _Asked:
    frontend = _frontend(request)
    return _Asked(frontend, frontend.tenants.tenant_of(request.headers), frontend.engine)


async def _json_body(request: Request) -> bytes:
    media_type = request.headers.get("content-type", "").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise RequestError(415, "only application/json is understood", status="failed")
    read = await read_body(request.receive, MAX_BODY_BYTES)
    if read.too_long:
        raise RequestError(
            413, f"the body is longer than {MAX_BODY_BYTES} bytes", status="rejected"
        )
    return read.content


def _limit(request: Request) -> int:
    given = request.query_params.get("limit", str(DEFAULT_LIMIT))
    limit = int(given) if given.isascii() and given.isdigit() and len(given) <= 4 else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise _bad("limit", f"a whole number from 1 to {MAX_LIMIT} is needed")
    return limit


def _answer(kind: str, result: Result) -> JSONResponse:
    """What an operation did, in full whether or not it did anything."""
    body = {"object": kind, **result}
    code = _CODES.get(result["status"])
    if code is not None:
        raise _no_success(code, result, body)
    return JSONResponse(body, _UNFINISHED_CODE if result["status"] in UNFINISHED else 200)


def _object(result: Result, key: str) -> Any:  # noqa: ANN401
    """What was asked for; an answer without it is an error whatever its status."""
    if key not in result or result["status"] in _CODES:
        code = (_CODES | _NO_OBJECT_CODES).get(result["status"], 503)
        raise _no_success(code, result, None)
    return result[key]


def _no_success(code: int, result: Result, body: Result | None) -> RequestError:
    status = result["status"]
    nothing = "no such session or operation of this tenant"
    otherwise = nothing if status == "not_found" else f"the engine answered {status!r}"
    return RequestError(code, result.get("detail", otherwise), status=status, result=body)


def _bad(param: str, problem: str) -> RequestError:
    return RequestError(400, f"{param}: {problem}", param=param, status="failed")
