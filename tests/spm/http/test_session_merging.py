"""One session as several engines see it: where its blocks are, and who has a say."""

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from spm.http import merging
from spm.http.session_merging import Sighting, merge_sessions

Session = dict[str, Any]

CLASSES = ["soon", "later", "associated", "ordinary", "finished"]
TIERS = ("gpu", "host", "remote")
COUNTS = (*TIERS, *(f"{tier}_bytes" for tier in TIERS))
counts = st.integers(0, 2**40)
ages_s = st.none() | st.floats(0, 3600)
ranges = st.fixed_dictionaries(
    {
        "block_start": counts,
        "block_end": counts,
        "tiers": st.lists(st.sampled_from(TIERS), unique=True),
        "bytes": counts,
        "age_s": ages_s,
    }
)
autos = st.none() | st.fixed_dictionaries(
    {"decision": st.sampled_from(["retain", "offload", "drop"]), "reason": st.text(max_size=3)}
)
operations = st.fixed_dictionaries(
    {"id": st.text("ab", min_size=1), "type": st.just("offload"), "status": st.just("accepted")}
)


@st.composite
def sessions(draw: st.DrawFn, *, old: bool | None = None) -> Session:
    """What an engine says; an ``old`` one knows neither ranges nor what follows them."""
    session: Session = {
        "id": "s",
        "parent_session_id": None,
        "children": 0,
        "active_requests": draw(counts),
        "idle_s": 1.0,
        "ttl_left_s": 0.0,
        "class": draw(st.sampled_from(CLASSES)),
        "blocks": draw(counts),
    }
    if draw(st.booleans()) if old is None else old:
        return {**session, "residency": {tier: draw(counts) for tier in TIERS}}
    residency: Session = {name: draw(counts) for name in COUNTS}
    residency |= {"age_s": draw(ages_s), "ranges": draw(st.lists(ranges, max_size=3))}
    return {
        **session,
        "residency": residency,
        "auto": draw(autos),
        "operations": draw(st.lists(operations, max_size=2)),
        "origin": "local",
    }


def merged_over(*known: Session | None) -> Session:
    """Of engines in order, None for one that does not know the session."""
    answers = [{"status": "ok", "session": s} if s else {"status": "not_found"} for s in known]
    merged = merging.merge_session(answers)
    assert merged["status"] == "ok"
    session: Session = merged["session"]
    return session


@given(sessions(), st.integers(0, 2))
def test_one_engine_that_knows_it_is_quoted(session: Session, place: int) -> None:
    known: list[Session | None] = [None, None, None]
    known[place] = session
    assert merged_over(*known) == session


@given(st.lists(st.none() | sessions(), min_size=2, max_size=4))
def test_residency_adds_up_and_ranges_say_whose_they_are(known: list[Session | None]) -> None:
    spoken = [(n, s["residency"]) for n, s in enumerate(known) if s]
    assume(len(spoken) > 1)
    residency = merged_over(*known)["residency"]
    for name in COUNTS:
        said = [r[name] for _, r in spoken if name in r]
        assert residency.get(name) == (sum(said) if said else None)
    ages = [r["age_s"] for _, r in spoken if r.get("age_s") is not None]
    assert residency.get("age_s") == max(ages, default=None)
    for n, said in spoken:
        found = [r for r in residency.get("ranges", ()) if r["engine"] == n]
        assert found == [{**r, "engine": n} for r in said.get("ranges", ())]
    assert len(residency.get("ranges", ())) == sum(len(r.get("ranges", ())) for _, r in spoken)


@given(st.lists(sessions(), min_size=2, max_size=4))
def test_what_goes_on_and_what_was_decided(known: list[Session]) -> None:
    merged = merged_over(*known)
    assert merged.get("operations", []) == [o for s in known for o in s.get("operations", ())]
    deciding = [s for s in known if "auto" in s]
    assert ("auto" in merged) == ("origin" in merged) == bool(deciding)
    if deciding:
        assert merged["origin"] == "local"
        best = min(CLASSES.index(s["class"]) for s in deciding)
        strongest = [s["auto"] for s in deciding if CLASSES.index(s["class"]) == best]
        assert merged["auto"] in strongest
        assert merged["auto"] is not None or strongest == [None] * len(strongest)


@given(st.lists(sessions(old=True), min_size=2, max_size=3))
def test_engines_of_the_old_shape(known: list[Session]) -> None:
    merged = merged_over(*known)
    assert merged["residency"].keys() == set(TIERS)
    assert merged.keys() == known[0].keys()


@given(st.lists(sessions(old=False), min_size=1, max_size=3), st.integers(0, 3))
def test_a_manifest_has_no_say_beside_those_who_saw_the_session(
    known: list[Session], place: int
) -> None:
    """Its blocks are the same ones; counting them again would double them."""
    manifest = {**known[0], "origin": "manifest", "blocks": 10**6, "class": "soon"}
    with_it = [*known[:place], manifest, *known[place:]]
    without = [*known[:place], None, *known[place:]]
    assert merged_over(*with_it) == merged_over(*without)


@given(sessions(old=False), st.integers(1, 3))
def test_a_manifest_that_several_engines_read_is_counted_once(
    session: Session, engines: int
) -> None:
    manifest = {**session, "origin": "manifest"}
    assert merged_over(*[manifest] * engines) == manifest


@pytest.mark.parametrize("name", ["unheard-of", None])
def test_a_class_of_another_version_is_the_weakest(name: str | None) -> None:
    strange: Session = {"id": "s", "class": name}
    known: Session = {"id": "s", "class": "finished"}
    assert merge_sessions([Sighting(0, strange), Sighting(1, known)])["class"] == "finished"
