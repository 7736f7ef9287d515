"""SharedClaims against a plain multiset."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from spm.errors import IntegrityError
from spm.sam.shared_claims import SharedClaims
from spm.sam.zones import PROTECTED, Claim, Zone, claim_target, claim_zone, make_claim, target_tick

CLAIMS = st.builds(
    lambda zone, tick, tenant: make_claim(zone, tick if zone in PROTECTED else 0, tenant),
    st.sampled_from([Zone.ORDINARY, Zone.ASSOCIATED, Zone.LATER, Zone.SOON]),
    st.integers(1, 6),
    st.integers(0, 1),
)


class SharedClaimsMachine(RuleBasedStateMachine):
    @initialize(first=CLAIMS)
    def start(self, first: Claim) -> None:
        self.shared = SharedClaims(first)
        self.counts = Counter([first])
        self.now = 0

    @rule(claim=CLAIMS)
    def add(self, claim: Claim) -> None:
        self.shared.add(claim)
        self.counts[claim] += 1

    @rule(claim=CLAIMS)
    def discard(self, claim: Claim) -> None:
        """The last one is never discarded: then there is no such object any more."""
        if self.counts.total() > 1 or not self.counts[claim]:
            assert self.shared.discard(claim) == (self.counts[claim] > 0)
            self.counts -= Counter([claim])

    @rule(ticks=st.integers(0, 2))
    def pass_time(self, ticks: int) -> None:
        self.now += ticks

    @rule()
    def best(self) -> None:
        live = [
            claim
            for claim in self.counts
            if claim_zone(claim) not in PROTECTED or target_tick(claim_target(claim)) > self.now
        ]
        assert self.shared.best(self.now) == max(live, default=None)

    @invariant()
    def counted(self) -> None:
        if not hasattr(self, "shared"):
            return
        self.shared.check_integrity(self.counts.total())
        with pytest.raises(IntegrityError):
            self.shared.check_integrity(self.counts.total() + 1)
        assert len(self.shared) == len(self.counts)
        assert len(self.shared._heap or ()) <= 2 * len(self.counts) + 8
        if len(self.counts) == 1:
            assert self.shared.only() == next(iter(self.counts))
        else:
            with pytest.raises(ValueError, match="unpack"):
                self.shared.only()


TestSharedClaimsMachine = SharedClaimsMachine.TestCase
TestSharedClaimsMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


def test_the_heap_stays_in_proportion_to_the_claims_whatever_comes_and_goes() -> None:
    lowest = make_claim(Zone.ASSOCIATED)
    shared = SharedClaims(make_claim(Zone.SOON, 1 << 30))
    for tick in range(1, 1000):
        shared.add(make_claim(Zone.LATER, tick))
        if tick % 3:
            shared.discard(make_claim(Zone.LATER, tick))
        assert len(shared._heap or ()) <= 2 * len(shared) + 8
    shared.add(lowest)
    for tick in range(3, 1000, 3):
        assert shared.discard(make_claim(Zone.LATER, tick))
        assert len(shared._heap or ()) <= 2 * len(shared) + 8
    assert shared.discard(make_claim(Zone.SOON, 1 << 30))
    assert shared.best(0) == shared.only() == lowest
