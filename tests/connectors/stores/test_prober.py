"""The prober: a small question with a deadline, and whatever it meets, it goes on."""

import threading
import time
from dataclasses import replace

import pytest

from connectors.stores.prober import StoreProber, remote_breaker
from connectors.stores.tiered import TieredStore
from spm.breaker import CircuitBreaker
from spm.config import SpmConfig
from spm.errors import StoreRefusedError, StoreUnavailableError
from spm.metrics import Counters
from spm.remote_config import BreakerConfig, RemoteConfig
from tests.clock import FakeClock
from tests.connectors.scheduler.scripted_store import PATIENCE_S, Call, Gate, ScriptedStore

CONFIG = SpmConfig(
    namespace="ours",
    lookup_deadline_s=0.25,
    batch_deadline_s=2.0,
    remote=RemoteConfig(
        "redis://unused", connect_timeout_s=1.0, breaker=BreakerConfig(1, 0.01, 0.02)
    ),
)


class Site:
    """A prober without a thread: it probes when a test says so."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.counters = Counters()
        self.store = ScriptedStore()
        self.breaker = remote_breaker(CONFIG, self.clock, Counters(), "worker")
        self.prober = StoreProber(self.store, self.breaker, CONFIG, self.counters, self.clock)

    def probe(self) -> str:
        """Returns the breaker's state after one probe."""
        if self.breaker.allow():
            self.breaker.record_failure()
        self.clock.now_s += 1.0
        assert self.prober.probe_if_due()
        return self.breaker.state.value


@pytest.fixture
def site() -> Site:
    return Site()


def test_while_the_breaker_is_closed_the_store_is_not_asked(site: Site) -> None:
    site.clock.now_s += 1000.0
    assert not site.prober.probe_if_due()
    assert site.store.calls == []


def test_a_probe_asks_for_one_key_of_our_namespace_that_nobody_has(site: Site) -> None:
    assert site.probe() == "closed"
    assert site.store.calls == [Call("contains", ("ours:probe",))]  # type: ignore[arg-type]
    assert site.store.deadlines_s == [site.clock.now_s + 1.0]


def test_a_store_of_others_may_take_as_long_for_a_probe_as_for_its_work() -> None:
    """Catches a store that does all it is asked to within its deadline, and is never asked
    again because it misses a lookup's, which it has none of."""
    clock, store = FakeClock(), ScriptedStore()
    config = replace(CONFIG, remote=None)
    breaker = remote_breaker(config, clock, Counters(), "worker")
    breaker.trip()
    clock.now_s += 1.0

    def slowly(call: Call) -> None:
        clock.now_s += 0.9 * config.batch_deadline_s

    store.before = slowly
    assert StoreProber(store, breaker, config, Counters(), clock).probe_if_due()
    assert breaker.allow()


@pytest.mark.parametrize("failure", [StoreUnavailableError("down"), StoreRefusedError("no")])
def test_a_store_that_does_not_answer_is_left_alone(
    site: Site, failure: StoreUnavailableError
) -> None:
    site.store.failure = failure
    assert site.probe() == "open"
    site.store.failure = None
    assert site.probe() == "closed"


def test_an_answer_after_the_deadline_is_none(site: Site) -> None:
    def late(call: Call) -> None:
        site.clock.now_s += 1.0

    site.store.before = late
    assert site.probe() == "open"


def test_a_bug_in_a_store_is_counted_and_costs_no_thread(site: Site) -> None:
    def broken(call: Call) -> None:
        raise ZeroDivisionError

    site.store.before = broken
    assert site.probe() == "open"
    assert site.counters.drain() == {"spm:internal_errors|prober": 1}
    site.store.before = lambda call: None
    assert site.probe() == "closed"


def until_it_answers(breaker: CircuitBreaker) -> None:
    """Nothing but its state tells that a probe has been answered."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not breaker.allow():
        assert time.monotonic() < give_up_s
        time.sleep(0)


def test_its_thread_probes_until_the_store_answers() -> None:
    store = ScriptedStore()
    breaker = remote_breaker(CONFIG, time.monotonic, Counters(), "worker")
    tiered = TieredStore(None, store, breaker)
    prober = tiered.start_prober(CONFIG, Counters())
    failures = [StoreUnavailableError("down")] * 3

    def fail_thrice(call: Call) -> None:
        if failures:
            raise failures.pop()

    store.before = fail_thrice
    breaker.trip()
    until_it_answers(breaker)
    assert [call.method for call in store.calls] == ["contains"] * 4
    prober.close()
    tiered.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "spm-probe"]


def test_closing_waits_for_the_probe_under_way() -> None:
    store = ScriptedStore()
    gate = store.gate = Gate()
    breaker = remote_breaker(CONFIG, time.monotonic, Counters(), "worker")
    prober = StoreProber(store, breaker, CONFIG, Counters())
    prober.start()
    breaker.trip()
    assert gate.entered.wait(PATIENCE_S)
    closing = threading.Thread(target=prober.close)
    closing.start()
    gate.opened.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    prober.close()
    assert len(store.calls) == 1
