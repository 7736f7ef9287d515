"""A session's manifest: what another engine of the same key space needs to prefetch or report
a session it never saw. One value in the store beside the blocks.

::

    b"SPMM1"          magic and format version
    u64               XXH3 of everything after it; or, if there is a secret,
                      b"SPMM2" and a MAC of 32 bytes of everything after it
    u16               length of the msgpack map
    msgpack map       see :func:`_header_of`
    for each group    a bit per block, most significant first: 0 is a hole; padded with zeros
                      the hashes of its blocks, without the holes

Integers are big endian. Only the map, less than 64 KiB, is parsed, so what a decoder allocates is
bounded by the size of the content. Everything here is pure; any thread.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import xxhash

from spm.agent_hint import MAX_SESSION_ID_CHARS
from spm.errors import BadValueError
from spm.keys import KeySpace, StoreKey
from spm.packed import Bounds, unpack_map
from spm.value_auth import MAC_BYTES, Authenticator
from tracker.ids import (
    BlockHash,
    BlockKey,
    GroupId,
    SessionId,
    SessionRef,
    make_block_key,
    split_block_key,
)

MAX_MANIFEST_BYTES = 4 * 2**20
MAX_GROUPS = 64
MAX_BLOCKS = MAX_MANIFEST_BYTES // 8
"""Of all groups together, holes included: as many as the shortest hashes leave room for."""
MAX_OWNER_CHARS = 64
HASH_BYTES = range(8, 65)
"""Lengths a block hash may have; one manifest has hashes of one length."""

MAGIC = b"SPMM1"
MAGIC_WITH_MAC = b"SPMM2"
_CHECKSUM_BYTES = 8
_LENGTH_BYTES = 2
_BOUNDS = Bounds(size_bytes=2**16, fields=16, items=MAX_GROUPS, depth=3)
_MAX_INT = 2**63 - 1
_MAX_GROUP = 2**32 - 1
_FIELDS = {"fp", "session", "parent", "owner", "version", "at", "hash_bytes", "groups"}
_OWNER = re.compile(rf"[!-~]{{1,{MAX_OWNER_CHARS}}}")
_SESSION_ID = re.compile(rf"[!-~]{{1,{MAX_SESSION_ID_CHARS}}}")


@dataclass(frozen=True, slots=True)
class SessionManifest:
    """``blocks``: keys of each group in logical order, None where the session keeps none.

    ``owner`` is the engine that wrote it (1 to 64 visible ASCII characters), ``version`` grows
    with every one it writes for the session, ``written_at_s`` is wall-clock time: engines do
    not share a monotonic one. ``block_bytes`` (positive, all ranks together) has the same groups
    as ``blocks``.
    """

    session: SessionRef
    parent: SessionId | None
    owner: str
    version: int
    written_at_s: float
    block_bytes: Mapping[GroupId, int]
    blocks: Mapping[GroupId, Sequence[BlockKey | None]]


@dataclass(frozen=True, slots=True)
class _Group:
    group: GroupId
    block_bytes: int
    num_blocks: int
    num_present: int

    @property
    def bitmap_bytes(self) -> int:
        return (self.num_blocks + 7) // 8


def manifest_key(key_space: KeySpace, ref: SessionRef) -> StoreKey:
    """Name of the manifest: engines whose values are not interchangeable never share one.

    The session is in it only as a digest. No block's key has the same form.
    """
    fingerprint = key_space.effective_fingerprint.hex()
    return StoreKey(f"{key_space.namespace}:{fingerprint}:manifest:{_digest_of(ref).hex()}")


def encode(
    manifest: SessionManifest, key_space: KeySpace, auth: Authenticator | None = None
) -> bytes | None:
    """The manifest's stored form; None if it is beyond a bound of the format.

    Raises ValueError if the manifest itself is malformed, as its docstring says.
    """
    if manifest.block_bytes.keys() != manifest.blocks.keys():
        raise ValueError("sizes and blocks are of different groups")
    hashes = {group: _hashes_of(group, keys) for group, keys in manifest.blocks.items()}
    groups = [
        _Group(group, manifest.block_bytes[group], len(blocks), len(blocks) - blocks.count(None))
        for group, blocks in hashes.items()
    ]
    lengths = {len(one) for blocks in hashes.values() for one in blocks if one is not None}
    if len(lengths) > 1:
        raise ValueError(f"hashes of {len(lengths)} lengths")
    if len(groups) > MAX_GROUPS or sum(group.num_blocks for group in groups) > MAX_BLOCKS:
        return None
    hash_bytes = lengths.pop() if lengths else 0
    header = _header_of(manifest, key_space, hash_bytes, groups)
    try:
        _check_header(header)
    except BadValueError as error:
        raise ValueError(f"malformed manifest: {error}") from error
    packed: bytes = msgpack.packb(header)
    parts = [len(packed).to_bytes(_LENGTH_BYTES, "big"), packed]
    for blocks in hashes.values():
        parts.append(_bitmap_of(blocks))
        parts += [one for one in blocks if one is not None]
    rest = b"".join(parts)
    if auth is None:
        sealed = MAGIC + xxhash.xxh3_64_digest(rest) + rest
    else:
        sealed = MAGIC_WITH_MAC + auth.mac([rest]) + rest
    return sealed if len(sealed) <= MAX_MANIFEST_BYTES else None


def decode(
    content: bytes, key_space: KeySpace, ref: SessionRef, auth: Authenticator | None = None
) -> SessionManifest:
    """The manifest in ``content``, read under :func:`manifest_key` of the same arguments.

    Raises :class:`BadValueError`, and nothing else, for any other bytes. With ``auth`` that
    includes whatever was written without the secret. An earlier manifest of the same session
    is as good as a later one: what it says is advice, as blocks are checked when loaded.
    """
    start = _unsealed(content, auth)
    header_end = start + int.from_bytes(content[start - _LENGTH_BYTES : start], "big")
    header = unpack_map(content[start:header_end], _BOUNDS)
    groups = _check_header(header)
    expected = {"fp": bytes(key_space.effective_fingerprint), "session": _digest_of(ref)}
    if any(header[name] != want for name, want in expected.items()):
        raise BadValueError("manifest of another session or key space")
    blocks = _read_blocks(content, header_end, groups, header["hash_bytes"])
    return SessionManifest(
        session=ref,
        parent=header["parent"],
        owner=header["owner"],
        version=header["version"],
        written_at_s=header["at"],
        block_bytes={group.group: group.block_bytes for group in groups},
        blocks=blocks,
    )


def _unsealed(content: bytes, auth: Authenticator | None) -> int:
    """Where the map begins, if everything after the checksum or MAC is what was written."""
    magic, size = (MAGIC, _CHECKSUM_BYTES) if auth is None else (MAGIC_WITH_MAC, MAC_BYTES)
    seal_end = len(magic) + size
    start = seal_end + _LENGTH_BYTES
    if not start <= len(content) <= MAX_MANIFEST_BYTES or not content.startswith(magic):
        raise BadValueError("not a manifest of this format version")
    seal, rest = content[len(magic) : seal_end], memoryview(content)[seal_end:]
    if auth is not None:
        auth.check(seal, [rest])
    elif seal != xxhash.xxh3_64_digest(rest):
        raise BadValueError("checksum does not match the manifest")
    return start


def _digest_of(ref: SessionRef) -> bytes:
    digest = hashlib.sha256()
    for text in (ref.tenant, ref.session_id):
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.digest()


def _hashes_of(group: GroupId, keys: Sequence[BlockKey | None]) -> list[BlockHash | None]:
    hashes: list[BlockHash | None] = []
    for key in keys:
        if key is None:
            hashes.append(None)
            continue
        block_hash, its_group = split_block_key(key)
        if its_group != group:
            raise ValueError(f"a key of group {its_group} among those of group {group}")
        hashes.append(block_hash)
    return hashes


def _bitmap_of(blocks: Sequence[object | None]) -> bytes:
    bits = "".join("0" if block is None else "1" for block in blocks)
    size = (len(bits) + 7) // 8
    return int(bits.ljust(size * 8, "0") or "0", 2).to_bytes(size, "big")


def _header_of(
    manifest: SessionManifest, key_space: KeySpace, hash_bytes: int, groups: Sequence[_Group]
) -> dict[str, Any]:
    return {
        "fp": bytes(key_space.effective_fingerprint),
        "session": _digest_of(manifest.session),
        "parent": manifest.parent,
        "owner": manifest.owner,
        "version": manifest.version,
        "at": float(manifest.written_at_s),
        "hash_bytes": hash_bytes,  # 0 if there is no hash
        "groups": [[g.group, g.block_bytes, g.num_blocks, g.num_present] for g in groups],
    }


def _check_header(header: Mapping[str, Any]) -> list[_Group]:
    """The groups, if everything has the right type and range; raises BadValueError."""
    if header.keys() != _FIELDS:
        raise BadValueError("header fields are missing or unknown")
    parent, owner, at_s, raw_groups = (header[name] for name in ("parent", "owner", "at", "groups"))
    if not (
        (parent is None or (isinstance(parent, str) and _SESSION_ID.fullmatch(parent)))
        and isinstance(owner, str)
        and _OWNER.fullmatch(owner)
        and _is_int(header["version"], 0, _MAX_INT)
        and isinstance(at_s, float)
        and math.isfinite(at_s)
        and all(isinstance(header[name], bytes) for name in ("fp", "session"))
        and isinstance(raw_groups, list)
        and len(raw_groups) <= MAX_GROUPS
    ):
        raise BadValueError("a header field is out of range")
    groups = [_group_of(raw) for raw in raw_groups]
    if len({group.group for group in groups}) != len(groups):
        raise BadValueError("a group occurs twice")
    if sum(group.num_blocks for group in groups) > MAX_BLOCKS:
        raise BadValueError(f"more than {MAX_BLOCKS} blocks")
    hash_bytes = header["hash_bytes"]
    has_hashes = any(group.num_present for group in groups)
    allowed = HASH_BYTES if has_hashes else range(1)
    if not _is_int(hash_bytes, allowed.start, allowed.stop - 1):
        raise BadValueError("length of hashes is out of range")
    return groups


def _group_of(raw: object) -> _Group:
    if not isinstance(raw, list) or len(raw) != 4:
        raise BadValueError("a group is not a list of four")
    group, block_bytes, num_blocks, num_present = raw
    if not (
        _is_int(group, 0, _MAX_GROUP)
        and _is_int(block_bytes, 1, _MAX_INT)
        and _is_int(num_blocks, 0, MAX_BLOCKS)
        and _is_int(num_present, 0, num_blocks)
    ):
        raise BadValueError("a group's number is out of range")
    return _Group(GroupId(group), block_bytes, num_blocks, num_present)


def _is_int(raw: object, least: int, most: int) -> bool:
    return isinstance(raw, int) and not isinstance(raw, bool) and least <= raw <= most


def _read_blocks(
    content: bytes, start: int, groups: Sequence[_Group], hash_bytes: int
) -> dict[GroupId, Sequence[BlockKey | None]]:
    sizes = [group.bitmap_bytes + group.num_present * hash_bytes for group in groups]
    if start + sum(sizes) != len(content):
        raise BadValueError("manifest is not as long as it says")
    blocks: dict[GroupId, Sequence[BlockKey | None]] = {}
    for group, size in zip(groups, sizes, strict=True):
        hashes_start = start + group.bitmap_bytes
        present = _present(content[start:hashes_start], group)
        hashes = iter(range(hashes_start, start + size, hash_bytes or 1))
        blocks[group.group] = [
            _key_at(content, next(hashes), hash_bytes, group.group) if bit else None
            for bit in present
        ]
        start += size
    return blocks


def _present(bitmap: bytes, group: _Group) -> Iterator[bool]:
    bits = "".join(f"{byte:08b}" for byte in bitmap)
    if bits.count("1") != group.num_present or "1" in bits[group.num_blocks :]:
        raise BadValueError("bits of a group do not match its blocks")
    return (bit == "1" for bit in bits[: group.num_blocks])


def _key_at(content: bytes, start: int, hash_bytes: int, group: GroupId) -> BlockKey:
    return make_block_key(BlockHash(content[start : start + hash_bytes]), group)
