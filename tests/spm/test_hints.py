"""Whose request it is and what it asks for, from wherever it says so; nothing sent can raise."""

import logging
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spm.agent_hint import (
    MAX_SESSION_ID_CHARS,
    AgentHint,
    BlockRange,
    CacheControl,
    Edit,
    EditType,
    PrefetchTarget,
    SessionState,
)
from spm.hints import DEFAULT_TENANT, MAX_ACTIONS, HintOutcome, RequestHint, request_hint
from spm.tenancy import TenantVerifier, tenant_proof
from tracker.ids import SessionId, SessionRef, TenantId

NONE, ACCEPTED = HintOutcome.NONE, HintOutcome.ACCEPTED
MALFORMED, UNKNOWN = HintOutcome.MALFORMED, HintOutcome.UNKNOWN
NOT_TEXT = [b"s", 1, True, [], {}, ["s"]]
SECRET = bytes(range(32))
TENANT = TenantId("team-a")


def read(
    session_id: Any = None,  # noqa: ANN401
    params: Any = None,  # noqa: ANN401
    kv_hints: object = None,
) -> RequestHint:
    tenants = TenantVerifier()
    tenants.add_secret(SECRET)
    return request_hint(session_id, params, kv_hints, tenants)


def ref(session_id: str, tenant: TenantId = DEFAULT_TENANT) -> SessionRef:
    return SessionRef(tenant, SessionId(session_id))


def hinted(**fields: object) -> dict[str, object]:
    return {"agent_hint": fields}


def accepted(session_id: str | None, hint: AgentHint) -> RequestHint:
    return RequestHint(None if session_id is None else ref(session_id), None, hint, ACCEPTED)


def malformed(session_id: str | None = None, parent: str | None = None) -> RequestHint:
    return RequestHint(
        None if session_id is None else ref(session_id),
        None if parent is None else ref(parent),
        None,
        MALFORMED,
    )


@dataclass
class Action:
    """Shaped like vLLM's ``KvHintAction``."""

    action_type: Any
    payload: Any
    action_version: Any = "1.0"
    action_id: str = "a"


@dataclass
class Envelope:
    """Shaped like vLLM's ``KvHintsEnvelope``."""

    actions: Any
    protocol_version: str = "1.0"
    message_id: str = "m"


def envelope(*actions: Action) -> Envelope:
    return Envelope(list(actions))


# Nothing, and vLLM's own session id


@pytest.mark.parametrize(
    ("params", "kv_hints"),
    [
        (None, None),
        ({}, None),
        ({"other": 1}, None),
        ({"agent_hint": None}, None),
        (None, envelope()),
        ({}, envelope()),
    ],
)
def test_a_request_that_says_nothing_costs_nothing(params: Any, kv_hints: object) -> None:  # noqa: ANN401
    nothing = read()
    assert nothing == RequestHint(None, None, None, NONE)
    assert read(None, params, kv_hints) is nothing
    assert read("s", params, kv_hints) == RequestHint(ref("s"), None, None, NONE)


@pytest.mark.parametrize("good", ["s", "!", "~", "a/b:c", "x" * MAX_SESSION_ID_CHARS])
def test_ids_accepted(good: str) -> None:
    assert read(good) == RequestHint(ref(good))
    hint = AgentHint(session_id=SessionId(good))
    assert read(None, hinted(session_id=good)) == accepted(good, hint)


@pytest.mark.parametrize(
    "bad",
    ["", " ", "a b", "a\n", "\x00", "\x7f", "é", "x" * (MAX_SESSION_ID_CHARS + 1), *NOT_TEXT],
)
def test_ids_refused(bad: Any) -> None:  # noqa: ANN401
    assert read(bad) == malformed()
    assert read(bad, hinted(state="finished")) == malformed()
    assert read("s", hinted(session_id=bad)) == malformed()
    assert read("s", hinted(parent_session_id=bad)) == malformed("s")


# The hint in kv_transfer_params


