"""Manifests: what was encoded is decoded, and anything else is a BadValueError."""

import math
from dataclasses import replace

import msgpack
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from spm.errors import BadValueError
from spm.keys import Fingerprint, KeySpace, Rank
from spm.manifest import (
    MAGIC,
    MAGIC_WITH_MAC,
    MAX_BLOCKS,
    MAX_GROUPS,
    MAX_MANIFEST_BYTES,
    SessionManifest,
    decode,
    encode,
    manifest_key,
)
from spm.value_auth import Authenticator, Purpose
from tracker.ids import (
    BlockHash,
    BlockKey,
    GroupId,
    SessionId,
    SessionRef,
    TenantId,
    make_block_key,
)

SPACE = KeySpace("spm", Fingerprint(b"f" * 16))
REF = SessionRef(TenantId("acme"), SessionId("chat-17"))
G0, G1 = GroupId(0), GroupId(1)


def key(number: int, group: GroupId = G0, size: int = 32) -> BlockKey:
    return make_block_key(BlockHash(number.to_bytes(size, "big")), group)


MANIFEST = SessionManifest(
    session=REF,
    parent=SessionId("chat"),
    owner="engine-1",
    version=7,
    written_at_s=1_700_000_000.25,
    block_bytes={G0: 4096, G1: 512},
    blocks={G0: [key(n) for n in range(9)], G1: [None, key(1, G1), None, key(2, G1)]},
)


def encoded(manifest: SessionManifest = MANIFEST) -> bytes:
    content = encode(manifest, SPACE)
    assert content is not None
    return content


def refused(content: bytes) -> None:
    with pytest.raises(BadValueError):
        decode(content, SPACE, REF)


IDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=256)


@st.composite
def manifests(draw: st.DrawFn) -> SessionManifest:
    size = draw(st.integers(8, 64))
    groups = draw(st.lists(st.integers(0, 2**32 - 1).map(GroupId), max_size=4, unique=True))
    hashes = st.none() | st.binary(min_size=size, max_size=size).map(BlockHash)
    blocks: dict[GroupId, list[BlockKey | None]] = {}
    for group in groups:
        drawn = draw(st.lists(hashes, max_size=20))
        blocks[group] = [None if one is None else make_block_key(one, group) for one in drawn]
    return SessionManifest(
        session=SessionRef(TenantId(draw(st.text())), SessionId(draw(st.text()))),
        parent=draw(st.none() | IDS.map(SessionId)),
        owner=draw(IDS.filter(lambda owner: len(owner) <= 64)),
        version=draw(st.integers(0, 2**63 - 1)),
        written_at_s=draw(st.floats(allow_nan=False, allow_infinity=False)),
        block_bytes={group: draw(st.integers(1, 2**63 - 1)) for group in groups},
        blocks=blocks,
    )


@given(manifests(), st.binary(max_size=8))
def test_what_was_encoded_is_decoded(manifest: SessionManifest, epoch: bytes) -> None:
    space = replace(SPACE, epoch=epoch)
    content = encode(manifest, space)
    assert content is not None
    assert decode(content, space, manifest.session) == manifest


def test_a_manifest_of_nothing_is_one_too() -> None:
    nothings: list[dict[GroupId, list[BlockKey | None]]] = [{}, {G0: []}, {G0: [None] * 9}]
    for blocks in nothings:
        manifest = replace(MANIFEST, block_bytes=dict.fromkeys(blocks, 1), blocks=blocks)
        assert decode(encoded(manifest), SPACE, REF) == manifest


def test_it_costs_little_more_than_its_hashes() -> None:
    keys = [key(number) for number in range(10_000)]
    content = encoded(replace(MANIFEST, block_bytes={G0: 1}, blocks={G0: keys}))
    assert len(content) < 10_000 * (32 + 1 / 8) + 512


@pytest.mark.parametrize(
    "space",
    [
        replace(SPACE, namespace="other"),
        replace(SPACE, fingerprint=Fingerprint(b"g" * 16)),
        replace(SPACE, epoch=b"1"),
    ],
)
def test_other_key_spaces_never_meet(space: KeySpace) -> None:
    assert manifest_key(space, REF) != manifest_key(SPACE, REF)
    if space.effective_fingerprint != SPACE.effective_fingerprint:
        with pytest.raises(BadValueError, match="another"):
            decode(encoded(), space, REF)


