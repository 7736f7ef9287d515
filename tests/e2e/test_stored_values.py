"""Values in Redis may be anything: what is not exactly right is recomputed and replaced."""

import random
from collections.abc import Callable, Iterator

import pytest

from spm.value_format import HEADER_BYTES
from tests.e2e.checked_engine import checked_engine
from tests.e2e.conversations import assert_identical, replay
from tests.e2e.engine_process import EngineProcess
from tests.e2e.stock import Stock, fill, resume_until_identical
from tests.e2e.tampering import (
    Values,
    assert_refused_and_replaced,
    read_values,
    rotated,
    signed,
    write_values,
)
from tests.redis_server import EXECUTABLE, RedisServer, running_redis

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    if EXECUTABLE is None:
        pytest.skip("no redis-server on the path")
    with running_redis() as server:
        yield server


@pytest.fixture(scope="module")
def engine(stock: Stock, server: RedisServer) -> Iterator[EngineProcess]:
    with checked_engine(stock.engine(server.tcp_url)) as engine:
        fill(engine, stock)
        yield engine


def _each(damage: Callable[[bytearray], bytes]) -> Callable[[Values], Values]:
    return lambda values: {key: damage(bytearray(value)) for key, value in values.items()}


def _flip(value: bytearray, at: int) -> bytes:
    value[at] ^= 0x10
    return bytes(value)


DAMAGES: dict[str, Callable[[Values], Values]] = {
    "bit-in-header": _each(lambda value: _flip(value, 5)),
    "bit-in-payload": _each(lambda value: _flip(value, len(value) // 2)),
    "last-bit": _each(lambda value: _flip(value, len(value) - 1)),
    "truncated": _each(lambda value: bytes(value[:-1])),
    "extended": _each(lambda value: bytes(value) + b"\0"),
    "empty": _each(lambda value: b""),
    "noise": _each(lambda value: random.Random(3).randbytes(len(value))),
    "other-blocks-value": rotated,
    "other-fingerprint": lambda values: signed(values, bytes(16)),
    "other-rank": lambda values: signed(values, None, rank=1),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.fault("F3", breaks="a load that failed is an assertion in the worker")
@pytest.mark.fault("F12", breaks="the header does not say which block it is")
@pytest.mark.fault(
    "F20",
    breaks="vLLM hears of the last block that failed only, and computes from there",
)
@pytest.mark.fault("F21", breaks="failures are collected and never told")
def test_a_damaged_value_is_a_miss_and_is_replaced(
    damage: Callable[[Values], Values], engine: EngineProcess, stock: Stock, server: RedisServer
) -> None:
    assert_refused_and_replaced(engine, stock, server, damage)


def test_the_comparison_sees_one_wrong_block(
    engine: EngineProcess, stock: Stock, server: RedisServer
) -> None:
    """Wrong KV under valid headers, which only a liar could store: tests must notice."""
    resume_until_identical(engine, stock)
    with server.client() as client:
        values = read_values(client)
        payloads = {key: value[HEADER_BYTES:] for key, value in rotated(values).items()}
        forged = {key: values[key][:HEADER_BYTES] + payloads[key] for key in values}
        write_values(client, signed(forged, None))
        assert engine.drop_gpu_cache()
        with pytest.raises(AssertionError):
            assert_identical(replay(engine, stock.again), stock.again)
        write_values(client, values)
    assert engine.drop_gpu_cache()