def test_a_hint_about_vllms_own_session() -> None:
    assert read("s", hinted()) == accepted("s", AgentHint())
    assert read("s", hinted(session_id=None)) == accepted("s", AgentHint())
    hint = AgentHint(state=SessionState.WAITING_TOOL, expected_resume_s=2.0)
    assert read("s", hinted(state="waiting_tool", expected_resume_s=2)) == accepted("s", hint)


def test_the_hints_session_wins_over_vllms_field() -> None:
    for other in ("s", "not one", 7):
        assert read(other, hinted(session_id="h")).ref == ref("h")
        assert read(other, hinted(session_id="h")).outcome == ACCEPTED


def test_an_unusable_hint_id_is_not_replaced_by_a_guess() -> None:
    assert read("s", hinted(session_id=5)) == malformed()


def test_a_parent_comes_from_the_hint_with_either_id() -> None:
    for got in (
        read("s", hinted(parent_session_id="p")),
        read(None, hinted(session_id="s", parent_session_id="p")),
    ):
        assert (got.ref, got.parent, got.outcome) == (ref("s"), ref("p"), ACCEPTED)
    assert read("s", hinted(parent_session_id=None)).parent is None


def test_a_parent_without_a_session_is_nobodys() -> None:
    hint = AgentHint(parent_session_id=SessionId("p"))
    assert read(None, hinted(parent_session_id="p")) == accepted(None, hint)


def test_a_hint_without_any_session_is_still_well_formed() -> None:
    hint = AgentHint(cache_control=CacheControl())
    assert read(None, hinted(cache_control={})) == accepted(None, hint)


@pytest.mark.parametrize(
    "fault",
    [
        {"unknown": 1},
        {"state": "?"},
        {"cache_control": []},
        {"cache_control": {"ttl": 3601}},
        {"context_management": {"edits": [{"type": "evict", "block_start": 1}]}},
    ],
)
def test_a_fault_in_a_hint_costs_the_hint_not_the_identity(fault: dict[str, object]) -> None:
    assert read("s", hinted(**fault)) == malformed("s")
    fault = {"session_id": "h", "parent_session_id": "p", **fault}
    assert read("s", hinted(**fault)) == malformed("h", "p")


@pytest.mark.parametrize("hint", ["h", 1, 0, False, [], ["session_id"], 1.5])
def test_a_hint_that_is_no_object_leaves_vllms_field(hint: object) -> None:
    assert read("s", {"agent_hint": hint}) == malformed("s")


@pytest.mark.parametrize("params", ["h", 1, 0, False, [], [1], 1.5])
def test_parameters_that_are_no_object_leave_vllms_field(params: object) -> None:
    assert read("s", params) == malformed("s")


def test_a_malformed_hint_is_logged_by_its_field_only(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        read("s", hinted(session_id="a secret", state="finished"))
        read("s", None, envelope(Action("kv.retain", {}), Action("kv.retain", {"ttl": -1})))
    assert [record.levelno for record in caplog.records] == [logging.DEBUG] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "ignoring a malformed hint: agent_hint.session_id",
        "ignoring a malformed hint: kv_hints.actions[1].payload.ttl",
    ]


# Tenants


@pytest.mark.fault("F34", breaks="a session is its id, whoever's it is")
def test_a_proven_tenant_owns_the_session_and_its_parent() -> None:
    params = {"spm_tenant": {"id": TENANT, "proof": tenant_proof(SECRET, TENANT)}}
    assert read("s", params) == RequestHint(ref("s", TENANT))
    got = read("s", {**params, **hinted(parent_session_id="p")})
    assert (got.ref, got.parent) == (ref("s", TENANT), ref("p", TENANT))
    got = read("s", {**params, **hinted(unknown=1)})
    assert (got.ref, got.outcome) == (ref("s", TENANT), MALFORMED)
    assert read("s", params, envelope(Action("kv.retain", {}))).ref == ref("s", TENANT)


def test_an_unproven_tenant_is_the_default_one() -> None:
    wrong = tenant_proof(bytes(32), TENANT)
    for claim in ({"id": TENANT, "proof": wrong}, {"id": TENANT}, TENANT, None):
        assert read("s", {"spm_tenant": claim}) == RequestHint(ref("s"))


