"""A Redis before version 7, which knows no EXPIRE ... LT: deletes are leases there too."""

import logging
import socket
import time

import pytest

from connectors.stores.base import StoreKey
from connectors.stores.buffers import BufferPool
from connectors.stores.redis import RedisStore
from tests.connectors.stores.scripted_server import ScriptedServer

KEYS = [StoreKey(name) for name in ("a", "b")]


class Redis6:
    """EXISTS says yes, EXPIRE takes two arguments and no more."""

    def __init__(self) -> None:
        self.expired: list[tuple[bytes, ...]] = []

    def __call__(self, client: socket.socket, data: bytes) -> None:
        words = data.split(b"\r\n")
        while len(words) > 1:
            count = int(words[0][1:])
            name, *arguments = words[2 : 1 + 2 * count : 2]
            words = words[1 + 2 * count :]
            if name == b"EXISTS":
                client.sendall(b":1\r\n")
            elif len(arguments) == 2:
                self.expired.append(tuple(arguments))
                client.sendall(b":1\r\n")
            else:
                client.sendall(b"-ERR wrong number of arguments for 'expire' command\r\n")


def test_an_old_server_is_told_without_a_condition_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Catches a build in which the error is overlooked: nothing would ever be deleted."""
    caplog.set_level(logging.WARNING)
    old = Redis6()
    with ScriptedServer(old) as server:
        store = RedisStore(server.url, BufferPool(1))
        for _ in range(3):
            assert store.expire_many(KEYS, 60, time.monotonic() + 5.0) == 2
        assert old.expired == [(b"a", b"60"), (b"b", b"60")] * 3
        assert server.connections == 1
        store.close()
    (line,) = caplog.records
    assert "Redis 7 or newer" in line.message