def test_a_key_names_the_session_only_by_its_digest() -> None:
    name = manifest_key(SPACE, REF)
    assert REF.session_id not in name
    assert REF.tenant not in name
    assert name == manifest_key(SPACE, SessionRef(TenantId("acme"), SessionId("chat-17")))
    assert name.startswith(f"spm:{SPACE.fingerprint.hex()}:manifest:")


@pytest.mark.parametrize(
    ("tenant", "session"), [("acm", "echat-17"), ("acme", "chat-18"), ("", "")]
)
def test_other_sessions_have_other_keys_and_do_not_read_it(tenant: str, session: str) -> None:
    other = SessionRef(TenantId(tenant), SessionId(session))
    assert manifest_key(SPACE, other) != manifest_key(SPACE, REF)
    with pytest.raises(BadValueError, match="another"):
        decode(encoded(), SPACE, other)


@given(st.binary(max_size=64).map(BlockHash), st.integers(0, 99).map(GroupId))
def test_no_block_has_a_manifests_key(block_hash: BlockHash, group: GroupId) -> None:
    store_key = SPACE.store_key(make_block_key(block_hash, group), Rank(0))
    assert store_key.split(":")[2] != manifest_key(SPACE, REF).split(":")[2]


def test_one_that_would_be_too_large_is_not_made() -> None:
    fits = (MAX_MANIFEST_BYTES - 1024) * 8 // (32 * 8 + 1)
    manifest = replace(MANIFEST, block_bytes={G0: 1}, blocks={G0: [key(1)] * fits})
    assert len(encoded(manifest)) <= MAX_MANIFEST_BYTES
    more = replace(manifest, blocks={G0: [key(1)] * (fits + 64)})
    assert encode(more, SPACE) is None
    holes = replace(manifest, blocks={G0: [None] * MAX_BLOCKS})
    assert decode(encoded(holes), SPACE, REF) == holes
    assert encode(replace(holes, blocks={G0: [None] * (MAX_BLOCKS + 1)}), SPACE) is None
    groups = [GroupId(number) for number in range(MAX_GROUPS + 1)]
    wide = replace(
        manifest, block_bytes=dict.fromkeys(groups, 1), blocks={group: [] for group in groups}
    )
    assert encode(wide, SPACE) is None


@pytest.mark.parametrize(
    "bad",
    [
        replace(MANIFEST, owner=""),
        replace(MANIFEST, owner="x" * 65),
        replace(MANIFEST, owner="engine 1"),
        replace(MANIFEST, parent=SessionId("")),
        replace(MANIFEST, version=-1),
        replace(MANIFEST, version=2**63),
        replace(MANIFEST, written_at_s=math.nan),
        replace(MANIFEST, block_bytes={G0: 0, G1: 1}),
        replace(MANIFEST, block_bytes={G0: 1}),
        replace(MANIFEST, block_bytes={G0: 1}, blocks={G0: [key(1, G1)]}),
        replace(MANIFEST, block_bytes={G0: 1}, blocks={G0: [key(1), key(1, size=16)]}),
        replace(MANIFEST, block_bytes={G0: 1}, blocks={G0: [key(1, size=7)]}),
        replace(MANIFEST, block_bytes={G0: 1}, blocks={G0: [key(1, size=65)]}),
    ],
)
def test_a_malformed_manifest_is_the_writers_mistake(bad: SessionManifest) -> None:
    with pytest.raises(ValueError, match=r"manifest|hashes|sizes|group"):
        encode(bad, SPACE)


