"""Residency by example, and against a naive model that remembers every report."""

from collections.abc import Iterable, Mapping

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from spm.keys import Rank
from spm.residency import ResidencyIndex, Tier
from tests.clock import FakeClock
from tracker.errors import IntegrityError
from tracker.ids import BlockHash, BlockKey, GroupId, make_block_key

TTL_S = 10.0
MAX_KEYS = 4
KEYS = [make_block_key(BlockHash(bytes([i]) * 4), GroupId(0)) for i in range(7)]
A, B, C = KEYS[:3]
R0, R1 = Rank(0), Rank(1)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def index(clock: FakeClock) -> ResidencyIndex:
    return ResidencyIndex(2, MAX_KEYS, TTL_S, clock)


def test_a_host_block_counts_only_when_every_rank_has_it(index: ResidencyIndex) -> None:
    index.note_host(R0, {A: True, B: True})
    assert index.tier_of(A) is None
    index.note_host(R1, {A: True})
    assert index.tier_of(A) is Tier.HOST
    assert index.tier_of(B) is None
    index.note_host(R0, {A: False})
    assert index.tier_of(A) is None
    index.note_host(R1, {A: False, C: False})
    assert index.num_host_keys == 1


@pytest.mark.fault("F17", breaks="a save has ended when one rank's has")
def test_a_remote_block_counts_once_all_ranks_stored_it(index: ResidencyIndex) -> None:
    index.note_remote_stored(R0, [A])
    index.note_remote_stored(R0, [A])
    assert not index.is_stored(A, Tier.REMOTE)
    index.note_remote_stored(R1, [A])
    assert index.is_stored(A, Tier.REMOTE)
    assert index.tier_of(A) is Tier.REMOTE
    index.note_remote_stored(R1, [B])
    assert index.tier_of(B) is None


def test_the_nearest_tier_is_named(index: ResidencyIndex) -> None:
    index.confirm_remote([A])
    for rank in (R0, R1):
        index.note_host(rank, {A: True})
    assert index.tier_of(A) is Tier.HOST
    assert index.is_stored(A, Tier.HOST)
    assert index.is_stored(A, Tier.REMOTE)
    index.note_host(R0, {A: False})
    assert index.tier_of(A) is Tier.REMOTE


def test_remote_presence_ages_but_stays_stored(index: ResidencyIndex, clock: FakeClock) -> None:
    index.confirm_remote([A])
    clock.now_s += TTL_S
    assert index.remote_is_fresh(A)
    clock.now_s += 0.001
    assert not index.remote_is_fresh(A)
    assert index.tier_of(A) is None
    assert index.is_stored(A, Tier.REMOTE)
    index.confirm_remote([A])
    assert index.tier_of(A) is Tier.REMOTE


def test_forgetting_takes_every_tier_and_partial_writes(index: ResidencyIndex) -> None:
    for rank in (R0, R1):
        index.note_host(rank, {A: True})
    index.confirm_remote([A])
    index.note_remote_stored(R0, [B])
    index.forget([A, B, C])
    assert index.tier_of(A) is None
    assert not index.is_stored(A, Tier.HOST)
    assert not index.is_stored(A, Tier.REMOTE)
    index.note_remote_stored(R1, [B])
    assert not index.is_stored(B, Tier.REMOTE), "the other rank's write was forgotten"


def test_doubt_is_about_the_remote_store_only(index: ResidencyIndex) -> None:
    for rank in (R0, R1):
        index.note_host(rank, {A: True})
    index.confirm_remote([A])
    index.note_remote_stored(R0, [B])
    index.doubt_remote([A, B])
    assert index.tier_of(A) is Tier.HOST
    assert not index.is_stored(A, Tier.REMOTE)
    index.note_remote_stored(R1, [B])
    assert not index.is_stored(B, Tier.REMOTE), "the other rank's write is in doubt as well"


def test_the_least_recently_confirmed_is_forgotten_first(index: ResidencyIndex) -> None:
    index.confirm_remote(KEYS[:4])
    index.confirm_remote([KEYS[0]])
    index.confirm_remote([KEYS[4]])
    stored = [key for key in KEYS if index.is_stored(key, Tier.REMOTE)]
    assert stored == [KEYS[0], KEYS[2], KEYS[3], KEYS[4]]
    assert index.num_remote_keys == MAX_KEYS


