"""Stored values: what was written is read, and anything else is a BadValueError."""

from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spm.errors import BadValueError
from spm.keys import Fingerprint, Rank
from spm.value_auth import MAC_BYTES, Authenticator, Purpose
from spm.value_format import (
    HEADER_BYTES,
    MAGIC,
    ValueIdentity,
    check_value,
    checksum_of,
    write_header,
)
from tracker.ids import BlockHash, GroupId

IDENTITY = ValueIdentity(Fingerprint(b"f" * 16), Rank(1), GroupId(2), BlockHash(b"h" * 32))
PAYLOAD = bytes(range(96))
OTHER_IDENTITIES = [
    replace(IDENTITY, fingerprint=Fingerprint(b"g" * 16)),
    replace(IDENTITY, rank=Rank(0)),
    replace(IDENTITY, group=GroupId(3)),
    replace(IDENTITY, block_hash=BlockHash(b"i" * 32)),
    replace(IDENTITY, block_hash=BlockHash(b"h" * 31)),
]
"""Each differs from IDENTITY in one thing."""


def written(payload: bytes = PAYLOAD, identity: ValueIdentity = IDENTITY) -> bytearray:
    value = bytearray(b"\xaa" * HEADER_BYTES + payload)  # a reused buffer holds old bytes
    write_header(memoryview(value), identity)
    return value


def check(value: bytes | bytearray, *, checksum: bool = True) -> None:
    check_value(memoryview(value), IDENTITY, checksum=checksum)


def refused(value: bytes | bytearray, *, checksum: bool = True) -> None:
    with pytest.raises(BadValueError):
        check(value, checksum=checksum)


IDENTITIES = st.builds(
    ValueIdentity,
    st.binary(min_size=16, max_size=16).map(Fingerprint),
    st.integers(0, 4096).map(Rank),
    st.integers(0, 2**32 - 1).map(GroupId),
    st.binary(min_size=1, max_size=64).map(BlockHash),
)


@given(IDENTITIES, st.binary(max_size=300))
def test_what_was_written_is_accepted_and_the_payload_untouched(
    identity: ValueIdentity, payload: bytes
) -> None:
    value = written(payload, identity)
    check_value(memoryview(value), identity, checksum=True)
    check_value(memoryview(bytes(value)), identity, checksum=False)
    assert value[HEADER_BYTES:] == payload


def test_every_single_flipped_bit_is_seen() -> None:
    value = written()
    for bit in range(len(value) * 8):
        value[bit // 8] ^= 1 << bit % 8
        refused(value)
        value[bit // 8] ^= 1 << bit % 8
    check(value)


def test_every_shorter_and_longer_value_is_refused() -> None:
    value = bytes(written())
    for size in range(len(value)):
        refused(value[:size])
        refused(value[:size], checksum=False)
    for extra in (b"\0", b"\0" * 512, value):
        refused(value + extra)
        refused(value + extra, checksum=False)
    refused(b"\0" + value)


@pytest.mark.parametrize("other", OTHER_IDENTITIES)
@pytest.mark.parametrize("checksum", [True, False])
def test_a_value_of_something_else_is_refused(other: ValueIdentity, checksum: bool) -> None:
    refused(written(identity=other), checksum=checksum)


@pytest.mark.parametrize("odd", [True, 1.0])
def test_a_number_of_another_type_is_not_the_same_number(odd: object) -> None:
    refused(crafted(msgpack.packb(header_map() | {"rank": odd})))


def test_two_swapped_payloads_are_seen() -> None:
    value, other = written(), written(bytes(reversed(PAYLOAD)))
    refused(value[:HEADER_BYTES] + other[HEADER_BYTES:])


def test_without_checksum_only_the_payload_is_trusted() -> None:
    value = written()
    value[-1] ^= 1
    check(value, checksum=False)
    refused(value)


def test_a_hash_that_does_not_fit_is_refused_when_written() -> None:
    huge = replace(IDENTITY, block_hash=BlockHash(b"h" * HEADER_BYTES))
    with pytest.raises(BadValueError, match="does not fit"):
        written(identity=huge)


def crafted(packed: bytes, payload: bytes = PAYLOAD, length: int | None = None) -> bytes:
    """A value whose header is ``packed``."""
    size = len(packed) if length is None else length
    header = (MAGIC + size.to_bytes(2, "big") + packed).ljust(HEADER_BYTES, b"\0")
    return header[:HEADER_BYTES] + payload


def header_map() -> dict[str, object]:
    return {
        "fp": bytes(IDENTITY.fingerprint),
        "rank": 1,
        "group": 2,
        "hash": bytes(IDENTITY.block_hash),
        "size": len(PAYLOAD),
        "xxh3": checksum_of(memoryview(PAYLOAD)),
    }


def test_a_crafted_header_can_be_right() -> None:
    check(crafted(msgpack.packb(header_map())))


@pytest.mark.parametrize("name", ["fp", "rank", "group", "hash", "size", "xxh3"])
@pytest.mark.parametrize(
    "odd", [None, "", b"", -1, 2**64 - 1, 0.5, [], {}, [[1]], msgpack.ExtType(5, b"x"), "absent"]
)
def test_a_field_that_is_odd_or_absent_is_refused(name: str, odd: object) -> None:
    fields = header_map() | {name: odd}
    if odd == "absent":
        del fields[name]
    refused(crafted(msgpack.packb(fields)))


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc0",
        b"\xc1",
        b"\x90",
        b"\x05",
        b"\xd9\xffab",  # a string longer than the header
        b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
        b"\xdb\xff\xff\xff\xff",  # 4 GiB of text
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 items
        b"\xdf\xff\xff\xff\xff",  # a map of 2**32 items
        b"\xc9\xff\xff\xff\xff\x01",  # a huge extension
        b"\x91" * 506,  # arrays in arrays
        b"\x81\xa1a" * 168,  # maps in maps
        b"\x81\x90\x01",  # a list as key
        b"\x81\x01\x02",  # a number as key
        b"\x81\xa1\xff\x01",  # text that is not UTF-8
        b"\xd6\xff\0\0\0\0",  # a timestamp
        b"\xc7\x0c\xff" + b"\xff" * 12,  # a timestamp out of range
        b"\x80\x80",  # one map too many
    ],
)
def test_hostile_headers_are_refused(packed: bytes) -> None:
    refused(crafted(packed))
    refused(crafted(packed), checksum=False)