def test_every_single_flipped_bit_is_seen() -> None:
    content = bytearray(encoded())
    for bit in range(len(content) * 8):
        content[bit // 8] ^= 1 << bit % 8
        refused(bytes(content))
        content[bit // 8] ^= 1 << bit % 8
    assert decode(bytes(content), SPACE, REF) == MANIFEST


def test_every_shorter_and_longer_content_is_refused() -> None:
    content = encoded()
    for size in range(len(content)):
        refused(content[:size])
    refused(content + b"\0")
    refused(b"\0" + content)
    refused(bytes(MAX_MANIFEST_BYTES + 1))


def crafted(packed: bytes, rest: bytes = b"", length: int | None = None) -> bytes:
    """A content whose checksum is right."""
    size = len(packed) if length is None else length
    body = size.to_bytes(2, "big") + packed + rest
    return MAGIC + xxhash.xxh3_64_digest(body) + body


NAMES = ["fp", "session", "parent", "owner", "version", "at", "hash_bytes", "groups"]
SIMPLE = replace(MANIFEST, block_bytes={G0: 64}, blocks={G0: [key(1), None, key(2)]})


def taken_apart(manifest: SessionManifest = SIMPLE) -> tuple[dict[str, object], bytes]:
    """Header and what follows it."""
    content = encoded(manifest)[len(MAGIC) + 8 :]
    end = 2 + int.from_bytes(content[:2], "big")
    return msgpack.unpackb(content[2:end]), content[end:]


def test_a_crafted_content_can_be_right() -> None:
    header, rest = taken_apart()
    assert decode(crafted(msgpack.packb(header), rest), SPACE, REF) == SIMPLE


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("odd", [True, "", b"", "\x7f", "x" * 257, -1, 2**64 - 1, 9, math.nan])
def test_a_field_that_is_odd_is_refused(name: str, odd: object) -> None:
    header, rest = taken_apart()
    if (name, odd) != ("version", 9):
        refused(crafted(msgpack.packb(header | {name: odd}), rest))


@pytest.mark.parametrize("name", [*NAMES, "more"])
@pytest.mark.parametrize("odd", [math.inf, [], [[1]], {}, msgpack.ExtType(5, b"x")])
def test_a_field_of_another_kind_is_refused(name: str, odd: object) -> None:
    header, rest = taken_apart()
    refused(crafted(msgpack.packb(header | {name: odd}), rest))


@pytest.mark.parametrize("name", NAMES)
def test_an_absent_field_is_refused(name: str) -> None:
    header, rest = taken_apart()
    del header[name]
    refused(crafted(msgpack.packb(header), rest))


@pytest.mark.parametrize(
    "groups",
    [
        [[0, 64, 3, 2], [0, 64, 0, 0]],
        [[0, 64, 3, 3]],
        [[0, 64, 3, 1]],
        [[0, 64, 2, 2]],
        [[0, 64, 9, 2]],
        [[0, 64, 3, -1]],
        [[0, 64, MAX_BLOCKS + 1, 2]],
        [[0, 64, MAX_BLOCKS, 2], [1, 64, MAX_BLOCKS, 2]],
        [[0, 64, 2**63 - 1, 2**63 - 1]],
        [[0, 0, 3, 2]],
        [[2**32, 64, 3, 2]],
        [[-1, 64, 3, 2]],
        [[0, 64, 3, True]],
        [[0, 64.0, 3, 2]],
        [[0, 64, 3]],
        [[0, 64, 3, 2, 1]],
        [None],
        [[0, 64, 3, 2]] + [[n, 64, 0, 0] for n in range(1, MAX_GROUPS + 1)],
    ],
)
def test_groups_that_cannot_be_are_refused(groups: object) -> None:
    header, rest = taken_apart()
    refused(crafted(msgpack.packb(header | {"groups": groups}), rest))


@pytest.mark.parametrize("bitmap", [0b1010_0001, 0b1110_0000, 0b1000_0000, 0b1001_0000])
def test_bits_that_do_not_match_are_refused(bitmap: int) -> None:
    header, rest = taken_apart()
    assert rest[0] == 0b1010_0000
    refused(crafted(msgpack.packb(header), bytes([bitmap]) + rest[1:]))


@pytest.mark.parametrize("hash_bytes", [0, 7, 16, 31, 33, 65])
def test_hashes_of_another_length_are_refused(hash_bytes: int) -> None:
    header, rest = taken_apart()
    refused(crafted(msgpack.packb(header | {"hash_bytes": hash_bytes}), rest))


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc0",
        b"\xc1",
        b"\x90",
        b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
        b"\xdb\xff\xff\xff\xff",  # 4 GiB of text
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 items
        b"\xdf\xff\xff\xff\xff",  # a map of 2**32 items
        b"\x91" * 8000,  # arrays in arrays
        b"\x81\xa1a" * 2000,  # maps in maps
        b"\x81\x90\x01",  # a list as key
        b"\x81\x01\x02",  # a number as key
        b"\x81\xa1\xff\x01",  # text that is not UTF-8
        b"\xc7\x0c\xff" + b"\xff" * 12,  # a timestamp out of range
        b"\x80\x80",  # one map too many
    ],
)
def test_hostile_headers_are_refused(packed: bytes) -> None:
    refused(crafted(packed))
    refused(crafted(packed, bytes(9000)))


