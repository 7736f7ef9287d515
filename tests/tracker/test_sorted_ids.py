"""Sorted ids in pieces, against a plain sorted list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracker.errors import IntegrityError
from tracker.ids import SessionId
from tracker.sorted_ids import SortedIds

IDS = st.text("xyz", min_size=1, max_size=3).map(SessionId)


@given(st.lists(IDS, max_size=60), st.integers(2, 5), st.one_of(st.none(), st.text("wxyz")))
def test_like_a_sorted_list(changed: list[SessionId], longest: int, after: str | None) -> None:
    ids, model = SortedIds(longest), set[SessionId]()
    for one in changed:  # the second time it is there, and goes
        if one in model:
            ids.remove(one)
        else:
            ids.add(one)
        model ^= {one}
        ids.check_integrity()

        assert list(ids.above(None)) == sorted(model)
        assert bool(ids) == bool(model)
        above = [known for known in sorted(model) if after is None or known > after]
        assert list(ids.above(after)) == above


def test_a_piece_is_never_longer_than_it_may_be() -> None:
    ids = SortedIds(longest=4)
    for number in range(1000):
        ids.add(SessionId(f"{number:04}"))

    ids.check_integrity()
    assert max(map(len, ids._pieces)) <= 4
    assert len(ids._pieces) <= 500


def test_a_wrong_last_id_is_noticed() -> None:
    ids = SortedIds()
    ids.add(SessionId("a"))
    ids._lasts[0] = SessionId("b")

    with pytest.raises(IntegrityError, match="others"):
        ids.check_integrity()