# vLLM's kv_hints envelope


RETAIN = Action("kv.retain", {"ttl": 5})


def test_the_hint_in_the_parameters_wins_over_the_envelope() -> None:
    assert read("s", hinted(), envelope(RETAIN)) == accepted("s", AgentHint())
    assert read("s", hinted(x=1), envelope(RETAIN)) == malformed("s")
    retained = accepted("s", AgentHint(cache_control=CacheControl(5.0)))
    for params in (None, {}, {"agent_hint": None}):
        assert read("s", params, envelope(RETAIN)) == retained


def test_a_whole_hint_as_an_action() -> None:
    payload = {"session_id": "h", "parent_session_id": "p", "state": "finished"}
    hint = AgentHint(SessionId("h"), SessionId("p"), state=SessionState.FINISHED)
    got = read("s", None, envelope(Action("agent_hint", payload)))
    assert got == RequestHint(ref("h"), ref("p"), hint, ACCEPTED)


@pytest.mark.parametrize(
    ("kind", "payload", "hint"),
    [
        ("kv.retain", {}, AgentHint(cache_control=CacheControl())),
        (
            "kv.retain",
            {
                "type": "ephemeral",
                "ttl": 9,
                "block_offset": 3,
                "state": "waiting_user",
                "expected_resume_s": 60,
            },
            AgentHint(
                cache_control=CacheControl(9.0, 3),
                expected_resume_s=60.0,
                state=SessionState.WAITING_USER,
            ),
        ),
        ("kv.offload", {}, AgentHint(edits=(Edit(EditType.OFFLOAD),))),
        (
            "kv.prefetch",
            {"block_start": 2, "block_end": 4},
            AgentHint(edits=(Edit(EditType.PREFETCH, BlockRange(2, 4)),)),
        ),
        (
            "kv.prefetch",
            {"target": "host"},
            AgentHint(edits=(Edit(EditType.PREFETCH, target=PrefetchTarget.HOST),)),
        ),
        ("kv.evict", {"block_start": None}, AgentHint(edits=(Edit(EditType.EVICT),))),
    ],
)
def test_single_actions(kind: str, payload: dict[str, object], hint: AgentHint) -> None:
    for version in ("1", "1.0", "1.12.3", "1-rc"):
        got = read("s", None, envelope(Action(kind, payload, version)))
        assert got == accepted("s", hint)


def test_actions_are_merged_in_order_and_the_later_one_wins() -> None:
    got = read(
        None,
        None,
        envelope(
            Action("kv.evict", {"block_start": 5, "block_end": 6}),
            Action("agent_hint", {"session_id": "a", "state": "finished", "cache_control": {}}),
            RETAIN,
            Action(
                "agent_hint",
                {
                    "session_id": "b",
                    "expected_resume_s": 1,
                    "context_management": {"manage_request": True, "edits": [{"type": "offload"}]},
                },
            ),
            Action("agent_hint", {"parent_session_id": "p"}),
        ),
    )
    hint = AgentHint(
        session_id=SessionId("b"),
        parent_session_id=SessionId("p"),
        cache_control=CacheControl(5.0),
        manage_request=True,
        edits=(Edit(EditType.EVICT, BlockRange(5, 6)), Edit(EditType.OFFLOAD)),
        expected_resume_s=1.0,
        state=SessionState.FINISHED,
    )
    assert got == RequestHint(ref("b"), ref("p"), hint, ACCEPTED)


@pytest.mark.parametrize(
    "other",
    [
        Action("kv.transfer", {"x": 1}),
        Action("", None),
        *[Action("kv.evict", {"new_field": 1}, version) for version in ("2.0", "10", "v1", "")],
    ],
)
def test_actions_of_others_are_left_to_others(other: Action) -> None:
    assert read("s", None, envelope(other)) == RequestHint(ref("s"), None, None, UNKNOWN)
    assert read(None, None, envelope(other)) == RequestHint(None, None, None, UNKNOWN)
    assert read("a b", None, envelope(other)) == malformed()
    alone = read("s", None, envelope(RETAIN))
    assert read("s", None, envelope(other, RETAIN)) == alone
    assert read("s", None, envelope(RETAIN, other)) == alone
    assert read("s", None, envelope(other, Action("kv.retain", {"x": 1}))) == malformed("s")


