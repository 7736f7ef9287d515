"""A server that gives prepared answers and remembers what it was asked."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx


@dataclass(frozen=True)
class Seen:
    """One request; ``at_s`` by the test's clock. ``timeout_s``: what the client gives it."""

    method: str
    path: str
    query: str
    headers: httpx.Headers
    body: Any
    at_s: float
    timeout_s: float | None


class FakeServer:
    """Several answers to one request are given one after the other, the last for ever."""

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        self._clock = clock
        self._answers: dict[tuple[str, str], list[httpx.Response]] = {}
        self.error: Exception | None = None
        self.requests: list[Seen] = []

    def answers(
        self,
        method: str,
        path: str,
        *documents: object,
        code: int = 200,
        headers: dict[str, str] | None = None,
    ) -> None:
        """``path`` as it is on the wire."""
        self._answers[method, path] = [
            httpx.Response(code, headers=headers, json=document) for document in documents
        ]

    def says(self, method: str, path: str, content: bytes, code: int = 200) -> None:
        """As :meth:`answers`, for what is no JSON."""
        self._answers[method, path] = [httpx.Response(code, content=content)]

    def handle(self, request: httpx.Request) -> httpx.Response:
        path, _, query = request.url.raw_path.decode().partition("?")
        content = request.read()
        body = json.loads(content) if content else None
        timeout_s = request.extensions.get("timeout", {}).get("read")
        self.requests.append(
            Seen(request.method, path, query, request.headers, body, self._clock(), timeout_s)
        )
        if self.error is not None:
            raise self.error
        prepared = self._answers.get((request.method, path))
        if prepared is None:
            return httpx.Response(404, json={"detail": "Not Found"})
        first = prepared.pop(0) if len(prepared) > 1 else prepared[0]
        return httpx.Response(first.status_code, headers=first.headers, content=first.content)

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.handle)

    @contextlib.contextmanager
    def listening(self) -> Iterator[str]:
        """On a port of this machine; the address."""
        handle = self.handle

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                length = int(self.headers.get("content-length", 0))
                address = f"http://{self.headers['host']}{self.path}"
                content = self.rfile.read(length)
                response = handle(
                    httpx.Request(
                        self.command, address, headers=dict(self.headers), content=content
                    )
                )
                self.send_response(response.status_code)
                self.send_header("Content-Length", str(len(response.content)))
                self.end_headers()
                self.wfile.write(response.content)

            do_GET = do_POST = do_DELETE = _answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}"
            finally:
                server.shutdown()
                thread.join()
