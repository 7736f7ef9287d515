"""Ranges of logical blocks and of chunks; whose turn it is to be kept."""

import math
from array import array

from hypothesis import given
from hypothesis import strategies as st

from connectors.lmcache.control import WarmRequest
from connectors.lmcache.kept_sessions import KeptSessions
from connectors.lmcache.session_chunks import chunks_covering, chunks_inside
from spm.agent_hint import BlockRange
from tests.connectors.lmcache.rig import ref_of

_SIZES = st.tuples(st.integers(1, 9), st.integers(1, 40))


@given(_SIZES, st.integers(0, 60), st.integers(0, 60))
def test_chunks_inside_are_all_those_that_no_block_outside_has_a_part_of(
    sizes: tuple[int, int], start: int, length: int
) -> None:
    block, chunk = sizes
    span = BlockRange(start, start + length)
    tokens = range(span.start * block, span.stop * block)
    expected = [
        at
        for at in range(span.stop * block // chunk + 2)
        if all(token in tokens for token in range(at * chunk, (at + 1) * chunk))
    ]

    found = chunks_inside(span, block, chunk)

    assert list(range(found.start, found.stop)) == expected


@given(_SIZES, st.integers(0, 60))
def test_chunks_covering_are_the_fewest_that_hold_the_blocks(
    sizes: tuple[int, int], stop: int
) -> None:
    block, chunk = sizes

    chunks = chunks_covering(stop, block, chunk)

    assert chunks * chunk >= stop * block
    assert chunks == 0 or (chunks - 1) * chunk < stop * block


def request_of(count: int = 1) -> WarmRequest:
    return WarmRequest(array("I", range(count)), count, "")


def test_a_session_comes_round_once_an_interval() -> None:
    kept = KeptSessions(10.0)
    kept.hold(ref_of("a"), request_of(), 100.0, 0.0)

    assert kept.take(9.9) is None
    assert kept.next_due_s() == 10.0
    assert kept.take(10.0) == (ref_of("a"), request_of())
    assert kept.take(19.9) is None
    assert kept.behind_s(21.0) == 1.0


def test_sessions_that_are_due_together_are_not_kept_at_once() -> None:
    kept = KeptSessions(10.0)
    for name in "abcd":
        kept.hold(ref_of(name), request_of(), 1000.0, 0.0)

    turns: list[float] = []
    while len(turns) < 4:
        turns.append(kept.next_due_s())
        assert kept.take(turns[-1]) is not None

    assert turns == [10.0, 11.25, 12.5, 13.75]


def test_a_session_whose_time_is_over_is_told_once() -> None:
    kept = KeptSessions(10.0)
    kept.hold(ref_of("a"), request_of(), 5.0, 0.0)

    assert kept.take(10.0) == (ref_of("a"), None)
    assert len(kept) == 0
    assert kept.next_due_s() == math.inf


def test_more_time_keeps_the_turn_and_more_tokens_put_it_off() -> None:
    kept = KeptSessions(10.0)
    kept.hold(ref_of("a"), request_of(), 5.0, 0.0)
    kept.hold(ref_of("a"), request_of(), 50.0, 4.0)
    assert kept.next_due_s() == 10.0

    kept.hold(ref_of("a"), request_of(2), 50.0, 6.0)
    assert kept.next_due_s() == 16.0


def test_dropped_sessions_do_not_come_round() -> None:
    kept = KeptSessions(10.0)
    kept.hold(ref_of("a"), request_of(), 50.0, 0.0)
    kept.hold(ref_of("b"), request_of(), 50.0, 0.0)
    kept.drop(ref_of("a"))
    assert kept.take(10.0) == (ref_of("b"), request_of())

    kept.clear()
    assert kept.take(30.0) is None
