"""An HTTP server that answers as a script says, however wrong."""

import contextlib
import socket
import threading
from collections.abc import Callable

Script = Callable[[socket.socket, bytes], None]
"""Given the client's socket and its request; the connection is closed afterwards."""


class ScriptedHttp:
    """Accepts on a loopback port, one connection a request."""

    def __init__(self, script: Script) -> None:
        self.requests: list[bytes] = []
        self.ended = threading.Event()
        """Scripts that wait, wait for this."""
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> "ScriptedHttp":
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError):
                request = _whole_request(client)
                self.requests.append(request)
                self._script(client, request)


def _whole_request(client: socket.socket) -> bytes:
    client.settimeout(5)
    received = b""
    while b"\r\n\r\n" not in received:
        received += client.recv(65_536)
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += client.recv(65_536)
    return head + b"\r\n\r\n" + body


def answering(body: bytes, status: str = "200 OK") -> Script:
    """Say this, whatever is asked."""
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n"
    return lambda client, _request: client.sendall(head.encode() + body)


def saying(raw: bytes) -> Script:
    """Send these bytes."""
    return lambda client, _request: client.sendall(raw)
