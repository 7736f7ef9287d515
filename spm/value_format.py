"""What a stored value looks like: a fixed 512-byte header, then the raw KV bytes.

::

    offset 0    b"SPM1"                      magic and format version
    offset 4    u16 big endian               length of the msgpack map
    offset 6    msgpack map                  see :func:`write_header`
    offset 512  payload                      KV bytes of one block, all layers of a group

A fixed size keeps the payload aligned, so a value read from a socket is scattered to
the GPU pool from where it landed. Nothing is ever unpickled.
"""

from dataclasses import dataclass
from typing import Any

import msgpack
import xxhash

from spm.errors import BadValueError
from spm.keys import Fingerprint, Rank
from tracker.ids import BlockHash, GroupId

HEADER_BYTES = 512
MAGIC = b"SPM1"
_PREFIX_BYTES = len(MAGIC) + 2


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


def write_header(value: memoryview, identity: ValueIdentity) -> None:
    """Fill the header of ``value`` (header and payload), computing the checksum."""
    payload = value[HEADER_BYTES:]
    packed: bytes = msgpack.packb(
        {
            "fp": identity.fingerprint,
            "rank": identity.rank,
            "group": identity.group,
            "hash": identity.block_hash,
            "size": len(payload),
            "xxh3": checksum_of(payload),
        }
    )
    end = _PREFIX_BYTES + len(packed)
    if end > HEADER_BYTES:
        raise BadValueError(f"header of {end} bytes does not fit into {HEADER_BYTES}")
    value[:end] = MAGIC + len(packed).to_bytes(2, "big") + packed
    value[end:HEADER_BYTES] = bytes(HEADER_BYTES - end)


def check_value(value: memoryview, identity: ValueIdentity, *, checksum: bool) -> None:
    """Raise :class:`BadValueError` unless ``value`` is exactly what was asked for.

    ``checksum=False`` skips hashing the payload, for values that never left this process.
    """
    header = _read_header(value)
    expected = {
        "fp": bytes(identity.fingerprint),
        "rank": int(identity.rank),
        "group": int(identity.group),
        "hash": bytes(identity.block_hash),
        "size": len(value) - HEADER_BYTES,
    }
    for name, want in expected.items():
        if header.get(name) != want:
            raise BadValueError(f"header field {name!r} does not match")
    if checksum and header.get("xxh3") != checksum_of(value[HEADER_BYTES:]):
        raise BadValueError("checksum does not match the payload")


def _read_header(value: memoryview) -> dict[str, Any]:
    if len(value) < HEADER_BYTES or bytes(value[: len(MAGIC)]) != MAGIC:
        raise BadValueError("not a value of this format version")
    length = int.from_bytes(value[len(MAGIC) : _PREFIX_BYTES], "big")
    if length > HEADER_BYTES - _PREFIX_BYTES:
        raise BadValueError(f"header length {length} is out of range")
    try:
        header = msgpack.unpackb(bytes(value[_PREFIX_BYTES : _PREFIX_BYTES + length]))
    except (ValueError, msgpack.UnpackException) as error:
        raise BadValueError("header is not msgpack") from error
    if not isinstance(header, dict):
        raise BadValueError("header is not a map")
    if any(value[_PREFIX_BYTES + length : HEADER_BYTES]):
        raise BadValueError("bytes between header and payload are not zero")
    return header
