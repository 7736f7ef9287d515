"""The view of a session: sums and ranges by example, and against a naive count."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from spm.keys import Rank
from spm.residency import ResidencyIndex
from spm.residency_view import MAX_RANGES, ResidencyView, residency_view
from tests.clock import FakeClock
from tracker.ids import BlockHash, BlockKey, GroupId, make_block_key

G0, G1 = GroupId(0), GroupId(1)
TIERS = ("gpu", "host", "remote")


class Bench:
    """One rank's residency and a GPU pool that is a set of places."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.index = ResidencyIndex(1, 10_000, 10.0, self.clock)
        self.gpu: set[tuple[GroupId, int]] = set()

    def in_host(self, *keys: BlockKey) -> None:
        self.index.note_host(Rank(0), dict.fromkeys(keys, True))

    def view(
        self,
        groups: Sequence[Sequence[BlockKey | None]],
        scales: Sequence[int] = (1,),
        block_bytes: Sequence[int] = (100,),
    ) -> ResidencyView:
        return residency_view(
            groups, scales, block_bytes, self.index, lambda group, i: (group, i) in self.gpu
        )


def keys_of(group: GroupId, count: int) -> list[BlockKey]:
    return [make_block_key(BlockHash(i.to_bytes(4, "big")), group) for i in range(count)]


def test_ranges_say_where_the_blocks_are_and_how_old_that_knowledge_is() -> None:
    bench, keys = Bench(), keys_of(G0, 6)
    bench.gpu = {(G0, 0), (G0, 1)}
    bench.index.confirm_remote(keys[:2])
    bench.clock.now_s += 4
    bench.index.confirm_remote(keys[1:4])
    bench.in_host(keys[3])
    bench.clock.now_s += 1.5
    assert bench.view([keys]).to_wire() == {
        "gpu": 2,
        "host": 1,
        "remote": 4,
        "gpu_bytes": 200,
        "host_bytes": 100,
        "remote_bytes": 400,
        "age_s": 5.5,
        "ranges": [
            wire(0, 2, ["gpu", "remote"], 200, 5.5),
            wire(2, 3, ["remote"], 100, 1.5),
            wire(3, 4, ["host", "remote"], 100, 1.5),
            wire(4, 6, [], 200, None),
        ],
    }


def wire(start: int, end: int, tiers: list[str], size: int, age_s: float | None) -> object:
    return {"block_start": start, "block_end": end, "tiers": tiers, "bytes": size, "age_s": age_s}


def test_a_session_without_blocks_is_nowhere() -> None:
    wire = Bench().view([[], []], (2, 1), (1, 1)).to_wire()
    assert wire["ranges"] == []
    assert wire["age_s"] is None
    assert [wire[tier] for tier in TIERS] == [0, 0, 0]


def test_a_logical_block_is_in_a_tier_with_all_its_parts_that_exist() -> None:
    bench, small, large = Bench(), keys_of(G0, 7), keys_of(G1, 4)
    bench.in_host(*small, *large[1:])
    bench.index.confirm_remote([*small[:3], small[6], *large])
    groups = [[*small[:4], None, *small[5:]], [*large[:2], None, large[3]]]
    view = bench.view(groups, (2, 1), (10, 50))
    assert [(r.block_start, r.tiers, r.size_bytes) for r in view.ranges] == [
        (0, ("remote",), 70),  # the large part of it is not in the host tier
        (1, ("host",), 80),  # one small part is not in the remote store, nor is all of the next
        (3, ("host", "remote"), 60),  # one small part less, and that does not matter
    ]


def test_a_block_given_up_is_nowhere_and_weighs_nothing() -> None:
    bench, keys = Bench(), keys_of(G0, 3)
    bench.in_host(*keys)
    view = bench.view([[keys[0], None, keys[2]]])
    assert [(r.block_start, r.tiers, r.size_bytes) for r in view.ranges] == [
        (0, ("host",), 100),
        (1, (), 0),
        (2, ("host",), 100),
    ]
    assert view.blocks["host"] == 2


