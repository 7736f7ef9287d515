"""Who is the strongest of those that share a block, against looking at all of them."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spm.sam import holders
from spm.sam.endings import Endings
from spm.sam.holders import Reservation, Sharing
from spm.sam.zones import ASSOCIATED, ORDINARY, Target, Zone, target_of

TARGETS = st.sampled_from(
    [
        ORDINARY,
        ASSOCIATED,
        *(target_of(zone, t) for zone in (Zone.LATER, Zone.SOON) for t in (3, 9)),
    ]
)


class SharingMachine(RuleBasedStateMachine):
    @initialize(first=TARGETS, few=st.sampled_from([0, 2, 64]))
    def start(self, first: Target, few: int) -> None:
        self.few, holders._FEW = holders._FEW, few  # with and without a heap
        self.members = [Reservation(first, 0)]
        self.sharing = Sharing(self.members)
        self.gone: list[Reservation] = []

    def teardown(self) -> None:
        if hasattr(self, "few"):
            holders._FEW = self.few

    @rule(said=TARGETS)
    def join(self, said: Target) -> None:
        self.members.append(Reservation(said, 0))
        self.sharing.add(self.members[-1])

    @precondition(lambda self: self.members)
    @rule(data=st.data(), said=TARGETS)
    def say_something_else(self, data: st.DataObject, said: Target) -> None:
        member = data.draw(st.sampled_from(self.members))
        member.target = said
        self.sharing.add(member)

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(self.members))
        self.members.remove(member)
        assert self.sharing.discard(member)
        self.gone.append(member)

    @precondition(lambda self: self.gone)
    @rule()
    def leave_again(self) -> None:
        assert not self.sharing.discard(self.gone[-1])

    @invariant()
    def the_strongest_is_known(self) -> None:
        best = self.sharing.best()
        assert (best and best.target) == max((m.target for m in self.members), default=None)
        assert best is None or best in self.members
        heap = self.sharing._heap
        assert heap is None or len(heap) <= 2 * len(self.members) + 8
        self.sharing.check_integrity()


TestSharingMachine = SharingMachine.TestCase
TestSharingMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_reservations_end_at_their_tick_and_only_those_that_protect() -> None:
    endings = Endings()
    soon, later, never = (
        Reservation(target, 0)
        for target in (target_of(Zone.SOON, 5), target_of(Zone.LATER, 7), ASSOCIATED)
    )
    for one in (soon, later, never):
        endings.add(one)
    assert endings.due(4) == []
    assert endings.due(5) == [soon]
    assert endings.due(900) == [soon, later]
    for one in (soon, later, never):
        endings.remove(one)
        endings.remove(one)
    assert endings.due(900) == []
