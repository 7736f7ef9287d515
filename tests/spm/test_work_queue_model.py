"""The work queue under calls in any order, against a list of entries searched from end to end."""

import math
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from spm.work import WorkClass
from spm.work_queue import NO_DEADLINE_S, ClassLimits, Offer, Work, WorkQueue
from tests.clock import FakeClock
from tracker.ids import BlockHash, BlockKey, GroupId, make_block_key

LOAD = WorkClass.LOAD
LIMITS = {work_class: ClassLimits(3, 8 + 4 * work_class) for work_class in WorkClass}
SHARE = 0.4
KEYS = [make_block_key(BlockHash(bytes([i]) * 4), GroupId(0)) for i in range(6)]
CLASSES = st.sampled_from(list(WorkClass))
KEY = st.sampled_from(KEYS)
SIZES = st.integers(1, 20)
OWNERS = st.sampled_from(["one", "two", "three", None])
WAITS = st.one_of(st.just(NO_DEADLINE_S), st.sampled_from([-1.0, 0.0, 0.5, 3.0, 5000.0]))
IDENTITY = {
    WorkClass.LOAD: "in",
    WorkClass.PREFETCH: "in",
    WorkClass.SAVE: "out",
    WorkClass.OFFLOAD: "out",
    WorkClass.KEEP_ALIVE: "keep",
    WorkClass.DELETE: "delete",
}


@dataclass
class Entry:
    work_class: WorkClass
    key: BlockKey
    size_bytes: int
    payload: int
    deadline_s: float = NO_DEADLINE_S
    owners: set[str | None] = field(default_factory=set)

    def is_alike(self, work_class: WorkClass, key: BlockKey) -> bool:
        return (IDENTITY[self.work_class], self.key) == (IDENTITY[work_class], key)

    def is_work(self, work: Work[int, str | None]) -> bool:
        mine = (self.work_class, self.key, self.size_bytes, self.payload, self.owners)
        return mine == (work.work_class, work.key, work.size_bytes, work.payload, work.owners)


class WorkQueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.queue: WorkQueue[int, str | None] = WorkQueue(LIMITS, SHARE, self.clock)
        self.waiting: list[Entry] = []  # in the order in which each joined its class
        self.flying: list[Entry] = []  # the same entry as often as it is in flight
        self.payload = 0

    def next_payload(self) -> int:
        self.payload += 1
        return self.payload

    def waiting_in(self, work_class: WorkClass) -> list[Entry]:
        return [entry for entry in self.waiting if entry.work_class is work_class]

    def move_up(self, entry: Entry, work_class: WorkClass) -> bool:
        full = len(self.waiting_in(work_class)) == LIMITS[work_class].max_waiting
        if work_class >= entry.work_class or full:
            return False
        self.waiting.remove(entry)
        entry.work_class = work_class
        self.waiting.append(entry)
        return True

    def same(self, entries: list[Entry], works: list[Work[int, str | None]]) -> None:
        assert len(entries) == len(works)
        assert all(entry.is_work(work) for entry, work in zip(entries, works, strict=True))

    @rule(work_class=CLASSES, key=KEY, size_bytes=SIZES, owner=OWNERS, wait_s=WAITS)
    def offer(
        self, work_class: WorkClass, key: BlockKey, size_bytes: int, owner: str, wait_s: float
    ) -> None:
        payload, deadline_s = self.next_payload(), self.clock.now_s + wait_s
        got = self.queue.offer(work_class, key, size_bytes, payload, owner, deadline_s)
        flying = [entry for entry in self.flying if entry.is_alike(work_class, key)]
        alike = [entry for entry in self.waiting if entry.is_alike(work_class, key)]
        if flying:
            assert got is Offer.COALESCED
            strongest = min(flying, key=lambda entry: entry.work_class)
            strongest.owners.add(owner)
        elif alike:
            assert got is Offer.COALESCED
            entry = alike[0]
            entry.size_bytes, entry.payload = size_bytes, payload
            entry.deadline_s = max(entry.deadline_s, deadline_s)
            entry.owners.add(owner)
            self.move_up(entry, work_class)
        elif len(self.waiting_in(work_class)) == LIMITS[work_class].max_waiting:
            assert got is Offer.REJECTED
        else:
            assert got is Offer.ACCEPTED
            entry = Entry(work_class, key, size_bytes, payload, deadline_s, {owner})
            self.waiting.append(entry)

    @rule(work_class=CLASSES, key=KEY, size_bytes=SIZES, owner=OWNERS)
    def start(self, work_class: WorkClass, key: BlockKey, size_bytes: int, owner: str) -> None:
        payload = self.next_payload()
        work = self.queue.start(work_class, key, size_bytes, payload, owner)
        entry = Entry(work_class, key, size_bytes, payload, owners={owner})
        for other in [other for other in self.waiting if other.is_alike(work_class, key)]:
            self.waiting.remove(other)
            entry.owners |= other.owners
        for other in self.flying:
            if (other.work_class, other.key) == (work_class, key):
                entry = other
                entry.owners.add(owner)
        self.flying.append(entry)
        self.same([entry], [work])

    @rule(owner=OWNERS)
    def cancel(self, owner: str | None) -> None:
        got = self.queue.cancel(owner)
        gone = []
        for entry in self.waiting + self.flying:
            if owner in entry.owners:
                entry.owners.discard(owner)
                if not entry.owners and entry in self.waiting:
                    gone.append(entry)
        self.waiting = [entry for entry in self.waiting if entry not in gone]
        by_payload = sorted(gone, key=lambda entry: entry.payload)
        self.same(by_payload, sorted(got, key=lambda work: work.payload))

    @rule(keys=st.lists(KEY, max_size=4), work_class=CLASSES)
    def promote(self, keys: list[BlockKey], work_class: WorkClass) -> None:
        moved = 0
        for key in keys:
            for entry in list(self.waiting):
                if entry.is_alike(work_class, key):
                    moved += self.move_up(entry, work_class)
        assert self.queue.promote(keys, work_class) == moved

    @rule()
    def take(self) -> None:
        works = self.queue.take()
        taken = []
        for entry in sorted(self.waiting, key=lambda entry: entry.work_class):
            same_class = [e for e in self.flying if e.work_class is entry.work_class]
            after = sum(e.size_bytes for e in same_class) + entry.size_bytes
            head = next(e for e in self.waiting_in(entry.work_class) if e not in taken)
            if head is not entry:
                continue  # one before it in its class did not go
            if same_class and after > LIMITS[entry.work_class].max_inflight_bytes:
                continue
            others = [e for e in self.flying if e.work_class is not LOAD]
            loads = [e for e in self.flying if e.work_class is LOAD]
            if entry.work_class is not LOAD and loads and others:
                after = sum(e.size_bytes for e in others) + entry.size_bytes
                if after > SHARE * (sum(e.size_bytes for e in loads) + after):
                    break
            self.flying.append(entry)
            taken.append(entry)
        self.waiting = [entry for entry in self.waiting if entry not in taken]
        self.same(taken, works)

    @rule(work_class=CLASSES, key=KEY)
    def done(self, work_class: WorkClass, key: BlockKey) -> None:
        work = self.queue.done(work_class, key)
        known = [e for e in self.flying if (e.work_class, e.key) == (work_class, key)]
        if known:
            self.flying.remove(known[0])
        if len(known) == 1:
            assert work is not None
            self.same(known, [work])
        else:
            assert work is None

    @rule(work_class=CLASSES)
    def clear(self, work_class: WorkClass) -> None:
        self.same(self.waiting_in(work_class), self.queue.clear_waiting(work_class))
        self.waiting = [entry for entry in self.waiting if entry.work_class is not work_class]

    @rule(elapsed_s=st.sampled_from([0.0, 0.5, 1.25, 4.0, 10_000.0]))
    def sleep_and_expire(self, elapsed_s: float) -> None:
        self.clock.now_s += elapsed_s
        got = self.queue.expire()
        due = []
        for entry in self.waiting:
            if entry.deadline_s < NO_DEADLINE_S and math.ceil(entry.deadline_s) <= self.clock.now_s:
                due.append(entry)
        self.waiting = [entry for entry in self.waiting if entry not in due]
        by_payload = sorted(due, key=lambda entry: entry.payload)
        self.same(by_payload, sorted(got, key=lambda work: work.payload))

    @rule()
    def run_dry(self) -> None:
        """Whatever state it is in, everything that waits goes once what flies lands."""
        for _ in range(len(self.waiting) + 1):
            for entry in list(self.flying):
                self.done(entry.work_class, entry.key)
            self.take()
        assert not self.waiting, "starved with nothing else in flight"

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.queue.check_integrity()
        assert self.queue.busy == bool(self.waiting or self.flying)
        for work_class in WorkClass:
            flying = [entry for entry in self.flying if entry.work_class is work_class]
            assert self.queue.num_waiting(work_class) == len(self.waiting_in(work_class))
            assert self.queue.num_waiting(work_class) <= LIMITS[work_class].max_waiting
            assert self.queue.num_inflight(work_class) == len(flying)
            assert self.queue.inflight_bytes(work_class) == sum(e.size_bytes for e in flying)
            for key in KEYS:
                waits = any(entry.is_alike(work_class, key) for entry in self.waiting)
                flies = any(entry.is_alike(work_class, key) for entry in self.flying)
                assert self.queue.is_waiting(work_class, key) == waits
                assert self.queue.is_in_flight(work_class, key) == flies


TestWorkQueueMachine = WorkQueueMachine.TestCase
TestWorkQueueMachine.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