def test_sizes_that_are_not_known_yet_change_no_tier() -> None:
    bench, keys = Bench(), keys_of(G0, 2)
    bench.in_host(*keys)
    assert bench.view([keys], block_bytes=(0,)).blocks["host"] == 2


def test_a_checkered_session_has_coarser_ranges_that_promise_less() -> None:
    bench, keys = Bench(), keys_of(G0, 4 * MAX_RANGES)
    bench.index.confirm_remote(keys)
    bench.in_host(*keys[::2], *keys[-8:])
    view = bench.view([keys])
    assert len(view.ranges) <= MAX_RANGES
    assert view.blocks["host"] == 2 * MAX_RANGES + 4
    assert view.ranges[0].tiers == ("remote",), "no pair of blocks is whole in the host tier"
    assert view.ranges[-1].tiers == ("host", "remote")
    assert view.ranges[-1].block_end == 4 * MAX_RANGES
    assert view.ranges[-1].block_end - view.ranges[-1].block_start == 8


PLACES = st.tuples(
    st.booleans(), st.booleans(), st.none() | st.sampled_from([0.0, 1.5, 20.0]), st.booleans()
)
"""Of one block: in the GPU pool, in the host tier, the age of remote knowledge, a hole."""


@given(
    st.lists(PLACES, max_size=MAX_RANGES * 3).map(lambda places: places * 2),
    st.lists(PLACES, max_size=8),
    st.integers(1, 3),
)
def test_the_view_agrees_with_a_naive_count(
    fine: list[tuple[bool, bool, float | None, bool]],
    coarse: list[tuple[bool, bool, float | None, bool]],
    scale: int,
) -> None:
    bench = Bench()
    groups: list[list[BlockKey | None]] = []
    parts: dict[int, list[tuple[set[str], int, float | None]]] = {}
    ages: list[tuple[float, BlockKey]] = []
    for group, places in ((G0, fine), (G1, coarse)):
        keys = keys_of(group, len(places))
        groups.append([None if place[3] else key for key, place in zip(keys, places, strict=True)])
        for i, (gpu, host, age_s, hole) in enumerate(places):
            logical = parts.setdefault(i // (scale, 1)[group], [])
            if hole:
                continue
            held = (("gpu", gpu), ("host", host), ("remote", age_s is not None))
            logical.append(({name for name, there in held if there}, (3, 70)[group], age_s))
            if gpu:
                bench.gpu.add((group, i))
            if host:
                bench.in_host(keys[i])
            if age_s is not None:
                ages.append((age_s, keys[i]))
    for age_s, key in ages:
        bench.index.note_seen([key], bench.clock.now_s - age_s)
    view = bench.view(groups, (scale, 1), (3, 70))

    tiers = {n: set.intersection(*(p[0] for p in ps)) if ps else set() for n, ps in parts.items()}
    sizes = {n: sum(p[1] for p in ps) for n, ps in parts.items()}
    oldest = {n: max((p[2] or 0.0 for p in ps), default=0.0) for n, ps in parts.items()}
    for tier in TIERS:
        there = [n for n in tiers if tier in tiers[n]]
        assert view.blocks[tier] == len(there)
        assert view.size_bytes[tier] == sum(sizes[n] for n in there)
    assert view.age_s == max((oldest[n] for n in tiers if "remote" in tiers[n]), default=None)
    assert len(view.ranges) <= MAX_RANGES
    assert [n for r in view.ranges for n in range(r.block_start, r.block_end)] == sorted(tiers)
    for one in view.ranges:
        inside = range(one.block_start, one.block_end)
        assert set(one.tiers) == set.intersection(*(tiers[n] for n in inside))
        assert one.size_bytes == sum(sizes[n] for n in inside)
        assert one.age_s == (max(oldest[n] for n in inside) if "remote" in one.tiers else None)
