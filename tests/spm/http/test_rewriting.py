"""What becomes of a generation request's body."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spm.config import SamConfig
from spm.http.errors import RequestError
from spm.http.rewriting import ManageRequest, decide, may_concern_us

ON = SamConfig()
CLAIM = {"id": "a", "proof": "00"}
HINT = {"session_id": "s", "cache_control": {"ttl": 60}}

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**2000), 2**2000)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=())),  # lone surrogates included
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=())), inner)
    ),
    max_leaves=10,
)
bodies = st.dictionaries(
    st.text(max_size=5).filter(lambda k: k != "agent_hint") | st.just("messages"), json_values
)


def raw(document: object, *, ascii_only: bool = True) -> bytes:
    return json.dumps(document, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")


def rewritten(body: bytes, sam: SamConfig = ON, claim: dict[str, str] | None = None) -> Any:  # noqa: ANN401
    decided = decide(body, sam, claim)
    assert isinstance(decided, bytes)
    decided.decode("ascii")
    return json.loads(decided)


@given(bodies, st.booleans())
def test_everything_but_the_hint_survives(document: dict[str, Any], ascii_only: bool) -> None:
    document.pop("kv_transfer_params", None)
    body = raw({**document, "agent_hint": HINT}, ascii_only=ascii_only)
    assert may_concern_us(body)
    seen = rewritten(body, claim=CLAIM)
    params = seen.pop("kv_transfer_params")
    assert params == {"agent_hint": HINT, "spm_tenant": CLAIM}
    assert seen == document
    assert list(seen) == list(document)


def test_numbers_are_not_rounded() -> None:
    body = b'{"agent_hint":{},"a":123456789012345678901234567890,"b":-0.0,"c":1e400,"d":0.1}'
    seen = rewritten(body)
    assert seen["a"] == 123456789012345678901234567890
    assert str(seen["b"]) == "-0.0"
    assert seen["c"] == float("inf")
    assert seen["d"] == 0.1


def test_the_hint_of_the_top_level_wins() -> None:
    inside = {"agent_hint": {"session_id": "inside"}, "do_remote_prefill": False}
    seen = rewritten(raw({"agent_hint": HINT, "kv_transfer_params": inside}))
    assert seen == {"kv_transfer_params": {"agent_hint": HINT, "do_remote_prefill": False}}


def test_a_hint_inside_stays_as_it_came() -> None:
    body = raw({"kv_transfer_params": {"agent_hint": {"session_id": 5}}})
    assert decide(body, ON, None) is None
    seen = rewritten(body, claim=CLAIM)
    assert seen["kv_transfer_params"]["agent_hint"] == {"session_id": 5}


@pytest.mark.parametrize("params", [{}, {"agent_hint": HINT}, None])
@pytest.mark.parametrize("hint", [HINT, None])
def test_nobody_names_a_tenant_but_this_server(
    params: dict[str, Any] | None, hint: dict[str, Any] | None
) -> None:
    forged = {**(params or {}), "spm_tenant": {"id": "victim", "proof": "ff"}}
    body = raw({"agent_hint": hint, "kv_transfer_params": forged})
    assert may_concern_us(body)
    assert "spm_tenant" not in rewritten(body)["kv_transfer_params"]
    assert rewritten(body, claim=CLAIM)["kv_transfer_params"]["spm_tenant"] == CLAIM


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b'"agent_hint"',
        b'["agent_hint"]',
        b'{"agent_hint":{}',
        b'{"agent_hint":null}',
        b'{"prompt":"say \\"agent_hint\\""}',
        b'{"agent_hint":{},"kv_transfer_params":[1]}',
        b'{"agent_hint":{},"kv_transfer_params":false}',
        b'\xff{"agent_hint":{}}',
        b'{"agent_hint":{},"n":' + b"1" * 5000 + b"}",
        b'{"agent_hint":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_what_is_left_for_vllm_to_answer(body: bytes) -> None:
    assert decide(body, ON, None) is None


def test_a_prompt_about_hints_is_not_one() -> None:
    assert not may_concern_us(raw({"prompt": 'what is "agent_hint"?'}))


@pytest.mark.parametrize("prompt", ["x", "é", "\ud800"])
def test_wide_encodings_are_read_as_the_web_framework_reads_them(prompt: str) -> None:
    body = json.dumps({"agent_hint": HINT, "p": prompt}).encode("utf-16")
    assert rewritten(body)["p"] == prompt


@pytest.mark.parametrize(
    ("hint", "field"),
    [
        (5, "agent_hint"),
        ([], "agent_hint"),
        ({"session_id": "a b"}, "agent_hint.session_id"),
        ({"cache_control": {"ttl": 3601}}, "agent_hint.cache_control.ttl"),
        ({"sesion_id": "s"}, "agent_hint.sesion_id"),
        (
            {"context_management": {"edits": [{"type": "evict"}, {"type": "x"}]}},
            "agent_hint.context_management.edits[1].type",
        ),
        ({"context_management": {"manage_request": True}}, "agent_hint.session_id"),
    ],
)
def test_a_malformed_hint_is_refused_by_name(hint: object, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        decide(raw({"agent_hint": hint}), ON, None)
    assert (caught.value.code, caught.value.param, caught.value.status) == (400, field, None)
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("hint", "field"),
    [
        ({"cache_control": {"block_offset": 0}}, "agent_hint.cache_control.block_offset"),
        (
            {
                "context_management": {
                    "edits": [
                        {"type": "evict"},
                        {"type": "evict", "block_start": 0, "block_end": 1},
                    ]
                }
            },
            "agent_hint.context_management.edits[1].block_start",
        ),
    ],
)
def test_ranges_switched_off(hint: dict[str, Any], field: str) -> None:
    body = raw({"agent_hint": hint})
    assert rewritten(body)["kv_transfer_params"]["agent_hint"] == hint
    with pytest.raises(RequestError) as caught:
        decide(body, SamConfig(ranges=False), None)
    assert (caught.value.code, caught.value.param) == (400, field)
    assert "sam.ranges" in caught.value.message


@pytest.mark.parametrize(
    "hint",
    [
        {"session_id": "s"},
        {"cache_control": None, "context_management": {"edits": None}},
        {"context_management": {"edits": [{"type": "evict", "block_start": None}]}},
    ],
)
def test_hints_without_ranges_are_not_affected(hint: dict[str, Any]) -> None:
    body = raw({"agent_hint": hint})
    assert decide(body, SamConfig(ranges=False), None) == decide(body, ON, None)


@pytest.mark.parametrize(
    "extra", [{}, {"model": "m", "stream": True, "stream_options": {"include_usage": True}}]
)
def test_a_management_request(extra: dict[str, Any]) -> None:
    hint = {**HINT, "context_management": {"manage_request": True, "edits": [{"type": "evict"}]}}
    decided = decide(raw({**extra, "agent_hint": hint}), ON, CLAIM)
    on = bool(extra)
    assert decided == ManageRequest(hint, "m" if on else "", stream=on, include_usage=on)


def test_no_depth_of_nesting_escapes() -> None:
    outcomes: set[int | str] = set()
    for depth in range(1, 3000, 7):
        body = b'{"agent_hint":{},"x":' + b"[" * depth + b"]" * depth + b"}"
        try:
            decided = decide(body, ON, None)
        except RequestError as error:
            outcomes.add(int(error.code))
        else:
            outcomes.add(type(decided).__name__)
    assert "bytes" in outcomes
    assert outcomes <= {"bytes", "NoneType", 400}
