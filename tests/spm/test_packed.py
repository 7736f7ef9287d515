"""msgpack from outside: maps of plain values within their bounds, and nothing else."""

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spm.errors import BadValueError
from spm.packed import Bounds, unpack_map

BOUNDS = Bounds(size_bytes=200, fields=4, items=5, depth=3)


def refused(packed: bytes) -> None:
    with pytest.raises(BadValueError):
        unpack_map(packed, BOUNDS)


plain = st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=4) | st.binary(max_size=4)
maps = st.dictionaries(
    st.text(max_size=3), plain | st.lists(plain | st.lists(plain, max_size=2), max_size=2),
    max_size=3,
)  # fmt: skip


@given(maps)
def test_a_map_of_plain_values_is_unpacked(given_map: dict[str, Any]) -> None:
    assert unpack_map(msgpack.packb(given_map), BOUNDS) == given_map


@pytest.mark.parametrize(
    "value",
    [
        [0] * 5,
        {"b": 0, "c": 0, "d": 0, "e": 0},
        [[0]],
        {"b": {"c": 0}},
        b"x" * 190,
        "x" * 190,
    ],
)
def test_what_is_just_within_the_bounds(value: object) -> None:
    assert unpack_map(msgpack.packb({"a": value}), BOUNDS) == {"a": value}


@pytest.mark.parametrize(
    "value",
    [
        [0] * 6,
        {"b": 0, "c": 0, "d": 0, "e": 0, "f": 0},
        [[[]]],
        {"b": {"c": {}}},
        [{"c": []}],
        b"x" * 200,
        "x" * 200,
    ],
)
def test_what_is_just_beyond_the_bounds(value: object) -> None:
    refused(msgpack.packb({"a": value}))


@pytest.mark.parametrize(
    "packed",
    [
        b"\xd6\xff\0\0\0\0",  # a timestamp of four bytes
        b"\xd7\xff" + bytes(8),
        b"\xc7\x0c\xff" + bytes(12),
        b"\xd4\x05x",  # an extension of one byte
        b"\xc7\0\x05",  # an extension of none
        b"\xa2\xff\xfe",  # text that is not UTF-8
        b"\xc1",
        b"",
        b"\x01\x02",
    ],
)
def test_values_of_no_plain_type_are_refused_wherever_they_are(packed: bytes) -> None:
    refused(packed)
    refused(b"\x81\xa1a" + packed)
    refused(b"\x81\xa1a\x91" + packed)
    refused(b"\x81" + packed + b"\x01")


@pytest.mark.parametrize("other", [None, 1, [], [{}], "a", {b"a": 1}])
def test_what_is_no_map_of_names_is_refused(other: object) -> None:
    refused(msgpack.packb(other))


def test_the_deepest_nesting_msgpack_reads_is_a_refusal() -> None:
    bounds = Bounds(size_bytes=5000, fields=4, items=5, depth=3)
    for depth in (1000, 1023, 1024, 1100, 4000):
        with pytest.raises(BadValueError):
            unpack_map(b"\x81\xa1a" + b"\x91" * depth + b"\x01", bounds)


@given(st.binary(max_size=250))
def test_random_bytes(packed: bytes) -> None:
    try:
        unpacked = unpack_map(packed, BOUNDS)
    except BadValueError:
        return
    assert all(isinstance(name, str) for name in unpacked)
