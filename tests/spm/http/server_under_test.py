"""A FastAPI application with the plugin attached, and endpoints that say what reached them."""

import asyncio
import contextlib
import hashlib
import socket
import threading
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import httpx
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse

from spm.http.middleware import ENDPOINTS
from spm.http.plugin import SessionEndpointPlugin
from tests.spm.http.fake_engine import FakeEngineClient, connector_config

_Result = TypeVar("_Result")


class Seen:
    """Bodies and headers that reached the application's own endpoints."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []


def build_app(root_path: str = "") -> tuple[FastAPI, Seen]:
    """As vLLM builds it: its own routes, then the plugin's."""
    app, seen = FastAPI(), Seen()
    app.root_path = root_path

    async def generate(request: Request) -> JSONResponse:
        body = await request.body()
        seen.bodies.append(body)
        seen.headers.append(dict(request.headers))
        return JSONResponse(
            {"generated": True, "sha256": hashlib.sha256(body).hexdigest(), "size": len(body)}
        )

    for endpoint in (*ENDPOINTS, "/v1/embeddings"):
        app.post(endpoint)(generate)
    SessionEndpointPlugin().attach_router(app)
    return app, seen


async def start(app: FastAPI, client: FakeEngineClient | None) -> None:
    await SessionEndpointPlugin().init_state(client, app.state, Namespace())


@contextlib.asynccontextmanager
async def browsing(app: Any) -> Any:  # noqa: ANN401
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        yield http


def run(scenario: Callable[[], Awaitable[_Result]]) -> _Result:
    """Run a coroutine function to its end; it must not take long."""

    async def bounded() -> _Result:
        return await asyncio.wait_for(scenario(), timeout=30)

    return asyncio.run(bounded())


class Server:
    """Everything of one application, for tests that only talk HTTP."""

    def __init__(self, *, engines: int = 1, root_path: str = "", **sam: Any) -> None:  # noqa: ANN401
        self.engine = FakeEngineClient(connector_config(sam=sam), engines=engines)
        self.app, self.seen = build_app(root_path)

    def request(self, method: str, path: str, **fields: Any) -> httpx.Response:  # noqa: ANN401
        """One request to a server that has just started."""

        async def scenario() -> httpx.Response:
            await start(self.app, self.engine)
            async with browsing(self.app) as http:
                response: httpx.Response = await http.request(method, path, **fields)
                return response

        return run(scenario)


@contextlib.contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """``app`` on a loopback port, in a thread; the address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # from here on connections wait for the server instead of failing
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
