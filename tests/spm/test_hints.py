"""Whose request it is, from whatever the client sent; nothing sent can raise."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spm.hints import DEFAULT_TENANT, MAX_SESSION_ID_CHARS, SessionIdentity, session_identity
from tracker.ids import SessionId, SessionRef

NOT_TEXT = [b"s", 1, True, [], {}, ["s"]]


def ref(session_id: str) -> SessionRef:
    return SessionRef(DEFAULT_TENANT, SessionId(session_id))


def hinted(**fields: object) -> dict[str, object]:
    return {"agent_hint": fields}


@pytest.mark.parametrize(
    "params", [None, {}, {"other": 1}, {"agent_hint": None}, {"agent_hint": {}}]
)
def test_nothing_sent_is_nobody_and_not_malformed(params: dict[str, object] | None) -> None:
    assert session_identity(None, params) == SessionIdentity(None, None, False)


def test_identity_from_vllms_own_field() -> None:
    for params in (None, {}, hinted(), hinted(session_id=None), hinted(other="x")):
        assert session_identity("s", params) == SessionIdentity(ref("s"))


def test_identity_from_the_hint() -> None:
    assert session_identity(None, hinted(session_id="h")) == SessionIdentity(ref("h"))


def test_the_hint_wins_over_vllms_field() -> None:
    assert session_identity("s", hinted(session_id="h")) == SessionIdentity(ref("h"))


def test_an_unusable_hint_id_is_not_replaced_by_a_guess() -> None:
    assert session_identity("s", hinted(session_id=5)) == SessionIdentity(malformed=True)


def test_a_parent_comes_from_the_hint_with_either_id() -> None:
    child = SessionIdentity(ref("s"), ref("p"))
    assert session_identity("s", hinted(parent_session_id="p")) == child
    assert session_identity(None, hinted(session_id="s", parent_session_id="p")) == child
    assert session_identity("s", hinted(parent_session_id=None)) == SessionIdentity(ref("s"))


def test_a_parent_without_a_session_is_nobodys() -> None:
    assert session_identity(None, hinted(parent_session_id="p")) == SessionIdentity()


def test_a_malformed_parent_costs_the_link_not_the_session() -> None:
    got = session_identity("s", hinted(parent_session_id=["p"]))
    assert got == SessionIdentity(ref("s"), malformed=True)


@pytest.mark.parametrize("hint", ["h", 1, 0, False, [], ["session_id"], 1.5])
def test_a_hint_that_is_no_object_leaves_vllms_field(hint: object) -> None:
    assert session_identity("s", {"agent_hint": hint}) == SessionIdentity(ref("s"), malformed=True)


@pytest.mark.parametrize("params", ["h", 1, 0, False, [], [1], 1.5])
def test_parameters_that_are_no_object_leave_vllms_field(params: Any) -> None:  # noqa: ANN401
    assert session_identity("s", params) == SessionIdentity(ref("s"), malformed=True)


@pytest.mark.parametrize("good", ["s", "!", "~", "a/b:c", "x" * MAX_SESSION_ID_CHARS])
def test_ids_accepted(good: str) -> None:
    assert session_identity(good, None) == SessionIdentity(ref(good))
    assert session_identity(None, hinted(session_id=good)) == SessionIdentity(ref(good))


@pytest.mark.parametrize(
    "bad",
    ["", " ", "a b", "a\n", "\x00", "\x7f", "é", "x" * (MAX_SESSION_ID_CHARS + 1), *NOT_TEXT],
)
def test_ids_refused(bad: Any) -> None:  # noqa: ANN401
    assert session_identity(bad, None) == SessionIdentity(malformed=True)
    assert session_identity("s", hinted(session_id=bad)) == SessionIdentity(malformed=True)
    parent = session_identity("s", hinted(parent_session_id=bad))
    assert parent == SessionIdentity(ref("s"), malformed=True)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
HINTS = JSON | st.dictionaries(st.sampled_from(["session_id", "parent_session_id", "x"]), JSON)
PARAMS = JSON | st.fixed_dictionaries({"agent_hint": HINTS})


@given(JSON, PARAMS)
def test_no_json_raises_and_every_id_given_out_is_safe(session_id: Any, params: Any) -> None:  # noqa: ANN401
    got = session_identity(session_id, params)
    for one in (got.ref, got.parent):
        if one is not None:
            assert one.tenant == DEFAULT_TENANT
            assert 1 <= len(one.session_id) <= MAX_SESSION_ID_CHARS
            assert all("!" <= char <= "~" for char in one.session_id)
    assert got.parent is None or got.ref is not None
