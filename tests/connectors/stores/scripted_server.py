"""A TCP server that speaks just enough Redis to misbehave."""

import socket
import threading
from collections.abc import Callable

Answer = Callable[[socket.socket, bytes], None]
"""Given the client's socket and what it sent; returning closes nothing, raising does."""


class Hangup(Exception):  # noqa: N818
    """Raised by an answer to close the connection."""


class ScriptedServer:
    """Accepts on a loopback port, says OK to redis-py's handshake, then plays ``answer``."""

    def __init__(self, answer: Answer) -> None:
        self.connections = 0
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._clients: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> "ScriptedServer":
        return self

    def __exit__(self, *_: object) -> None:
        for open_socket in (self._listener, *self._clients):
            open_socket.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._clients.append(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            while data := client.recv(65_536):
                if b"SETINFO" in data:
                    client.sendall(b"+OK\r\n")
                else:
                    self._answer(client, data)
        except (OSError, Hangup):
            pass
        finally:
            client.close()


def replying(reply: bytes) -> Answer:
    """Answer everything with ``reply``."""

    def answer(client: socket.socket, data: bytes) -> None:
        client.sendall(reply)

    return answer


def silent(client: socket.socket, data: bytes) -> None:
    """Never answer."""