def test_more_blocks_than_a_manifest_may_have_are_refused() -> None:
    header, _ = taken_apart()
    for second in (0, 1):
        groups = [[0, 64, MAX_BLOCKS - 8, 0], [1, 64, 8 + second, 0]]
        packed = msgpack.packb(header | {"hash_bytes": 0, "groups": groups})
        content = crafted(packed, bytes(MAX_BLOCKS // 8 + second))
        if second:
            refused(content)
        else:
            assert len(decode(content, SPACE, REF).blocks[G0]) == MAX_BLOCKS - 8


@given(st.integers(0, 0xFFFF))
def test_a_wrong_header_length_is_refused(length: int) -> None:
    header, rest = taken_apart()
    packed = msgpack.packb(header)
    if length != len(packed):
        refused(crafted(packed, rest, length))


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(junk: bytes) -> None:
    refused(junk)
    refused(MAGIC + junk)
    refused(crafted(junk))


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


@given(
    st.dictionaries(
        st.sampled_from(["fp", "session", "owner", "version", "at", "hash_bytes", "groups"]),
        JSON_LIKE,
        min_size=1,
    ),
    st.binary(max_size=100),
)
def test_any_header_and_rest_decode_or_are_refused(changes: dict[str, object], rest: bytes) -> None:
    header, right_rest = taken_apart()
    for tail in (rest, right_rest):
        try:
            manifest = decode(crafted(msgpack.packb(header | changes), tail), SPACE, REF)
        except BadValueError:
            continue
        assert decode(encoded(manifest), SPACE, REF) == manifest, "whatever is read can be written"


# --- authenticated manifests ---------------------------------------------------------------

AUTH = Authenticator(b"s" * 32, Purpose.MANIFESTS)


def forged(content: bytes) -> None:
    with pytest.raises(BadValueError):
        decode(content, SPACE, REF, AUTH)


def signed(manifest: SessionManifest = SIMPLE, auth: Authenticator | None = AUTH) -> bytes:
    content = encode(manifest, SPACE, auth)
    assert content is not None
    return content


@given(manifests())
def test_an_authenticated_manifest_is_decoded(manifest: SessionManifest) -> None:
    assert decode(signed(manifest), SPACE, manifest.session, AUTH) == manifest


def test_a_writer_without_the_secret_cannot_plant_a_manifest() -> None:
    others = [Authenticator(b"t" * 32, Purpose.MANIFESTS), Authenticator(b"s" * 32, Purpose.VALUES)]
    for auth in (None, *others):
        forged(signed(auth=auth))
    forged(signed(auth=None).replace(MAGIC, MAGIC_WITH_MAC, 1))
    refused(signed())


def test_every_flipped_bit_of_an_authenticated_manifest_is_seen() -> None:
    content = bytearray(signed())
    for bit in range(len(content) * 8):
        content[bit // 8] ^= 1 << bit % 8
        forged(bytes(content))
        content[bit // 8] ^= 1 << bit % 8
    for size in range(len(content)):
        forged(bytes(content[:size]))
    forged(bytes(content) + b"\0")


def test_an_authentic_manifest_of_another_session_is_refused() -> None:
    """A replay: somebody copied it to this session's name."""
    other = SessionRef(TenantId("evil"), SessionId("chat-17"))
    forged(signed(replace(SIMPLE, session=other)))


def test_the_largest_manifest_has_room_for_its_mac() -> None:
    for blocks in (119_000, 130_000):
        manifest = replace(
            SIMPLE, blocks={G0: [key(n) for n in range(blocks)]}, block_bytes={G0: 1}
        )
        content = encode(manifest, SPACE, AUTH)
        assert content is None or decode(content, SPACE, REF, AUTH) == manifest
        assert (content is None) == (blocks * 32 + blocks // 8 + 400 > MAX_MANIFEST_BYTES)