@given(st.integers(0, 0xFFFF))
def test_a_wrong_header_length_is_refused(length: int) -> None:
    packed = msgpack.packb(header_map())
    if length != len(packed):
        refused(crafted(packed, length=length))


def test_a_header_may_not_run_into_the_payload() -> None:
    """Right in every field, but its last field would end in the payload."""
    payload = bytes(HEADER_BYTES)
    fields = header_map() | {"size": len(payload), "xxh3": checksum_of(memoryview(payload))}
    packed = msgpack.packb(fields | {"more": b"\0" * HEADER_BYTES})
    refused(crafted(packed, payload))


@given(st.binary(max_size=HEADER_BYTES + 64))
def test_random_bytes_are_refused(value: bytes) -> None:
    refused(value)
    refused(value.ljust(HEADER_BYTES + len(PAYLOAD), b"\0"))


@given(st.binary(max_size=HEADER_BYTES - 6))
def test_random_headers_are_refused(packed: bytes) -> None:
    refused(crafted(packed), checksum=False)


# --- authenticated values ------------------------------------------------------------------

AUTH = Authenticator(b"s" * 32, Purpose.VALUES)
OTHERS = [
    None,
    Authenticator(b"t" * 32, Purpose.VALUES),
    Authenticator(b"s" * 32, Purpose.MANIFESTS),
]


def signed(identity: ValueIdentity = IDENTITY, auth: Authenticator | None = AUTH) -> bytearray:
    value = bytearray(b"\xaa" * HEADER_BYTES + PAYLOAD)
    write_header(memoryview(value), identity, auth)
    return value


def forged(value: bytes | bytearray, *, checksum: bool = True) -> None:
    with pytest.raises(BadValueError):
        check_value(memoryview(value), IDENTITY, checksum=checksum, auth=AUTH)


@given(IDENTITIES, st.binary(max_size=300))
def test_an_authenticated_value_is_accepted(identity: ValueIdentity, payload: bytes) -> None:
    value = bytearray(b"\xaa" * HEADER_BYTES + payload)
    write_header(memoryview(value), identity, AUTH)
    for checksum in (True, False):
        check_value(memoryview(bytes(value)), identity, checksum=checksum, auth=AUTH)
    assert value[HEADER_BYTES:] == payload


def test_a_writer_without_the_secret_cannot_plant_a_value() -> None:
    for auth in OTHERS:
        forged(signed(auth=auth))
    for auth in OTHERS[:1]:  # an engine without a secret is none of those that have it
        with pytest.raises(BadValueError):
            check_value(memoryview(signed()), IDENTITY, checksum=True, auth=auth)


def test_every_flipped_bit_of_an_authenticated_value_is_seen() -> None:
    value = signed()
    for bit in range(len(value) * 8):
        value[bit // 8] ^= 1 << bit % 8
        forged(value)
        value[bit // 8] ^= 1 << bit % 8
    check_value(memoryview(value), IDENTITY, checksum=True, auth=AUTH)


def test_no_authentic_payload_under_another_authentic_header() -> None:
    value, other = signed(), signed(replace(IDENTITY, rank=Rank(3)))
    forged(value[:HEADER_BYTES] + bytes(reversed(PAYLOAD)))
    forged(other[: HEADER_BYTES - MAC_BYTES] + value[HEADER_BYTES - MAC_BYTES :])
    forged(value[: HEADER_BYTES - MAC_BYTES] + other[HEADER_BYTES - MAC_BYTES :])


@pytest.mark.parametrize("size", [0, 1, MAC_BYTES, HEADER_BYTES - 1, HEADER_BYTES])
def test_a_truncated_authenticated_value_is_refused(size: int) -> None:
    forged(signed()[:size])
    forged(signed()[:size], checksum=False)


@pytest.mark.parametrize("other", OTHER_IDENTITIES)
def test_an_authentic_value_copied_to_another_name_is_refused(other: ValueIdentity) -> None:
    """A replay: every byte is from an engine that has the secret."""
    forged(signed(other))
    check_value(memoryview(signed(other)), other, checksum=True, auth=AUTH)


def test_what_is_not_authentic_is_not_even_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spm.value_format.unpack_map", None)
    forged(signed(auth=None))


@given(st.integers(4, HEADER_BYTES - 1), st.binary(min_size=1, max_size=12))
def test_overwritten_headers_are_refused_unless_unchanged(start: int, junk: bytes) -> None:
    value = written()
    before = bytes(value)
    value[start : start + len(junk)] = junk
    if bytes(value) != before:
        refused(value)
