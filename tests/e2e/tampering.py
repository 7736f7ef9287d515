"""Stored blocks behind the engines' back: read, changed, made anew, written."""

from collections.abc import Callable
from typing import Any

import redis

from spm.keys import Fingerprint, Rank, StoreKey, block_key_of
from spm.value_auth import Authenticator
from spm.value_format import ValueIdentity, write_header
from tests.e2e.conversations import assert_same_tokens, replay
from tests.e2e.engine_process import EngineProcess
from tests.e2e.stock import Stock, resume_until_identical
from tests.redis_server import RedisServer
from tracker.ids import split_block_key

Values = dict[bytes, bytes]


def rotated(values: Values) -> Values:
    """Every key gets its neighbour's value, intact."""
    keys = sorted(values)
    return {key: values[other] for key, other in zip(keys, keys[1:] + keys[:1], strict=True)}


def signed(
    values: Values,
    fingerprint: bytes | None,
    rank: int = 0,
    auth: Authenticator | None = None,
) -> Values:
    """Valid headers and checksums or MACs, for this payload, in the name of ``fingerprint``."""
    made = {}
    for key, value in values.items():
        name = StoreKey(key.decode())
        block_hash, group = split_block_key(block_key_of(name))
        own = bytes.fromhex(name.split(":")[1])
        identity = ValueIdentity(Fingerprint(fingerprint or own), Rank(rank), group, block_hash)
        copy = bytearray(value)
        write_header(memoryview(copy), identity, auth)
        made[key] = bytes(copy)
    return made


def read_values(client: redis.Redis) -> Values:
    """The blocks; a session's manifest lies beside them."""
    values: Any = {key: client.get(key) for key in client.scan_iter() if b":manifest:" not in key}
    return dict(values)


def write_values(client: redis.Redis, values: Values) -> None:
    for key, value in values.items():
        client.set(key, value)


def assert_refused_and_replaced(
    engine: EngineProcess, stock: Stock, server: RedisServer, change: Callable[[Values], Values]
) -> None:
    """No changed value is loaded, no token differs, and then all of them are as they were."""
    resume_until_identical(engine, stock)
    loaded = engine.counters()["spm:loaded_blocks|remote"]
    with server.client() as client:
        write_values(client, change(read_values(client)))
    assert engine.drop_gpu_cache()
    assert_same_tokens(replay(engine, stock.again), stock.again)
    engine.settle()
    assert engine.counters()["spm:loaded_blocks|remote"] == loaded
    resume_until_identical(engine, stock)
