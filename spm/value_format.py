"""What a stored value looks like: a fixed 512-byte header, then the raw KV bytes.

::

    offset 0    b"SPM1"                      magic and format version
    offset 4    u16 big endian               length of the msgpack map
    offset 6    msgpack map                  see :func:`write_header`; then zeros
    offset 480  MAC, if there is a secret    of all bytes before and after it; else zeros
    offset 512  payload                      KV bytes of one block, all layers of a group

The map ends in the payload's checksum, or, if there is a secret, in the kind of its MAC, which is
a checksum too. What the MAC is of includes whose KV it is, so that a value copied to the name of
another one is refused like a forged one.

A fixed size keeps the payload aligned, so a value read from a socket is scattered to
the GPU pool from where it landed. Nothing is ever unpickled.
"""

from dataclasses import dataclass
from typing import Any

import msgpack
import xxhash

from spm.errors import BadValueError
from spm.keys import Fingerprint, Rank
from spm.packed import Bounds, unpack_map
from spm.value_auth import ALGORITHM, MAC_BYTES, Authenticator
from tracker.ids import BlockHash, GroupId

HEADER_BYTES = 512
MAGIC = b"SPM1"
_PREFIX_BYTES = len(MAGIC) + 2
_MAC_START = HEADER_BYTES - MAC_BYTES
_BOUNDS = Bounds(size_bytes=HEADER_BYTES, fields=16, items=0, depth=1)


@dataclass(frozen=True, slots=True)
class ValueIdentity:
    """Everything that has to match before a payload may be loaded."""

    fingerprint: Fingerprint
    rank: Rank
    group: GroupId
    block_hash: BlockHash


def checksum_of(payload: memoryview) -> int:
    """64-bit XXH3 of the payload: detects damage, is not a defence against forgery."""
    return xxhash.xxh3_64_intdigest(payload)


def write_header(
    value: memoryview, identity: ValueIdentity, auth: Authenticator | None = None
) -> None:
    """Fill the header of ``value`` (header and payload), computing the checksum or, with
    ``auth``, the MAC."""
    payload = value[HEADER_BYTES:]
    fields = _identifying(identity, len(payload))
    if auth is None:
        fields["xxh3"] = checksum_of(payload)
    else:
        fields["mac"] = ALGORITHM
    packed: bytes = msgpack.packb(fields)
    end = _PREFIX_BYTES + len(packed)
    if end > _MAC_START:
        raise BadValueError(f"header of {end} bytes does not fit into {_MAC_START}")
    value[:end] = MAGIC + len(packed).to_bytes(2, "big") + packed
    value[end:HEADER_BYTES] = bytes(HEADER_BYTES - end)
    if auth is not None:
        value[_MAC_START:HEADER_BYTES] = auth.mac(_authenticated(value))


def check_value(
    value: memoryview,
    identity: ValueIdentity,
    *,
    checksum: bool,
    auth: Authenticator | None = None,
) -> None:
    """Raise :class:`BadValueError` unless ``value`` is exactly what was asked for and, with
    ``auth``, was written by somebody with the same secret.

    ``checksum=False`` skips looking at the payload, for values that never left this process.
    """
    if len(value) < HEADER_BYTES:
        raise BadValueError("shorter than a header")
    if auth is not None and checksum:  # first: what is not authentic is not even parsed
        auth.check(value[_MAC_START:HEADER_BYTES], _authenticated(value))
    header = _read_header(value)
    expected = _identifying(identity, len(value) - HEADER_BYTES)
    if auth is not None:
        expected["mac"] = ALGORITHM
    elif checksum:
        expected["xxh3"] = checksum_of(value[HEADER_BYTES:])
    for name, want in expected.items():
        given = header.get(name)
        if type(given) is not type(want) or given != want:
            raise BadValueError(f"header field {name!r} does not match")


def _identifying(identity: ValueIdentity, payload_bytes: int) -> dict[str, bytes | int | str]:
    return {
        "fp": bytes(identity.fingerprint),
        "rank": int(identity.rank),
        "group": int(identity.group),
        "hash": bytes(identity.block_hash),
        "size": payload_bytes,
    }


def _authenticated(value: memoryview) -> tuple[memoryview, memoryview]:
    """All but the MAC; the first part has a fixed length."""
    return value[:_MAC_START], value[HEADER_BYTES:]


def _read_header(value: memoryview) -> dict[str, Any]:
    if bytes(value[: len(MAGIC)]) != MAGIC:
        raise BadValueError("not a value of this format version")
    end = _PREFIX_BYTES + int.from_bytes(value[len(MAGIC) : _PREFIX_BYTES], "big")
    if end > _MAC_START:
        raise BadValueError(f"header length {end - _PREFIX_BYTES} is out of range")
    header = unpack_map(bytes(value[_PREFIX_BYTES:end]), _BOUNDS)
    last = _MAC_START if "mac" in header else HEADER_BYTES
    if any(value[end:last]):
        raise BadValueError("bytes between header and payload are not zero")
    return header
