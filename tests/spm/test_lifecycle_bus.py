"""The bus: numbered records, only when somebody listens, whatever a subscriber does."""

from spm.lifecycle import MAX_KEYS, LifecycleKind, LifecycleRecord, decode_event, encode_event
from spm.lifecycle_bus import LifecycleBus
from spm.metrics import Counters, Metric, metric_key
from spm.residency import Tier
from tests.clock import FakeClock
from tracker.ids import BlockHash, GroupId, SessionId, SessionRef, TenantId, make_block_key

REF = SessionRef(TenantId("t"), SessionId("s"))
FREED = LifecycleKind.SESSION_FREED


class Bench:
    """A bus with a wall clock and what one subscriber got."""

    def __init__(self) -> None:
        self.clock = FakeClock(1_000.5)
        self.counters = Counters()
        self.bus = LifecycleBus("e0", self.counters, self.clock)
        self.got: list[LifecycleRecord] = []


def test_a_subscriber_gets_what_happens_from_then_on() -> None:
    bench = Bench()
    bench.bus.publish(FREED, REF)
    assert not bench.bus.active
    unsubscribe = bench.bus.subscribe(bench.got.append)
    assert bench.bus.active
    bench.bus.publish(LifecycleKind.SESSION_OPENED, REF, parent=SessionId("p"))
    bench.clock.now_s += 1
    bench.bus.publish(FREED, REF)
    unsubscribe()
    bench.bus.publish(FREED, REF)
    unsubscribe()
    assert bench.got == [
        LifecycleRecord(
            1,
            "e0",
            1_000.5,
            LifecycleKind.SESSION_OPENED,
            REF.tenant,
            REF.session_id,
            SessionId("p"),
        ),
        LifecycleRecord(2, "e0", 1_001.5, FREED, REF.tenant, REF.session_id),
    ]
    assert not bench.bus.active


def test_many_keys_are_several_records() -> None:
    bench = Bench()
    bench.bus.subscribe(bench.got.append)
    keys = [make_block_key(BlockHash(bytes([i % 256, i >> 8])), GroupId(0)) for i in range(1100)]
    bench.bus.publish(LifecycleKind.BLOCKS_SAVED, keys=keys, tier=Tier.HOST)
    assert [len(record.keys) for record in bench.got] == [MAX_KEYS, MAX_KEYS, 1100 - 2 * MAX_KEYS]
    assert [key for record in bench.got for key in record.keys] == keys
    assert [record.seq for record in bench.got] == [1, 2, 3]
    assert all(decode_event(encode_event(record)) == record for record in bench.got)


def test_a_subscriber_that_raises_is_counted_and_goes_on_being_told() -> None:
    bench = Bench()
    calls: list[int] = []

    def fails_once(record: LifecycleRecord) -> None:
        calls.append(record.seq)
        if len(calls) == 1:
            raise OSError("no room")

    bench.bus.subscribe(fails_once)
    bench.bus.subscribe(bench.got.append)
    bench.bus.publish(FREED, REF)
    bench.bus.publish(FREED, REF)
    assert calls == [1, 2]
    assert len(bench.got) == 2, "nor does it harm the others"
    key = metric_key(Metric.INTERNAL_ERRORS, "subscriber")
    assert bench.counters.drain() == {key: 1}


def test_one_may_unsubscribe_while_it_is_told() -> None:
    bench = Bench()

    def once(record: LifecycleRecord) -> None:
        bench.got.append(record)
        unsubscribe()

    unsubscribe = bench.bus.subscribe(once)
    others: list[LifecycleRecord] = []
    bench.bus.subscribe(others.append)
    bench.bus.publish(FREED, REF)
    bench.bus.publish(FREED, REF)
    assert len(bench.got) == 1
    assert len(others) == 2
