"""Keys of a real request's blocks: as vLLM publishes them, and as we store them."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
    resolve_block_hashes,
)
from vllm.v1.request import Request

from connectors.groups import CacheGeometry, GroupGeometry
from tracker.ids import GroupId, split_block_key

HASH_TOKENS = 4
SMALL = GroupGeometry(GroupId(0), 4, None, 0, ())
LARGE = GroupGeometry(GroupId(1), 8, 16, 0, ())


def geometry() -> CacheGeometry:
    return CacheGeometry((SMALL, LARGE), HASH_TOKENS, 8)


def request(
    num_tokens: int,
    lora: LoRARequest | None = None,
    salt: str | None = None,
    images: Sequence[MultiModalFeatureSpec] = (),
) -> Request:
    init_none_hash(sha256)
    return Request(
        request_id="r",
        prompt_token_ids=list(range(1, num_tokens + 1)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=lora,
        cache_salt=salt,
        mm_features=list(images),
        block_hasher=get_request_block_hasher(HASH_TOKENS, sha256),
    )


def image(identity: str, offset: int, length: int) -> MultiModalFeatureSpec:
    """In place of prompt tokens that are the same for every image."""
    place = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(None, "image", identity, place)


@pytest.fixture
def adapter(tmp_path: Path) -> LoRARequest:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    return LoRARequest(lora_name="a", lora_int_id=1, lora_path=str(tmp_path))


@pytest.mark.parametrize("group", [SMALL, LARGE])
def test_published_keys_are_vllms_own(group: GroupGeometry) -> None:
    made = request(24)
    hashes = resolve_block_hashes(made.block_hashes, HASH_TOKENS, group.block_tokens)
    expected = [
        bytes(make_block_hash_with_group_id(hashes[i], group.group))
        for i in range(24 // group.block_tokens)
    ]
    assert [bytes(key) for key in geometry().published_keys(made, group, 0, 100)] == expected
    assert [bytes(key) for key in geometry().keys_of(made, group, 0, 100)] == expected


@given(st.integers(1, 30), st.integers(0, 9), st.integers(0, 9))
def test_ranges_are_slices_of_the_whole_as_far_as_hashes_exist(
    num_tokens: int, start: int, stop: int
) -> None:
    made = request(num_tokens)
    for group in (SMALL, LARGE):
        whole = geometry().keys_of(made, group, 0, 1000)
        assert len(whole) == num_tokens // group.block_tokens, "full blocks only"
        assert geometry().keys_of(made, group, start, stop) == whole[start:stop]


def test_groups_never_share_a_key() -> None:
    made = request(24)
    small, large = (geometry().keys_of(made, group, 0, 9) for group in (SMALL, LARGE))
    assert not set(small) & set(large)
    assert {split_block_key(key)[1] for key in large} == {GroupId(1)}


def test_a_cache_salt_gives_other_keys() -> None:
    plain = geometry().keys_of(request(8), SMALL, 0, 2)
    salted = geometry().keys_of(request(8, salt="tenant"), SMALL, 0, 2)
    assert not set(plain) & set(salted)


def test_another_image_behind_the_same_tokens_gives_other_keys_from_there_on() -> None:
    plain, cat, dog, again = (
        geometry().keys_of(request(24, images=images), SMALL, 0, 6)
        for images in ([], [image("cat", 6, 4)], [image("dog", 6, 4)], [image("cat", 6, 4)])
    )
    assert cat == again
    assert plain[:1] == cat[:1] == dog[:1]
    for one, other in ((plain, cat), (cat, dog), (plain, dog)):
        assert not set(one[1:]) & set(other)


def test_two_adapters_of_one_path_have_other_names(adapter: LoRARequest) -> None:
    renamed = LoRARequest(lora_name="b", lora_int_id=2, lora_path=adapter.lora_path)
    plain, one, other = (
        geometry().keys_of(request(24, lora), SMALL, 0, 6) for lora in (None, adapter, renamed)
    )
    assert len({*plain, *one, *other}) == 18


def test_an_adapters_weights_salt_what_is_stored_not_what_is_published(
    adapter: LoRARequest,
) -> None:
    made = request(24, adapter)
    for group in (SMALL, LARGE):
        published = geometry().published_keys(made, group, 0, 9)
        stored = geometry().keys_of(made, group, 0, 9)
        assert len(stored) == len(published)
        assert not set(stored) & set(published)
        assert [split_block_key(k)[1] for k in stored] == [split_block_key(k)[1] for k in published]
        assert stored[1:3] == geometry().keys_of(made, group, 1, 3)


def test_the_same_adapter_with_other_weights_finds_nothing(adapter: LoRARequest) -> None:
    made = request(24, adapter)
    old = geometry().keys_of(made, SMALL, 0, 6)
    published = geometry().published_keys(made, SMALL, 0, 6)
    (Path(adapter.lora_path) / "adapter_model.safetensors").write_bytes(b"another")
    assert geometry().published_keys(made, SMALL, 0, 6) == published, "vLLM cannot tell"
    assert not set(geometry().keys_of(made, SMALL, 0, 6)) & set(old)
