"""Tier events, as a KV-aware router reads them."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)

from connectors.kv_events import TierEvents
from spm.keys import Rank
from spm.residency import ResidencyIndex, Tier
from tests.clock import FakeClock
from tracker.ids import BlockHash, BlockKey, GroupId, make_block_key

KEYS = [make_block_key(BlockHash(bytes([i]) * 32), GroupId(i % 2)) for i in range(8)]
MEDIUMS = {Tier.HOST: MEDIUM_CPU, Tier.REMOTE: MEDIUM_STORAGE}
MAX_TAKEN = 3
Place = tuple[str | None, int | None, object]


def place_of(key: BlockKey, tier: Tier) -> Place:
    return MEDIUMS[tier], int.from_bytes(key[-4:], "big"), key[:-4]


class Router:
    """Believes what it is told."""

    def __init__(self) -> None:
        self.believed: set[Place] = set()

    def read(self, events: list[KVCacheEvent]) -> int:
        """Returns how many changes that were."""
        changes = 0
        for event in events:
            assert isinstance(event, BlockStored | BlockRemoved)
            places = {(event.medium, event.group_idx, one) for one in event.block_hashes}
            if isinstance(event, BlockStored):
                self.believed |= places
            else:
                self.believed -= places
            changes += len(event.block_hashes)
        return changes


@pytest.fixture(autouse=True)
def _whole_block_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


def test_events_have_the_shape_of_vllms_offloading_connector() -> None:
    events = TierEvents(enabled=True)
    events.changed(KEYS[1], Tier.HOST, True)
    events.changed(KEYS[2], Tier.REMOTE, True)
    host, remote = events.take()
    assert isinstance(host, BlockStored)
    assert isinstance(remote, BlockStored)
    assert (host.block_hashes, host.medium, host.group_idx) == ([bytes([1]) * 32], "CPU", 1)
    assert (host.token_ids, host.block_size, host.parent_block_hash) == ([], 0, None)
    assert (remote.medium, remote.locality, host.locality) == ("STORAGE", "REMOTE", "LOCAL")
    for key in KEYS[3:6]:
        events.changed(key, Tier.REMOTE, False)
    gone = [event for event in events.take() if isinstance(event, BlockRemoved)]
    assert [(e.group_idx, len(e.block_hashes), e.medium) for e in gone] == [
        (1, 2, "STORAGE"),
        (0, 1, "STORAGE"),
    ]
    assert events.take() == []


def test_block_hashes_are_integers_if_vllms_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    events = TierEvents(enabled=True)
    events.changed(KEYS[1], Tier.HOST, True)
    (stored,) = events.take()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == [int.from_bytes(bytes([1]) * 8, "big")]


def test_disabled_keeps_nothing() -> None:
    events = TierEvents(enabled=False)
    events.changed(KEYS[0], Tier.HOST, True)
    events.cleared({Tier.HOST: KEYS, Tier.REMOTE: KEYS})
    assert events.take() == []


def test_there_and_back_is_not_told() -> None:
    events = TierEvents(enabled=True)
    events.changed(KEYS[0], Tier.HOST, True)
    events.changed(KEYS[0], Tier.REMOTE, True)
    events.changed(KEYS[0], Tier.HOST, False)
    assert len(events.take()) == 1
    events.changed(KEYS[0], Tier.REMOTE, False)
    events.changed(KEYS[0], Tier.REMOTE, True)
    assert events.take() == []


def test_much_is_told_in_parts_and_beyond_the_bound_the_oldest_is_lost() -> None:
    events, router = TierEvents(enabled=True, max_pending=6, max_taken=4), Router()
    for key in KEYS:
        events.changed(key, Tier.HOST, True)
    router.read(events.take())
    assert router.believed == {place_of(key, Tier.HOST) for key in KEYS[2:6]}
    router.read(events.take())
    assert router.believed == {place_of(key, Tier.HOST) for key in KEYS[2:]}
    assert events.take() == []


def test_after_a_reset_all_is_told_gone_before_anything_new() -> None:
    index = ResidencyIndex(1, 100, 10.0, FakeClock())
    events, router = TierEvents(enabled=True, max_taken=3), Router()
    index.listen(events)
    index.confirm_remote(KEYS[:5])
    for _ in range(2):
        router.read(events.take())
    assert len(router.believed) == 5
    index.forget(KEYS[:1])
    index.clear()
    index.confirm_remote(KEYS[4:6])
    router.read(events.take())
    assert router.believed == {place_of(key, Tier.REMOTE) for key in KEYS[3:5]}
    index.clear()
    index.confirm_remote(KEYS[3:4])
    router.read(events.take())
    assert router.believed == {place_of(KEYS[3], Tier.REMOTE)}


class TierEventsMachine(RuleBasedStateMachine):
    """What the router believes is what the index knows, once all is told."""

    def __init__(self) -> None:
        super().__init__()
        self.index = ResidencyIndex(2, 6, 10.0, FakeClock())
        self.events = TierEvents(enabled=True, max_taken=MAX_TAKEN)
        self.index.listen(self.events)
        self.router = Router()

    @rule(
        rank=st.integers(0, 1).map(Rank),
        changes=st.dictionaries(st.sampled_from(KEYS), st.booleans(), max_size=4),
    )
    def host(self, rank: Rank, changes: dict[BlockKey, bool]) -> None:
        self.index.note_host(rank, changes)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def confirm(self, keys: list[BlockKey]) -> None:
        self.index.confirm_remote(keys)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def forget(self, keys: list[BlockKey]) -> None:
        self.index.forget(keys)

    @rule()
    def clear(self) -> None:
        self.index.clear()

    @rule()
    def step(self) -> None:
        taken = self.events.take()
        assert self.router.read(taken) <= MAX_TAKEN

    @rule()
    def be_told_all(self) -> None:
        while taken := self.events.take():
            self.router.read(taken)
        known = {
            place_of(key, tier) for key in KEYS for tier in Tier if self.index.is_stored(key, tier)
        }
        assert self.router.believed == known


TestTierEventsMachine = TierEventsMachine.TestCase
TestTierEventsMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
