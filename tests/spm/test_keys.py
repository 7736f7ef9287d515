"""Names of stored values: taken apart as they were built, and never shared by accident."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spm.config import SpmConfig
from spm.keys import Fingerprint, KeySpace, Rank, block_key_of, fingerprint_of
from tracker.ids import BlockHash, BlockKey, GroupId, make_block_key, split_block_key

NAMESPACES = st.from_regex(r"[A-Za-z0-9_.\-]{1,64}", fullmatch=True)
FINGERPRINTS = st.binary(min_size=16, max_size=16).map(Fingerprint)
BLOCK_KEYS = st.builds(
    make_block_key,
    st.binary(max_size=40).map(BlockHash),
    st.integers(0, 2**32 - 1).map(GroupId),
)
RANKS = st.integers(0, 10_000).map(Rank)
EPOCHS = st.binary(max_size=8)
SPACES = st.builds(KeySpace, NAMESPACES, FINGERPRINTS, EPOCHS)
PARTS = st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=4)


@given(BLOCK_KEYS)
def test_block_keys_are_taken_apart_as_built(key: BlockKey) -> None:
    assert make_block_key(*split_block_key(key)) == key


@given(SPACES, BLOCK_KEYS, RANKS)
def test_a_store_key_gives_back_its_block_key(space: KeySpace, key: BlockKey, rank: Rank) -> None:
    SpmConfig.from_extra_config({"namespace": space.namespace})  # every namespace allowed
    assert block_key_of(space.store_key(key, rank)) == key


# Few values each, so that two draws often agree in all but one part.
NAME_PARTS = st.tuples(
    st.sampled_from(["spm", "spm.0", "s"]),
    st.sampled_from([b"f" * 16, b"g" * 16]).map(Fingerprint),
    st.sampled_from([b"", b"e", b"ee"]),
    st.sampled_from([b"h" * 32, b"i" * 32, b"", b"\0"]).map(BlockHash),
    st.sampled_from([0, 1, 11, 256]).map(GroupId),
    st.sampled_from([0, 1, 11]).map(Rank),
)


def name_of(parts: tuple[str, Fingerprint, bytes, BlockHash, GroupId, Rank]) -> str:
    namespace, fingerprint, epoch, block_hash, group, rank = parts
    key = make_block_key(block_hash, group)
    return KeySpace(namespace, fingerprint, epoch).store_key(key, rank)


@given(NAME_PARTS, NAME_PARTS)
def test_two_names_are_equal_only_if_every_part_is(one: Any, other: Any) -> None:  # noqa: ANN401
    assert (name_of(one) == name_of(other)) == (one == other)


@pytest.mark.parametrize("part", range(6))
def test_every_part_is_in_the_name(part: int) -> None:
    one = ("spm", Fingerprint(b"f" * 16), b"", BlockHash(b"h"), GroupId(0), Rank(0))
    other = ("ns", Fingerprint(b"g" * 16), b"e", BlockHash(b"i"), GroupId(1), Rank(1))
    changed: Any = tuple(other[i] if i == part else one[i] for i in range(6))
    assert name_of(changed) != name_of(one)


@given(SPACES, BLOCK_KEYS, RANKS)
def test_names_are_printable_and_without_spaces(space: KeySpace, key: BlockKey, rank: Rank) -> None:
    name = space.store_key(key, rank)
    assert name.isascii()
    assert name.isprintable()
    assert " " not in name
    assert name.startswith(space.namespace + ":")


@given(PARTS, PARTS)
def test_fingerprints_are_equal_only_if_all_parts_are(
    one: dict[str, str], other: dict[str, str]
) -> None:
    assert (fingerprint_of(one) == fingerprint_of(other)) == (one == other)


@given(PARTS)
def test_the_order_of_parts_does_not_matter(parts: dict[str, str]) -> None:
    backwards = dict(reversed(list(parts.items())))
    assert fingerprint_of(backwards) == fingerprint_of(parts)
    assert len(fingerprint_of(parts)) == 16


def test_text_cannot_move_between_names_and_values() -> None:
    alike = [{"ab": "c"}, {"a": "bc"}, {"a": "b", "c": ""}, {"a": "", "b": "c"}, {"": "abc"}, {}]
    assert len({fingerprint_of(parts) for parts in alike}) == len(alike)


@given(FINGERPRINTS, st.lists(EPOCHS, unique=True, min_size=2, max_size=5))
def test_an_epoch_changes_header_and_name(fingerprint: Fingerprint, epochs: list[bytes]) -> None:
    spaces = [KeySpace("spm", fingerprint, epoch) for epoch in epochs]
    key = make_block_key(BlockHash(b"h" * 32), GroupId(0))
    assert len({space.effective_fingerprint for space in spaces}) == len(epochs)
    assert len({space.store_key(key, Rank(0)) for space in spaces}) == len(epochs)
    assert all(len(space.effective_fingerprint) == 16 for space in spaces)


def test_without_an_epoch_engines_share() -> None:
    fingerprint = Fingerprint(b"f" * 16)
    assert KeySpace("spm", fingerprint).effective_fingerprint == fingerprint
