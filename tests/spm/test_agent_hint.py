"""Parsing of ``agent_hint``: every value kept, every fault named, nothing else ever raised."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spm.agent_hint import (
    MAX_BLOCK,
    MAX_EDITS,
    MAX_RESUME_S,
    MAX_SESSION_ID_CHARS,
    AgentHint,
    BlockRange,
    CacheControl,
    Edit,
    EditType,
    HintError,
    PrefetchTarget,
    SessionState,
    parse_agent_hint,
    parse_session_id,
)
from spm.config import MAX_TTL_S
from spm.errors import SpmError
from tracker.ids import SessionId

HUGE = 10**5000
NOT_NUMBERS = [True, False, "1", [], {}, [1], math.nan, math.inf, -math.inf, -1, HUGE, -HUGE]
NOT_OBJECTS = ["x", 1, 0, 1.5, True, False, [], ["type"]]
NOT_LISTS: list[object] = [{}, "evict", 1, True]
NOT_KINDS: list[object] = [None, "", "EVICT", "delete", 1, [], {}]
BAD_IDS = ["", " ", "a b", "a\n", "\x00", "\x7f", "é", "\ud800", "x" * (MAX_SESSION_ID_CHARS + 1)]

session_ids = st.text(
    st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=MAX_SESSION_ID_CHARS
).map(SessionId)
ranges = (
    st.tuples(st.integers(0, MAX_BLOCK), st.integers(0, MAX_BLOCK))
    .filter(lambda pair: pair[0] != pair[1])
    .map(lambda pair: BlockRange(min(pair), max(pair)))
)
edits = st.builds(Edit, st.sampled_from(EditType), st.none() | ranges) | st.builds(
    Edit, st.just(EditType.PREFETCH), st.none() | ranges, st.sampled_from(PrefetchTarget)
)
hints = st.builds(
    AgentHint,
    session_id=st.none() | session_ids,
    parent_session_id=st.none() | session_ids,
    cache_control=st.none()
    | st.builds(CacheControl, st.floats(0, MAX_TTL_S), st.none() | st.integers(0, MAX_BLOCK)),
    manage_request=st.booleans(),
    edits=st.lists(edits, max_size=MAX_EDITS).map(tuple),
    expected_resume_s=st.none() | st.floats(0, MAX_RESUME_S),
    state=st.none() | st.sampled_from(SessionState),
)

NESTED = ("cache_control", "context_management", "edits", "type", "ttl", "block_start", "block_end")
KEYS = st.text(max_size=6) | st.sampled_from(NESTED) | st.sampled_from(["session_id", "state"])
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, 0, 5, "ephemeral", "evict", "finished", "s"])
    | st.floats()
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def as_json(hint: AgentHint, *, nulls: bool) -> dict[str, Any]:
    """The hint as a client would write it, absent fields as nulls or not at all."""

    def written(**given: object) -> dict[str, Any]:
        return {key: value for key, value in given.items() if nulls or value is not None}

    cache = hint.cache_control
    edits = [
        written(
            type=edit.type.value,
            block_start=None if edit.blocks is None else edit.blocks.start,
            block_end=None if edit.blocks is None else edit.blocks.stop,
            target=edit.target.value if edit.type is EditType.PREFETCH else None,
        )
        for edit in hint.edits
    ]
    return written(
        session_id=hint.session_id,
        parent_session_id=hint.parent_session_id,
        cache_control=None
        if cache is None
        else written(type="ephemeral", ttl=cache.ttl_s, block_offset=cache.block_offset),
        context_management=written(manage_request=hint.manage_request, edits=edits),
        expected_resume_s=hint.expected_resume_s,
        state=None if hint.state is None else hint.state.value,
    )


def refused(raw: object) -> HintError:
    with pytest.raises(HintError) as caught:
        parse_agent_hint(raw)
    return caught.value


def managed(*edits: object) -> dict[str, Any]:
    return {"context_management": {"edits": list(edits)}}


def blocks(start: object, stop: object) -> dict[str, object]:
    return {"type": "evict", "block_start": start, "block_end": stop}


@given(hints, st.booleans())
def test_every_value_of_a_valid_hint_is_kept(hint: AgentHint, nulls: bool) -> None:
    assert parse_agent_hint(json.loads(json.dumps(as_json(hint, nulls=nulls)))) == hint


def nested(depth: int) -> object:
    value: object = {}
    for _ in range(depth):
        value = {"cache_control": [value]}
    return value


def outcome(raw: object) -> AgentHint | HintError:
    try:
        return parse_agent_hint(raw)
    except HintError as error:
        return error


@given(JSON)
def test_no_json_raises_anything_but_a_hint_error(raw: Any) -> None:  # noqa: ANN401
    got = outcome(raw)
    if isinstance(got, HintError):
        assert got.field.startswith("agent_hint")
        assert str(got).startswith(got.field)
        assert len(str(got)) < 400
    else:
        assert parse_agent_hint(as_json(got, nulls=False)) == got


Place = tuple[str, dict[str, Any] | list[Any], Any]


def places(value: object, path: str) -> Iterator[Place]:
    """Every value in a JSON value: its dotted path, and where to put another."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{path}.{key}", value, key
            yield from places(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield f"{path}[{index}]", value, index
            yield from places(inner, f"{path}[{index}]")


@given(hints, st.data())
def test_one_wrong_value_in_a_valid_hint_is_found_where_it_is(
    hint: AgentHint, data: st.DataObject
) -> None:
    raw = as_json(hint, nulls=True)
    path, parent, key = data.draw(st.sampled_from(list(places(raw, "agent_hint"))))
    parent[key] = data.draw(JSON)
    got = outcome(raw)
    if isinstance(got, HintError):
        other_end = re.sub("block_(start|end)$", "block_", path)
        its_target = re.sub("type$", "target", path)
        assert got.field.startswith((path, other_end, its_target))


@pytest.mark.parametrize("raw", [nested(100_000), {"session_id": "x" * 10**6}, {"x" * 10**6: 1}])
def test_refusing_something_large_is_brief(raw: object) -> None:
    assert len(str(refused(raw))) < 400


def test_nothing_said_is_a_hint_that_says_nothing() -> None:
    assert parse_agent_hint({}) == AgentHint(None, None, None, False, (), None, None)
    assert parse_agent_hint({"context_management": {}, "state": None}) == AgentHint()


def test_defaults_of_cache_control() -> None:
    assert parse_agent_hint({"cache_control": {}}).cache_control == CacheControl(300.0, None)
    for nothing in ("type", "ttl", "block_offset"):
        hint = parse_agent_hint({"cache_control": {nothing: None}})
        assert hint.cache_control == CacheControl(300.0, None)


def test_a_prefetch_goes_to_the_gpu_unless_told_otherwise() -> None:
    for nothing in ({}, {"target": None}, {"target": "gpu"}):
        (edit,) = parse_agent_hint(managed({"type": "prefetch", **nothing})).edits
        assert edit.target is PrefetchTarget.GPU
    (evict,) = parse_agent_hint(managed({"type": "evict", "target": None})).edits
    assert evict == Edit(EditType.EVICT)


def test_whole_numbers_of_seconds_become_floats() -> None:
    hint = parse_agent_hint({"cache_control": {"ttl": 0}, "expected_resume_s": 86_400})
    assert hint.cache_control is not None
    assert (hint.cache_control.ttl_s, hint.expected_resume_s) == (0.0, 86_400.0)
    assert isinstance(hint.cache_control.ttl_s, float)
    assert isinstance(hint.expected_resume_s, float)


MANAGE = "manage_request"
EDIT = "agent_hint.context_management.edits"
FAULTS: list[tuple[str, object]] = [
    *[("agent_hint", bad) for bad in [None, *NOT_OBJECTS]],
    *[
        (f"agent_hint.{key}", {key: bad})
        for key in ("session_id", "parent_session_id")
        for bad in [*BAD_IDS, b"s", 1, True, [], {}, ["s"], HUGE]
    ],
    *[
        (f"agent_hint.{key}", {key: bad})
        for key in ("cache_control", "context_management")
        for bad in NOT_OBJECTS
    ],
    *[
        ("agent_hint.cache_control.ttl", {"cache_control": {"ttl": bad}})
        for bad in [*NOT_NUMBERS, 3600.001]
    ],
    *[
        ("agent_hint.cache_control.block_offset", {"cache_control": {"block_offset": bad}})
        for bad in [*NOT_NUMBERS, 1.0, 2**31]
    ],
    *[
        ("agent_hint.cache_control.type", {"cache_control": {"type": bad}})
        for bad in ["", "EPHEMERAL", "persistent", 1, [], {}]
    ],
    *[
        ("agent_hint.expected_resume_s", {"expected_resume_s": bad})
        for bad in [*NOT_NUMBERS, 86_400.5]
    ],
    *[
        ("agent_hint.state", {"state": bad})
        for bad in ["", "FINISHED", "SessionState.FINISHED", 1, [], {}]
    ],
    *[
        ("agent_hint.context_management.manage_request", {"context_management": {MANAGE: bad}})
        for bad in [0, 1, "true", [], {}]
    ],
    *[(EDIT, {"context_management": {"edits": bad}}) for bad in NOT_LISTS],
    (EDIT, managed(*[{"type": "evict"}] * (MAX_EDITS + 1))),
    *[(f"{EDIT}[1]", managed({"type": "evict"}, bad)) for bad in [None, *NOT_OBJECTS]],
    *[(f"{EDIT}[1].type", managed({"type": "evict"}, {"type": bad})) for bad in NOT_KINDS],
    (f"{EDIT}[0].type", managed({"block_start": 0, "block_end": 1})),
    *[
        (f"{EDIT}[0].block_start", managed(blocks(bad, 1)))
        for bad in [None, *NOT_NUMBERS, 1.0, 2**31]
    ],
    *[
        (f"{EDIT}[1].block_end", managed({"type": "evict"}, blocks(start, stop)))
        for start, stop in [(0, 2**31), (0, 1.0), (0, None), (3, 3), (4, 3)]
    ],
    (f"{EDIT}[0].block_end", managed({"type": "evict", "block_start": 0})),
    *[
        (f"{EDIT}[0].target", managed({"type": "prefetch", "target": bad}))
        for bad in ["", "GPU", "remote", 1, True, [], {}]
    ],
    *[
        (f"{EDIT}[1].target", managed({"type": "evict"}, {"type": kind, "target": bad}))
        for kind in ("evict", "offload")
        for bad in ["gpu", "host", "remote", {}]
    ],
    ("agent_hint.ttl", {"ttl": 1}),
    ("agent_hint.cache_control.x", {"cache_control": {"x": None}}),
    ("agent_hint.context_management.edit", {"context_management": {"edit": []}}),
    (f"{EDIT}[0].blocks", managed({"type": "evict", "blocks": [0, 1]})),
    ("agent_hint.(7)", {7: 1}),
    ("agent_hint.('a.b\\n')", {"a.b\n": 1}),
]


@pytest.mark.parametrize(
    ("field", "raw"), FAULTS, ids=[f"{number}-{field}" for number, (field, _) in enumerate(FAULTS)]
)
def test_a_fault_is_named_by_its_field(field: str, raw: object) -> None:
    error = refused(raw)
    assert error.field == field
    assert str(error).startswith((f"{field}=", f"{field} "))
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"cache_control": {"ttl": 4000}},
            "agent_hint.cache_control.ttl=4000: a number of seconds from 0 to 3600 is needed",
        ),
        (
            {"cache_contol": {"ttl": "secret"}},
            "agent_hint.cache_contol=(dict, not shown): unknown key; did you mean cache_control?; "
            "known: ['cache_control', 'context_management', 'expected_resume_s', "
            "'parent_session_id', 'session_id', 'state']",
        ),
        (
            {"state": "done"},
            "agent_hint.state='done': "
            "one of ['waiting_tool', 'waiting_user', 'finished'] is needed",
        ),
        (
            managed({"type": "evict", "block_start": 4, "block_end": 4}),
            f"{EDIT}[0].block_end=4: more than block_start=4 is needed",
        ),
        (
            managed({"type": "evict", "block_end": 4}),
            f"{EDIT}[0].block_start is missing: block_end=4 needs it",
        ),
        (
            managed({"type": "prefetch", "target": "remote"}),
            f"{EDIT}[0].target='remote': one of ['gpu', 'host'] is needed",
        ),
        (
            managed({"type": "offload", "target": "host"}),
            f"{EDIT}[0].target='host': only a prefetch has a target",
        ),
        (
            managed(*[{"type": "evict"}] * 17),
            f"{EDIT} has 17 edits: at most 16",
        ),
        (
            {"expected_resume_s": HUGE},
            "agent_hint.expected_resume_s=(a very long number, not shown): "
            "a number of seconds from 0 to 86400 is needed",
        ),
    ],
)
def test_a_refusal_says_what_was_sent_and_what_is_allowed(raw: object, message: str) -> None:
    assert str(refused(raw)) == message


def test_a_key_unlike_any_other_gets_no_suggestion() -> None:
    assert "did you mean" not in str(refused({"zzz": 1}))


def test_the_path_is_the_callers() -> None:
    with pytest.raises(HintError) as caught:
        parse_agent_hint({"edits": []}, "hint")
    assert caught.value.field == "hint.edits"
    assert isinstance(caught.value, SpmError)


@pytest.mark.parametrize("good", ["s", "!", "~", "a/b:c", "x" * MAX_SESSION_ID_CHARS])
def test_session_ids_accepted(good: str) -> None:
    assert parse_session_id(good) == good


@pytest.mark.parametrize("bad", [*BAD_IDS, None, b"s", 1])
def test_session_ids_refused(bad: object) -> None:
    with pytest.raises(HintError, match=r"1 to 256 visible ASCII") as caught:
        parse_session_id(bad, "parent")
    assert caught.value.field == "parent"