def test_half_written_keys_are_bounded_too(index: ResidencyIndex) -> None:
    index.note_remote_stored(R0, KEYS)
    index.check_integrity()
    index.note_remote_stored(R1, KEYS)
    assert [key for key in KEYS if index.is_stored(key, Tier.REMOTE)] == KEYS[-MAX_KEYS:]


def test_age_is_counted_from_the_last_confirmation(index: ResidencyIndex, clock: FakeClock) -> None:
    assert index.remote_age_s(A) is None
    index.confirm_remote([A])
    clock.now_s += 7
    assert index.remote_age_s(A) == 7
    index.note_seen([A], asked_s=clock.now_s - 2)
    assert index.remote_age_s(A) == 2
    index.note_seen([A], asked_s=clock.now_s - 5)
    assert index.remote_age_s(A) == 2, "an answer that was long on its way"


def test_a_key_confirmed_after_the_question_is_not_gone(
    index: ResidencyIndex, clock: FakeClock
) -> None:
    index.confirm_remote([A, B])
    asked_s = clock.now_s
    clock.now_s += 1
    index.confirm_remote([B])
    for rank in (R0, R1):
        index.note_host(rank, {A: True})
    index.note_remote_stored(R0, [C])
    index.note_gone([A, B, C], asked_s)
    assert not index.is_stored(A, Tier.REMOTE)
    assert index.is_stored(A, Tier.HOST), "the host tier was not asked"
    assert index.is_stored(B, Tier.REMOTE)
    index.note_remote_stored(R1, [C])
    assert index.is_stored(C, Tier.REMOTE), "it was being written when the store was asked"


def test_answers_about_an_older_key_space_mean_nothing(
    index: ResidencyIndex, clock: FakeClock
) -> None:
    asked_s = clock.now_s
    clock.now_s += 1
    index.clear()
    index.note_seen([A], asked_s)
    assert not index.is_stored(A, Tier.REMOTE)
    clock.now_s += 1
    index.note_seen([A], clock.now_s)
    assert index.is_stored(A, Tier.REMOTE)


def test_check_integrity_sees_a_rank_that_does_not_exist(index: ResidencyIndex) -> None:
    index.note_host(Rank(2), {A: True})
    with pytest.raises(IntegrityError, match="host rank masks"):
        index.check_integrity()


def test_check_integrity_sees_a_broken_bound(index: ResidencyIndex, clock: FakeClock) -> None:
    index._remote.update(dict.fromkeys(KEYS, 0.0))
    with pytest.raises(IntegrityError, match="7 remote keys, at most 4"):
        index.check_integrity()


SOME_KEYS = st.lists(st.sampled_from(KEYS), max_size=4)
RANKS = st.integers(0, 2).map(Rank)
AGES_S = st.sampled_from([0.0, 0.5, 1.0, TTL_S])


class Mirror:
    """A listener that knows only what it was told, and is told nothing twice."""

    def __init__(self) -> None:
        self.held: set[tuple[BlockKey, Tier]] = set()

    def changed(self, key: BlockKey, tier: Tier, present: bool) -> None:
        assert ((key, tier) in self.held) != present
        (self.held.add if present else self.held.remove)((key, tier))

    def cleared(self, held: Mapping[Tier, Iterable[BlockKey]]) -> None:
        assert {(key, tier) for tier, keys in held.items() for key in keys} == self.held
        self.held.clear()


