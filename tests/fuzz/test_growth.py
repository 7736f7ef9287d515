"""What large inputs cost: memory in proportion to what was sent, and twice the work for twice as
much. Work is counted in lines of Python that ran, not in seconds."""

import sys
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import msgpack
import pytest
import xxhash
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse

from connectors.stores.redis_parser import SinkParser
from spm.lifecycle import MAX_KEYS, MAX_RECORD_BYTES
from spm.manifest import MAGIC, MAX_MANIFEST_BYTES
from tests.fuzz.samples import SAMPLES
from tests.fuzz.targets import TARGETS, parser_on

MiB = 2**20


def lines_of(work: Callable[[bytes], object], data: bytes) -> int:
    """Lines of Python that ran for it."""
    count = 0

    def trace(frame: FrameType, what: str, _: object) -> Any:  # noqa: ANN401
        nonlocal count
        count += what == "line"
        return trace

    sys.settrace(trace)
    try:
        work(data)
    finally:
        sys.settrace(None)
    return count


def peak_of(work: Callable[[bytes], object], data: bytes) -> int:
    """Bytes of Python objects alive at the worst moment."""
    tracemalloc.start()
    try:
        work(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _event(keys: int) -> bytes:
    wire = msgpack.unpackb(SAMPLES["event"][1])
    return bytes(msgpack.packb({**wire, "keys": [b"k" * 40] * keys}))


def _manifest(blocks: int) -> bytes:
    """Holes only: an eighth of a byte each."""
    content = SAMPLES["manifest"][0][13:]
    header = msgpack.unpackb(content[2 : 2 + int.from_bytes(content[:2], "big")])
    packed = msgpack.packb({**header, "groups": [[0, 1, blocks, 0]], "hash_bytes": 0})
    rest = len(packed).to_bytes(2, "big") + packed + bytes((blocks + 7) // 8)
    return b"".join((MAGIC, xxhash.xxh3_64_digest(rest), rest))


GROWING: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "keys of an event": ("event", lambda n: _event(n // 4)),
    "holes of a manifest": ("manifest", _manifest),
    "elements of a reply": ("reply", lambda n: b"\xff\0*%d\r\n" % n + b":1\r\n" * n),
    "a line of a reply in single bytes": ("reply", lambda n: b"\0\0+" + b"x" * (n // 16)),
    "keys of a body": (
        "body",
        lambda n: b"\1\1\1{" + b",".join(b'"k%d":1' % k for k in range(n)) + b',"agent_hint":{}}',
    ),
    "a text in a hint": (
        "body",
        lambda n: b'\1\1\1{"agent_hint":{"session_id":"' + b"x" * n + b'"}}',
    ),
    "unknown keys of a hint": (
        "body",
        lambda n: b'\1\1\1{"agent_hint":{' + b",".join(b'"k%d":null' % k for k in range(n)) + b"}}",
    ),
    "nesting of a body": ("body", lambda n: b'\1\1\1{"a":' + b"[" * n + b"]" * n + b"}"),
}


@pytest.mark.parametrize("what", GROWING)
def test_twice_as_much_is_at_most_twice_the_work(what: str) -> None:
    target, build = GROWING[what]
    once, twice = (lines_of(TARGETS[target], build(n)) for n in (1000, 2000))
    assert twice <= 2.2 * once + 100


def _nested_reply(depth: int, width: int) -> bytes:
    data = b":1\r\n"
    for _ in range(depth):
        data = b"*%d\r\n" % width + data * width
    return data


def _one_reply(data: bytes) -> None:
    with suppress(InvalidResponse, RedisConnectionError):
        parser_on(data, 65_536).read()


WORK = {**TARGETS, "one reply": _one_reply}
LARGE: dict[str, tuple[str, bytes, int]] = {
    "an event of empty maps": (
        "event",
        msgpack.packb({"keys": [[{}] * MAX_KEYS] * (MAX_RECORD_BYTES // MAX_KEYS - 2)}),
        80 * MAX_RECORD_BYTES,
    ),
    "a manifest of zeros": ("manifest", bytes(MAX_MANIFEST_BYTES), 3 * MAX_MANIFEST_BYTES),
    "a manifest of holes": ("manifest", _manifest(MAX_MANIFEST_BYTES // 8), 40 * MiB),
    "a value of arrays": ("value", b"\xdc\xff\xff" + b"\x90" * 490, MiB),
    "a reply that announces 2**31 elements": ("one reply", b"*2147483647\r\n", MiB),
    "a reply that announces 2**63 bytes": ("one reply", b"$9223372036854775807\r\n", MiB),
    "a reply of many elements": ("one reply", b"*200000\r\n" + b"$0\r\n\r\n" * 200_000, 24 * MiB),
    "a reply of nested arrays": ("one reply", _nested_reply(5, 10), 24 * MiB),
    "a reply of large elements": (
        "one reply",
        b"*4\r\n" + (b"$%d\r\n" % (9 * MiB) + bytes(9 * MiB) + b"\r\n") * 4,
        40 * MiB,
    ),
}


@pytest.mark.parametrize("what", LARGE)
def test_memory_is_bounded_by_what_was_sent(what: str) -> None:
    """Catches a build that trusts a length it was told. The input itself is not counted twice:
    some decoders copy it."""
    target, data, most_bytes = LARGE[what]
    assert peak_of(WORK[target], data) < most_bytes


@pytest.mark.parametrize(
    "stream",
    [
        b"*200000\r\n" + b"$0\r\n\r\n" * 200_000,
        b"*4\r\n" + (b"$%d\r\n" % (9 * MiB) + bytes(9 * MiB) + b"\r\n") * 4,
        b"*1\r\n" * 9 + b":1\r\n",
        b":" + b"9" * 20 + b"\r\n",
        b":1_0\r\n",
        b"-MOVED\r\n",
        b"-ASK x\r\n",
    ],
)
def test_replies_beyond_the_bounds_end_the_connection(stream: bytes) -> None:
    parser: SinkParser = parser_on(stream, 4096)
    with pytest.raises(InvalidResponse):
        parser.read()


def test_an_error_s_text_is_cut() -> None:
    error = parser_on(b"-ERR " + b"x" * 200 + b"\r\n", 4096).read()
    assert len(str(error)) == 200
    long = parser_on(b"-ERR " + b"x" * 240 + b"\r\n", 4096)
    assert len(str(long.read())) <= 512
