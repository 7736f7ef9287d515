"""Requests on vLLM's own generation endpoints: hints checked and handed on, management done."""

import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from spm.hints import DEFAULT_TENANT
from spm.http import openai_bodies, operations
from spm.http.body import Buffered, read_body
from spm.http.errors import RequestError
from spm.http.frontend import Frontend, frontend_of
from spm.http.ids import operation_id
from spm.http.rewriting import (
    MANAGE_FIELD,
    ManageRequest,
    decide,
    may_concern_us,
    may_have_salt,
    resalted,
)
from tracker.ids import TenantId

MAX_BODY_BYTES = 64 << 20
MESSAGES = "/v1/messages"
ENDPOINTS = (openai_bodies.CHAT, openai_bodies.COMPLETIONS, openai_bodies.RESPONSES, MESSAGES)


class AgentHintMiddleware:
    """Pure ASGI. What it has nothing to say about passes byte for byte.

    The application's answer, its stream and its view of the client's disconnect are the
    application's own: only the body is read ahead, and only up to ``limit_bytes``.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limit_bytes: int = MAX_BODY_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._app = app
        self._limit_bytes = limit_bytes
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = _endpoint(scope)
        frontend = frontend_of(scope.get("app"))
        if not isinstance(frontend, Frontend):
            await self._app(scope, receive, send)
            return
        if endpoint is None:
            await self._elsewhere(frontend, scope, receive, send)
            return
        try:
            tenant = frontend.tenants.tenant_of(Headers(scope=scope))
            decided = await self._read(frontend, tenant, scope, receive)
            if not isinstance(decided, ManageRequest):
                app, receive = self._app, decided
            else:
                app = await self._managed(endpoint, frontend, tenant, decided, scope)
        except RequestError as error:
            app = error.response()
        await app(scope, receive, send)

    async def _elsewhere(
        self, frontend: Frontend, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Requests to all other routes are nobody's, and must not name a tenant's salt."""
        app = self._app
        if frontend.sam.salts_tenants and _may_be_json(scope):
            try:
                receive = await self._without_salts(scope, receive)
            except RequestError as error:
                app = error.response()
        await app(scope, receive, send)

    async def _without_salts(self, scope: Scope, receive: Receive) -> Receive:
        read = await read_body(receive, self._limit_bytes)
        if read.too_long:
            raise RequestError(413, f"a body above {self._limit_bytes} bytes cannot be looked at")
        body = resalted(read.content) if read.ended and may_have_salt(read.content) else None
        return _passed_on(read, scope, receive, body)

    async def _read(
        self, frontend: Frontend, tenant: TenantId, scope: Scope, receive: Receive
    ) -> Receive | ManageRequest:
        """The management request in the body, or the body for the application to receive."""
        read = await read_body(receive, self._limit_bytes)
        salts = frontend.sam.salts_tenants
        if read.too_long and (salts or tenant != DEFAULT_TENANT):
            # Passed on unread it would run as the default tenant.
            raise RequestError(
                413, f"a body above {self._limit_bytes} bytes cannot be given its tenant"
            )
        if read.too_long or not read.ended:
            return read.replay(receive)
        plain = not may_concern_us(read.content) and not (salts and may_have_salt(read.content))
        if tenant == DEFAULT_TENANT and plain:
            return read.replay(receive)
        decided = decide(read.content, frontend.sam, frontend.tenants.claim(tenant), tenant)
        if isinstance(decided, ManageRequest):
            return decided
        return _passed_on(read, scope, receive, decided)

    async def _managed(
        self,
        endpoint: str,
        frontend: Frontend,
        tenant: TenantId,
        asked: ManageRequest,
        scope: Scope,
    ) -> ASGIApp:
        """The answer to a request that never reaches the model."""
        if endpoint == MESSAGES:
            raise RequestError(
                400,
                f"{MANAGE_FIELD}: not on {MESSAGES}; use POST /v1/sessions/{{session_id}}/edits",
                param=MANAGE_FIELD,
            )
        operation = operation_id(Headers(scope=scope))
        result = await operations.apply(frontend.engine, tenant, operation, asked.hint)
        return openai_bodies.management_response(endpoint, asked, result, int(self._clock()))


def _endpoint(scope: Scope) -> str | None:
    """Which of :data:`ENDPOINTS` the request is for with a JSON body, if any."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    path = _route_path(scope)
    if path not in ENDPOINTS:
        return None
    # vLLM refuses every other type, and a browser's form must not reach a management request.
    media_type = Headers(scope=scope).get("content-type", "").partition(";")[0]
    return path if media_type.strip().lower() == "application/json" else None


def _may_be_json(scope: Scope) -> bool:
    """Whatever its type says: some routes do not look at it. Forms are no JSON."""
    if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "DELETE", "OPTIONS"):
        return False
    return not Headers(scope=scope).get("content-type", "").lower().startswith("multipart/")


def _route_path(scope: Scope) -> str:
    """The path without ``root_path``, by the rule of the router that will look at it next."""
    path: str = scope["path"]
    root_path: str = scope.get("root_path", "")
    under_root = path.startswith(root_path) and path[len(root_path) :].startswith("/")
    return path[len(root_path) :] if under_root else path


def _passed_on(read: Buffered, scope: Scope, receive: Receive, body: bytes | None) -> Receive:
    """``body`` in place of what was read; None: as it came."""
    if body is not None:
        _set_content_length(scope, len(body))
    return read.replay(receive, body)


def _set_content_length(scope: Scope, length_bytes: int) -> None:
    """In place: what the router adds to the scope later must be seen by outer middleware."""
    framing = (b"content-length", b"transfer-encoding")
    headers = [(name, value) for name, value in scope["headers"] if name.lower() not in framing]
    scope["headers"] = [*headers, (b"content-length", str(length_bytes).encode())]
