"""Who displaces whom: a flood displaces itself."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracker.errors import IntegrityError
from tracker.fair_order import FairOrder
from tracker.ids import TenantId

A, B, C = (TenantId(name) for name in "abc")
STEPS = st.lists(st.tuples(st.sampled_from("atro"), st.sampled_from([A, B, C]), st.integers(0, 4)))


def order(*keys: tuple[TenantId, int]) -> FairOrder[int]:
    made: FairOrder[int] = FairOrder()
    for tenant, key in keys:
        made.add(tenant, key)
    return made


def test_one_tenant_is_plain_lru() -> None:
    one = order((A, 1), (A, 2), (A, 3))
    one.touch(A, 1)
    assert one.first_out(A) == 2


def test_a_flood_displaces_itself() -> None:
    flood = order((B, 0))
    for key in range(1, 1000):
        if flood.count(A) + flood.count(B) >= 10:
            gone = flood.first_out(A)
            assert gone
            flood.remove(A, gone)
        flood.add(A, key)
    assert flood.oldest(B) == 0


def test_of_equals_the_one_who_wants_room_is_spared_then_the_latest() -> None:
    equal = order((A, 1), (B, 2), (C, 3))
    assert equal.first_out(A) == 2
    equal.touch(B, 2)
    assert equal.first_out(A) == 3
    assert order((A, 1), (B, 2)).first_out(C) == 1


def test_nobody_is_there() -> None:
    assert order().first_out(A) is None
    assert order().oldest(A) is None


@given(STEPS)
def test_it_counts_as_one_would(steps: list[tuple[str, TenantId, int]]) -> None:
    fair: FairOrder[int] = FairOrder()
    model: dict[TenantId, list[int]] = {A: [], B: [], C: []}
    for what, tenant, key in steps:
        keys = model[tenant]
        if key in keys and what != "a":
            keys.remove(key)
            if what == "r":
                fair.remove(tenant, key)
                continue
            keys.append(key)
            fair.touch(tenant, key)
        elif key not in keys:
            keys.append(key)
            fair.add(tenant, key)
        fair.check_integrity((t, k) for t, keys in model.items() for k in keys)
        most = Counter({t: len(keys) for t, keys in model.items()}).most_common()[0][1]
        gone = {keys[0] for keys in model.values() if len(keys) == most and keys}
        assert fair.first_out(tenant) in gone
        assert {t: fair.oldest(t) for t in model} == {t: next(iter(model[t]), None) for t in model}


def test_a_wrong_count_is_noticed() -> None:
    broken = order((A, 1))
    with pytest.raises(IntegrityError):
        broken.check_integrity([(A, 2)])
    broken._most = 2
    with pytest.raises(IntegrityError):
        broken.check_integrity([(A, 1)])