class ResidencyMachine(RuleBasedStateMachine):
    """Three ranks. The model: sets of ranks by key, and lists ordered by last mention."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.index = ResidencyIndex(3, MAX_KEYS, TTL_S, self.clock)
        self.mirrors = Mirror(), Mirror()
        for mirror in self.mirrors:
            self.index.listen(mirror)
        self.cleared_s = float("-inf")
        self.host: dict[BlockKey, set[Rank]] = {key: set() for key in KEYS}
        self.confirmed: list[tuple[BlockKey, float]] = []
        self.partial: list[tuple[BlockKey, frozenset[Rank]]] = []

    def confirm_one(self, key: BlockKey, as_of_s: float | None = None) -> None:
        as_of_s = self.clock.now_s if as_of_s is None else as_of_s
        newest_s = max(dict(self.confirmed).get(key, as_of_s), as_of_s)
        self.confirmed = [entry for entry in self.confirmed if entry[0] != key]
        self.confirmed.append((key, newest_s))

    def drop(self, keys: list[BlockKey]) -> None:
        self.confirmed = [entry for entry in self.confirmed if entry[0] not in keys]
        self.partial = [entry for entry in self.partial if entry[0] not in keys]

    @rule(rank=RANKS, changes=st.dictionaries(st.sampled_from(KEYS), st.booleans(), max_size=4))
    def host_report(self, rank: Rank, changes: dict[BlockKey, bool]) -> None:
        self.index.note_host(rank, changes)
        for key, present in changes.items():
            (self.host[key].add if present else self.host[key].discard)(rank)

    @rule(rank=RANKS, keys=SOME_KEYS)
    def remote_stored(self, rank: Rank, keys: list[BlockKey]) -> None:
        self.index.note_remote_stored(rank, keys)
        for key in keys:
            ranks = dict(self.partial).get(key, frozenset()) | {rank}
            self.partial = [entry for entry in self.partial if entry[0] != key]
            if len(ranks) == 3:
                self.confirm_one(key)
            else:
                self.partial.append((key, ranks))
        self.confirmed = self.confirmed[-MAX_KEYS:]
        self.partial = self.partial[-MAX_KEYS:]

    @rule(keys=SOME_KEYS)
    def confirm(self, keys: list[BlockKey]) -> None:
        self.index.confirm_remote(keys)
        for key in keys:
            self.confirm_one(key)
        self.confirmed = self.confirmed[-MAX_KEYS:]

    @rule(keys=SOME_KEYS)
    def forget(self, keys: list[BlockKey]) -> None:
        self.index.forget(keys)
        self.drop(keys)
        for key in keys:
            self.host[key].clear()

    @rule(keys=SOME_KEYS, ago_s=AGES_S)
    def seen(self, keys: list[BlockKey], ago_s: float) -> None:
        asked_s = self.clock.now_s - ago_s
        self.index.note_seen(keys, asked_s)
        for key in keys if asked_s > self.cleared_s else ():
            self.confirm_one(key, asked_s)
        self.confirmed = self.confirmed[-MAX_KEYS:]

    @rule(keys=SOME_KEYS, ago_s=AGES_S)
    def gone(self, keys: list[BlockKey], ago_s: float) -> None:
        asked_s = self.clock.now_s - ago_s
        self.index.note_gone(keys, asked_s)
        self.confirmed = [one for one in self.confirmed if one[0] not in keys or one[1] > asked_s]

    @rule(keys=SOME_KEYS)
    def doubt(self, keys: list[BlockKey]) -> None:
        self.index.doubt_remote(keys)
        self.drop(keys)

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.cleared_s = self.clock.now_s
        self.drop(KEYS)
        for ranks in self.host.values():
            ranks.clear()

    @rule(elapsed_s=st.sampled_from([0.5, TTL_S, TTL_S + 0.5]))
    def sleep(self, elapsed_s: float) -> None:
        self.clock.now_s += elapsed_s

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.index.check_integrity()
        confirmed = dict(self.confirmed)
        assert self.index.num_remote_keys == len(confirmed) <= MAX_KEYS
        assert self.index.num_host_keys == sum(1 for ranks in self.host.values() if ranks)
        for key in KEYS:
            in_host = len(self.host[key]) == 3
            fresh = key in confirmed and self.clock.now_s - confirmed[key] <= TTL_S
            assert self.index.is_stored(key, Tier.HOST) == in_host
            assert self.index.is_stored(key, Tier.REMOTE) == (key in confirmed)
            assert self.index.remote_is_fresh(key) == fresh
            expected = Tier.HOST if in_host else Tier.REMOTE if fresh else None
            assert self.index.tier_of(key) is expected
            age_s = self.clock.now_s - confirmed[key] if key in confirmed else None
            assert self.index.remote_age_s(key) == age_s
            for mirror in self.mirrors:
                assert ((key, Tier.HOST) in mirror.held) == in_host
                assert ((key, Tier.REMOTE) in mirror.held) == (key in confirmed)


TestResidencyMachine = ResidencyMachine.TestCase
TestResidencyMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