@pytest.mark.parametrize(
    "fault",
    [
        Action("agent_hint", {"x": 1}),
        Action("agent_hint", None),
        Action("kv.retain", {"x": 1}),
        Action("kv.retain", {"ttl": -1}),
        Action("kv.retain", {"state": "?"}),
        Action("kv.retain", {"expected_resume_s": True}),
        Action("kv.retain", []),
        Action("kv.evict", {"type": "offload"}),
        Action("kv.evict", {"block_start": 1}),
        Action("kv.evict", {"target": "gpu"}),
        Action("kv.prefetch", {"target": "remote"}),
        Action("kv.evict", None),
        Action(None, {}),
        Action(["kv.evict"], {}),
        Action("kv.evict", {}, None),
        Action("kv.evict", {}, 1),
    ],
)
def test_a_malformed_action_spoils_the_hint_not_the_identity(fault: Action) -> None:
    assert read("s", None, envelope(fault)) == malformed("s")
    ids = Action("agent_hint", {"session_id": "h", "parent_session_id": "p"})
    assert read("s", None, envelope(ids, fault)) == malformed("h", "p")
    assert read("s", None, envelope(fault, ids)) == malformed("h", "p")


def test_the_ids_of_a_malformed_action_are_read() -> None:
    action = Action("agent_hint", {"session_id": "h", "parent_session_id": 1, "state": "?"})
    assert read("s", None, envelope(action)) == malformed("h")


@pytest.mark.parametrize("kv_hints", [Envelope(None), Envelope("ab"), Envelope({}), 1, "x", {}])
def test_something_else_than_an_envelope_is_malformed(kv_hints: object) -> None:
    assert read("s", None, kv_hints) == malformed("s")


def test_a_long_envelope_is_read_in_part() -> None:
    evict, fault = Action("kv.evict", {}), Action("kv.evict", {"x": 1})
    got = read("s", None, envelope(*[evict] * MAX_ACTIONS, fault))
    assert got == accepted("s", AgentHint(edits=(Edit(EditType.EVICT),) * MAX_ACTIONS))


def test_more_edits_together_than_one_hint_may_have_are_malformed() -> None:
    edits = {"context_management": {"edits": [{"type": "evict"}] * 16}}
    whole = Action("agent_hint", edits)
    assert read("s", None, envelope(whole)).outcome == ACCEPTED
    assert read("s", None, envelope(Action("kv.evict", {}), whole)) == malformed("s")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
FIELDS = st.sampled_from(["session_id", "parent_session_id", "state", "ttl", "block_start", "x"])
HINTS = JSON | st.dictionaries(FIELDS, JSON)
PARAMS = JSON | st.fixed_dictionaries({}, optional={"agent_hint": HINTS, "spm_tenant": JSON})
KINDS = st.sampled_from(["agent_hint", "kv.retain", "kv.evict", "kv.x"])
ACTIONS = st.builds(Action, KINDS | JSON, HINTS, st.sampled_from(["1", "2"]) | JSON)
ENVELOPES = st.none() | st.builds(Envelope, st.lists(ACTIONS | JSON, max_size=3) | JSON) | JSON


@given(JSON, st.none() | PARAMS, ENVELOPES)
def test_no_json_raises_and_every_id_given_out_is_safe(
    session_id: Any,  # noqa: ANN401
    params: Any,  # noqa: ANN401
    kv_hints: object,
) -> None:
    got = read(session_id, params, kv_hints)
    for one in (got.ref, got.parent):
        if one is not None:
            assert one.tenant == DEFAULT_TENANT
            assert 1 <= len(one.session_id) <= MAX_SESSION_ID_CHARS
            assert all("!" <= char <= "~" for char in one.session_id)
    assert got.parent is None or got.ref is not None
    assert (got.hint is not None) == (got.outcome == ACCEPTED)
