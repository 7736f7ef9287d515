"""KeyIndex: states, the order of orphans, and what its integrity check sees."""

from collections.abc import Callable

import pytest

from tracker.errors import IntegrityError
from tracker.ids import (
    BlockHash,
    BlockKey,
    GroupId,
    SessionId,
    SessionRef,
    TenantId,
    make_block_key,
)
from tracker.key_index import KeyIndex, KeyState, _Holders
from tracker.tenant_counts import TenantCounts

A, B, C = (SessionRef(TenantId("t"), SessionId(name)) for name in "abc")


def key(name: str) -> BlockKey:
    return make_block_key(BlockHash(name.encode()), GroupId(0))


def test_a_key_goes_from_tracked_to_shared_and_back_to_orphaned() -> None:
    index = KeyIndex()
    assert index.state_of(key("k")) is None
    assert index.hold(key("k"), A)
    assert index.state_of(key("k")) is KeyState.TRACKED
    assert index.hold(key("k"), B)
    assert index.hold(key("k"), C)
    assert index.state_of(key("k")) is KeyState.SHARED
    assert index.sessions_of(key("k")) == {A, B, C}
    assert index.release(key("k"), B)
    assert index.state_of(key("k")) is KeyState.SHARED
    assert index.release(key("k"), A)
    assert index.state_of(key("k")) is KeyState.TRACKED
    assert index.sessions_of(key("k")) == {C}
    assert index.release(key("k"), C)
    assert index.state_of(key("k")) is KeyState.ORPHANED
    assert index.sessions_of(key("k")) == frozenset()
    assert (len(index), index.num_references) == (1, 0)


def test_hold_and_release_count_once() -> None:
    index = KeyIndex()
    index.hold(key("k"), A)
    assert not index.hold(key("k"), A)
    assert not index.release(key("k"), B)
    index.hold(key("k"), B)
    assert not index.hold(key("k"), B)
    assert not index.release(key("k"), C)
    assert index.num_references == 2
    index.release(key("k"), A)
    index.release(key("k"), B)
    assert not index.release(key("k"), B)
    assert index.num_references == 0


def test_orphans_are_taken_oldest_first_and_once() -> None:
    index = KeyIndex()
    for name in "xyz":
        index.hold(key(name), A)
        index.release(key(name), A)
    index.hold(key("y"), B)
    assert index.take_orphans(0) == []
    assert index.take_orphans(1) == [key("x")]
    assert index.state_of(key("x")) is None
    assert index.take_orphans(9) == [key("z")]
    assert index.take_orphans(9) == []
    assert index.state_of(key("y")) is KeyState.TRACKED
    assert len(index) == 1


def lose_a_holder(index: KeyIndex) -> None:
    index._holders[key("shared")] = A


def lose_a_key(index: KeyIndex) -> None:
    del index._holders[key("own")]


def keep_a_set_of_one(index: KeyIndex) -> None:
    kept = _Holders(A, B)
    kept.remove(B)
    index._holders[key("own")] = kept


def count_for_a_stranger(index: KeyIndex) -> None:
    index._by_tenant = TenantCounts({TenantId("stranger"): 2})


def orphan_a_held_key(index: KeyIndex) -> None:
    index._orphans[key("own")] = None


def count_twice(index: KeyIndex) -> None:
    index._num_references += 1


@pytest.mark.parametrize(
    "corrupt",
    [
        lose_a_holder,
        lose_a_key,
        keep_a_set_of_one,
        orphan_a_held_key,
        count_twice,
        count_for_a_stranger,
    ],
)
def test_check_integrity_sees(corrupt: Callable[[KeyIndex], None]) -> None:
    index = KeyIndex()
    index.hold(key("own"), A)
    index.hold(key("shared"), A)
    index.hold(key("shared"), B)
    expected = {key("own"): {A}, key("shared"): {A, B}}
    index.check_integrity(expected)
    corrupt(index)
    with pytest.raises(IntegrityError):
        index.check_integrity(expected)


def test_a_shared_key_is_counted_once_for_a_tenant_that_holds_it() -> None:
    mine = [SessionRef(TenantId("mine"), SessionId(str(n))) for n in range(20)]
    theirs = SessionRef(TenantId("theirs"), SessionId("x"))
    index = KeyIndex()
    for ref in mine:
        index.hold(key("prefix"), ref)
    index.hold(key("a"), theirs)
    index.hold(key("b"), theirs)
    assert index.largest_tenant(mine[0].tenant) == theirs.tenant, "two keys against one"
    index.hold(key("prefix"), theirs)
    for ref in mine:
        index.release(key("prefix"), ref)
    index.check_integrity({key(name): {theirs} for name in ("prefix", "a", "b")})
    assert index._by_tenant == {theirs.tenant: 3}
