"""One answer out of several engines' answers."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spm.http import merging
from tests.spm.http.fake_engine import FakeCore

Answer = dict[str, Any]

CLASSES = ["soon", "later", "associated", "ordinary", "finished"]
STATUSES = ["ok", "partial", "accepted", "deferred", "unsupported", "rejected", "failed"]

statuses = st.sampled_from([*STATUSES, "not_found"])
counts = st.integers(0, 1000)
seconds = st.floats(0, 3600)
retentions = st.none() | st.fixed_dictionaries(
    {"class": st.sampled_from(CLASSES), "ttl_s": seconds, "blocks": counts}
)
session_ids = st.text("abc/", min_size=1, max_size=2)


def edits(count: int) -> st.SearchStrategy[list[Answer]]:
    one = st.fixed_dictionaries(
        {
            "type": st.just("evict"),
            "status": statuses,
            "block_start": st.none() | counts,
            "block_end": st.none() | counts,
            "blocks": counts,
        },
        optional={"done_blocks": counts},
    )
    return st.lists(one, min_size=count, max_size=count)


@st.composite
def applied(draw: st.DrawFn, min_engines: int = 1) -> list[Answer]:
    """What 1 to 4 engines answer to the same request."""
    count = draw(st.integers(0, 3))
    answer = st.fixed_dictionaries(
        {
            "status": statuses,
            "operation_id": st.just("op"),
            "session_id": st.just("s"),
            "edits": edits(count),
            "retention": retentions,
        }
    )
    return draw(st.lists(answer, min_size=min_engines, max_size=4))


@st.composite
def sessions(draw: st.DrawFn, session_id: str = "s") -> Answer:
    return {
        "id": session_id,
        "parent_session_id": draw(st.sampled_from([None, "p"])),
        "children": draw(counts),
        "active_requests": draw(counts),
        "idle_s": draw(seconds),
        "ttl_left_s": draw(seconds),
        "class": draw(st.sampled_from(CLASSES)),
        "blocks": draw(counts),
        "residency": {tier: draw(counts) for tier in ("gpu", "host", "remote")},
    }


@given(applied())
def test_one_engine_is_quoted(answers: list[Answer]) -> None:
    assert merging.merge_apply(answers[:1]) == answers[0]


@given(sessions())
def test_one_engine_is_quoted_about_a_session(session: Answer) -> None:
    answer = {"status": "ok", "session": session}
    assert merging.merge_session([answer]) == answer


@given(applied(), st.randoms(use_true_random=False))
def test_the_order_of_engines_does_not_matter(answers: list[Answer], rng: random.Random) -> None:
    shuffled = list(answers)
    rng.shuffle(shuffled)
    assert merging.merge_apply(shuffled) == merging.merge_apply(answers)


@given(applied(), st.integers(1, 3))
def test_engines_that_do_not_know_the_session_have_no_say(
    answers: list[Answer], strangers: int
) -> None:
    knowing = [{**a, "status": "ok"} if a["status"] == "not_found" else a for a in answers]
    stranger = {
        "status": "not_found",
        "operation_id": "op",
        "session_id": "s",
        "edits": [
            {**e, "status": "not_found", "block_start": 9999, "blocks": 7}
            for e in answers[0]["edits"]
        ],
        "retention": {"class": "soon", "ttl_s": 9999.0, "blocks": 1},
        "detail": "not here",
    }
    assert merging.merge_apply([*[stranger] * strangers, *knowing]) == merging.merge_apply(knowing)


@given(applied(min_engines=2))
def test_counts_add_up(answers: list[Answer]) -> None:
    said = [a for a in answers if a["status"] != "not_found"] or answers
    merged = merging.merge_apply(answers)
    kept = [a["retention"] for a in said if a["retention"]]
    if kept:
        assert merged["retention"]["blocks"] == sum(r["blocks"] for r in kept)
        assert merged["retention"]["ttl_s"] == max(r["ttl_s"] for r in kept)
        strongest = min((r["class"] for r in kept), key=CLASSES.index)
        assert merged["retention"]["class"] == strongest
    else:
        assert merged["retention"] is None
    for n, edit in enumerate(merged["edits"]):
        column = [a["edits"][n] for a in said]
        counted = [e for e in column if e["status"] != "not_found"] or column
        assert edit["blocks"] == sum(e["blocks"] for e in counted)
        done = [e["done_blocks"] for e in counted if "done_blocks" in e]
        assert edit.get("done_blocks") == (sum(done) if done else None)


@pytest.mark.parametrize(
    ("statuses", "merged"),
    [
        (["ok", "ok"], "ok"),
        (["not_found", "not_found"], "not_found"),
        (["not_found", "accepted"], "accepted"),
        (["rejected", "rejected"], "rejected"),
        (["ok", "accepted"], "accepted"),
        (["ok", "deferred", "not_found"], "accepted"),
        (["accepted", "deferred"], "accepted"),
        (["deferred", "not_found"], "deferred"),
        (["accepted", "failed"], "partial"),
        (["ok", "accepted", "partial"], "partial"),
        (["ok", "not_found", "failed"], "partial"),
        (["deferred", "unsupported"], "partial"),
        (["rejected", "failed"], "failed"),
        (["unsupported", "rejected", "not_found"], "failed"),
    ],
)
def test_status(statuses: list[str], merged: str) -> None:
    assert merging.merge_status(statuses) == merged


@given(st.lists(statuses, min_size=1, max_size=5))
def test_an_outcome_is_partial_only_if_something_happened(given: list[str]) -> None:
    merged = merging.merge_status(given)
    if merged == "partial":
        assert set(given) & {"ok", "partial", "accepted", "deferred"}
    if set(given) <= {"ok", "not_found"} and "ok" in given:
        assert merged == "ok"


def test_the_detail_is_that_of_the_engine_with_the_problem() -> None:
    merged = merging.merge_apply(
        [
            {"status": "ok", "detail": "fine", "edits": [], "retention": None},
            {"status": "failed", "detail": "ask again", "edits": [], "retention": None},
        ]
    )
    assert (merged["status"], merged["detail"]) == ("partial", "ask again")


def test_a_repeat_is_one_only_if_it_was_one_everywhere() -> None:
    first: Answer = {"status": "ok", "operation_id": "op", "edits": [], "retention": None}
    again = {**first, "duplicate": True}
    elsewhere = {**first, "status": "not_found"}
    assert merging.merge_apply([again, again, elsewhere])["duplicate"] is True
    assert "duplicate" not in merging.merge_apply([again, first])


@given(st.lists(sessions(), min_size=2, max_size=4))
def test_sessions_on_several_engines(known: list[Answer]) -> None:
    answers: list[Answer] = [
        {"status": "not_found"},
        *({"status": "ok", "session": s} for s in known),
    ]
    merged = merging.merge_session(answers)
    session = merged["session"]
    assert merged["status"] == "ok"
    for tier in ("gpu", "host", "remote"):
        assert session["residency"][tier] == sum(s["residency"][tier] for s in known)
    assert session["blocks"] == sum(s["blocks"] for s in known)
    assert session["active_requests"] == sum(s["active_requests"] for s in known)
    assert session["children"] == max(s["children"] for s in known)
    assert session["idle_s"] == min(s["idle_s"] for s in known)
    assert session["ttl_left_s"] == max(s["ttl_left_s"] for s in known)
    assert session["class"] == min((s["class"] for s in known), key=CLASSES.index)
    assert session["parent_session_id"] == (
        "p" if any(s["parent_session_id"] for s in known) else None
    )


def test_a_session_nobody_knows() -> None:
    assert merging.merge_session([{"status": "not_found"}] * 2) == {"status": "not_found"}


@given(
    st.lists(st.sets(session_ids, max_size=12), min_size=1, max_size=4),
    st.integers(1, 5),
)
def test_pages_over_several_engines_hold_every_session_once(
    placed: list[set[str]], limit: int
) -> None:
    cores = [FakeCore() for _ in placed]
    for core, ids in zip(cores, placed, strict=True):
        for one in ids:
            core.add_session("t", one)
    found: list[str] = []
    after = None
    while True:
        request = {"op": "list_sessions", "tenant": "t", "limit": limit, "after": after}
        page = merging.merge_list([core.manage(request) for core in cores], limit)
        found += [session["id"] for session in page["sessions"]]
        assert len(page["sessions"]) == limit or not page["has_more"]
        for session in page["sessions"]:
            assert session["blocks"] == 4 * sum(session["id"] in ids for ids in placed)
        if not page["has_more"]:
            break
        after = found[-1]
    assert found == sorted(set().union(*placed))


def test_a_list_nobody_gave_is_no_empty_list() -> None:
    merged = merging.merge_list([{"status": "failed", "detail": "why"}], 10)
    assert merged == {"status": "failed", "detail": "why"}


def test_what_ended_is_the_union_in_order() -> None:
    merged = merging.merge_end(
        [
            {"status": "ok", "operation_id": "op", "ended": ["c", "a"]},
            {"status": "not_found", "operation_id": "op", "ended": []},
            {"status": "ok", "operation_id": "op", "ended": ["b", "a"]},
        ]
    )
    assert merged == {"status": "ok", "operation_id": "op", "ended": ["c", "a", "b"]}


@given(applied(min_engines=2))
def test_an_operation_is_remembered_as_it_was_answered(answers: list[Answer]) -> None:
    merged = merging.merge_operation(remembered(*answers))
    assert merged["status"] == "ok"
    del merged["operation"]["done"]
    assert merged["operation"] == merging.merge_apply(answers)


def test_an_ended_session_is_remembered_as_such() -> None:
    ended = {"status": "ok", "operation_id": "op", "ended": ["a"]}
    merged = merging.merge_operation(remembered(ended))
    assert merged["operation"] == {**ended, "done": True}


def remembered(*operations: Answer) -> list[Answer]:
    return [*({"status": "ok", "operation": o} for o in operations), {"status": "not_found"}]


def prefetched(status: str, **fields: object) -> Answer:
    edit = {"type": "prefetch", "status": status, "blocks": 8, "done_blocks": 3}
    return {"status": status, "edits": [edit], "retention": None, **fields}


@pytest.mark.parametrize(
    ("operations", "status", "done"),
    [
        ([prefetched("accepted", done=False)], "accepted", False),
        ([prefetched("ok", done=True)], "ok", True),
        ([prefetched("ok", done=True), prefetched("accepted", done=False)], "accepted", False),
        ([prefetched("failed", done=True), prefetched("accepted", done=False)], "partial", False),
        ([prefetched("failed", done=True), prefetched("ok", done=True)], "partial", True),
        ([prefetched("not_found", done=False), prefetched("ok", done=True)], "ok", True),
        # From before there was a "done":
        ([prefetched("accepted")], "accepted", False),
        ([prefetched("deferred"), prefetched("ok")], "accepted", False),
        ([prefetched("partial"), prefetched("ok")], "partial", True),
    ],
)
def test_an_operation_is_done_when_all_that_have_a_say_are(
    operations: list[Answer], status: str, done: bool
) -> None:
    merged = merging.merge_operation(remembered(*operations))["operation"]
    assert (merged["status"], merged["done"]) == (status, done)
    known = [o for o in operations if o["status"] != "not_found"]
    assert merged["edits"][0]["done_blocks"] == 3 * len(known)


def test_an_edit_keeps_its_target() -> None:
    edit = {"type": "prefetch", "target": "host", "status": "ok", "blocks": 1}
    answer: Answer = {"status": "ok", "edits": [edit], "retention": None}
    for engines in (1, 2):
        assert merging.merge_apply([answer] * engines)["edits"][0]["target"] == "host"


def test_every_engine_has_its_entry_in_the_status() -> None:
    first, last = {"sessions": 3}, {"sessions": 0}
    broken = {"status": "failed", "detail": "why"}
    merged = merging.merge_engines(
        [{"status": "ok", "engine": first}, broken, {"status": "ok", "engine": last}]
    )
    assert merged["engines"] == [
        {"engine": 0, "sessions": 3},
        {"engine": 1, "status": "failed", "detail": "why"},
        {"engine": 2, "sessions": 0},
    ]


def test_a_status_nobody_gave_is_no_empty_list() -> None:
    merged = merging.merge_engines([{"status": "unsupported", "detail": "too old"}] * 2)
    assert merged == {"status": "unsupported", "detail": "too old"}
