"""A TCP relay between engine and Redis, to cut or freeze the wire at any byte."""

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable
from enum import Enum


class Wire(Enum):
    """What the relay does with bytes from the server."""

    FLOW = "flow"
    CUT = "cut"
    """Close both ends once the allowance is used up, and refuse what comes after."""
    FREEZE = "freeze"
    """Pass nothing on once the allowance is used up, and keep connections open."""


class Relay:
    """Context manager; relays a loopback port of its own to ``target_port``."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._mode = Wire.FLOW
        self._allowance_bytes = 0
        self._written_left = -1
        self._at_write: Callable[[], None] | None = None
        self._open: list[socket.socket] = []
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="relay", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}"

    def set(self, mode: Wire, after_bytes: int = 0) -> None:
        """From now on; ``after_bytes`` more bytes from the server still pass."""
        with self._lock:
            self._mode = mode
            self._allowance_bytes = after_bytes
        if mode is Wire.FLOW:  # what was frozen is stale: start again with new connections
            self._hang_up()

    def at_write(self, after_bytes: int, act: Callable[[], None]) -> None:
        """``act`` when so many more bytes have gone to the server; no byte goes there after."""
        with self._lock:
            self._written_left = after_bytes
            self._at_write = act

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._hang_up()
        self._thread.join(5)

    def _hang_up(self) -> None:
        with self._lock:
            sockets, self._open = self._open, []
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
                if self._mode is Wire.CUT and self._allowance_bytes <= 0:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                continue
            with self._lock:
                self._open += [client, server]
            threading.Thread(target=self._pump, args=(client, server), daemon=True).start()

    def _pump(self, client: socket.socket, server: socket.socket) -> None:
        with selectors.DefaultSelector() as ready, client, server:
            ready.register(client, selectors.EVENT_READ, server)
            ready.register(server, selectors.EVENT_READ, client)
            with contextlib.suppress(OSError):
                while True:
                    for key, _ in ready.select():
                        source, sink = key.fileobj, key.data
                        assert isinstance(source, socket.socket)
                        data = source.recv(1 << 16)
                        if source is server:
                            passed = self._admit(len(data))
                            sink.sendall(data[:passed])
                            if passed < len(data) and self._mode is Wire.FREEZE:
                                ready.unregister(server)
                                continue
                            data = data[:passed] if passed == len(data) else b""
                        else:
                            sink.sendall(data[: self._admit_write(len(data))])
                        if not data:
                            return

    def _admit_write(self, size: int) -> int:
        """How many of ``size`` bytes from the client may pass."""
        with self._lock:
            if self._at_write is None:
                return size
            passed = min(size, self._written_left)
            self._written_left -= passed
            if passed < size:
                self._at_write()
            return passed

    def _admit(self, size: int) -> int:
        """How many of ``size`` bytes from the server may pass."""
        with self._lock:
            if self._mode is Wire.FLOW:
                return size
            passed = min(size, self._allowance_bytes)
            self._allowance_bytes -= passed
            return passed
