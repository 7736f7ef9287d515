"""The circuit breaker, on a clock that only moves when told."""

import logging
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spm.breaker import BreakerState, CircuitBreaker
from tests.clock import FakeClock

FAILURES, BACKOFF_S, CAP_S = 3, 1.0, 5.0
PATIENCE_S = 10.0
"""Only a broken test waits this long."""


def highest() -> float:
    """No jitter: every pause has its full length."""
    return 1.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def make(
    clock: FakeClock,
    uniform: Callable[[], float] = highest,
    on_open: Callable[[], None] = lambda: None,
) -> CircuitBreaker:
    return CircuitBreaker(
        failures=FAILURES,
        backoff_s=BACKOFF_S,
        backoff_cap_s=CAP_S,
        clock=clock,
        uniform=uniform,
        on_open=on_open,
    )


def state_of(breaker: CircuitBreaker) -> str:
    return breaker.state.value


def fail(breaker: CircuitBreaker, times: int = FAILURES) -> None:
    for _ in range(times):
        assert breaker.allow()
        breaker.record_failure()


def probe(breaker: CircuitBreaker, clock: FakeClock, *, answered: bool) -> float:
    """Let time pass until a probe is due, make it, and return the pause before it."""
    pause_s = breaker.next_probe_s - clock.now_s
    clock.now_s += pause_s
    assert breaker.begin_probe()
    breaker.end_probe(answered=answered)
    return pause_s


def test_only_consecutive_failures_open_it(clock: FakeClock) -> None:
    breaker = make(clock)
    fail(breaker, 2)
    breaker.record_success()
    fail(breaker, 2)
    assert state_of(breaker) == "closed"
    fail(breaker, 1)
    assert state_of(breaker) == "open"
    assert not breaker.allow()


def test_no_call_passes_until_a_probe_was_answered(clock: FakeClock) -> None:
    """Catches a breaker whose probe is an ordinary request, which has to wait."""
    breaker = make(clock)
    fail(breaker)
    clock.now_s += 0.99
    assert not breaker.begin_probe()
    clock.now_s += 0.01
    assert not breaker.allow()
    assert breaker.begin_probe()
    assert state_of(breaker) == "half_open"
    assert not breaker.begin_probe(), "one at a time"
    assert not breaker.allow()
    breaker.end_probe(answered=True)
    assert state_of(breaker) == "closed"
    assert breaker.allow()
    assert not breaker.begin_probe(), "there is nothing to find out"


def test_pauses_double_up_to_the_cap(clock: FakeClock) -> None:
    breaker = make(clock)
    fail(breaker)
    pauses = [probe(breaker, clock, answered=False) for _ in range(6)]
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0]


def test_a_store_that_answers_probes_only_is_asked_ever_less_often(clock: FakeClock) -> None:
    """Catches a breaker that starts over with each probe, and so never rests."""
    breaker, pauses = make(clock), []
    for _ in range(5):
        breaker.record_success()  # small calls may well succeed
        fail(breaker)
        pauses.append(probe(breaker, clock, answered=True))
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_store_that_has_worked_for_a_while_starts_over(clock: FakeClock) -> None:
    breaker = make(clock)
    for _ in range(4):
        fail(breaker)
        probe(breaker, clock, answered=True)
    clock.now_s += 10 * CAP_S
    breaker.record_success()  # nobody had used it in between
    fail(breaker)
    assert probe(breaker, clock, answered=True) == CAP_S
    breaker.record_success()
    clock.now_s += CAP_S
    fail(breaker)
    assert probe(breaker, clock, answered=True) == BACKOFF_S


def test_late_reports_do_not_move_a_breaker_that_is_not_closed(clock: FakeClock) -> None:
    breaker = make(clock)
    fail(breaker)
    for expected in ("open", "half_open"):
        due_s = breaker.next_probe_s
        breaker.record_success()
        breaker.record_failure()
        breaker.trip()
        assert (state_of(breaker), breaker.next_probe_s) == (expected, due_s)
        clock.now_s += 1.0
        breaker.begin_probe()
    breaker.end_probe(answered=False)
    assert state_of(breaker) == "open"


def test_jitter_shortens_pauses_by_at_most_half(clock: FakeClock) -> None:
    breaker = make(clock, uniform=lambda: 0.0)
    fail(breaker)
    assert probe(breaker, clock, answered=False) == 0.5


def test_many_pauses_do_not_overflow(clock: FakeClock) -> None:
    breaker = make(clock)
    fail(breaker)
    for _ in range(3000):
        assert probe(breaker, clock, answered=False) <= CAP_S


def test_tripping_opens_at_once(clock: FakeClock) -> None:
    breaker = make(clock)
    breaker.record_success()
    breaker.trip()
    assert not breaker.allow()
    assert probe(breaker, clock, answered=True) == BACKOFF_S
    assert breaker.allow()


def test_it_is_told_and_counted_once_each_time(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    opened: list[str] = []
    breaker = make(clock, on_open=lambda: opened.append(state_of(breaker)))
    with caplog.at_level(logging.INFO):
        fail(breaker)
        for _ in range(4):
            probe(breaker, clock, answered=False)
        probe(breaker, clock, answered=True)
        breaker.trip()
    assert opened == ["open", "open"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]


def test_whoever_waits_for_probes_is_woken_when_it_opens_and_when_it_retires() -> None:
    breaker = CircuitBreaker(failures=1, backoff_s=0.01, backoff_cap_s=0.01)
    begun, answers = threading.Semaphore(0), [False, True]

    def prober() -> None:
        while breaker.await_probe():
            breaker.end_probe(answered=answers.pop(0))
            begun.release()

    thread = threading.Thread(target=prober)
    thread.start()
    breaker.record_failure()
    assert begun.acquire(timeout=PATIENCE_S)
    assert begun.acquire(timeout=PATIENCE_S)
    assert breaker.allow()
    breaker.retire()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    breaker.record_failure()
    assert not breaker.await_probe(), "also while a probe would be due"


@pytest.mark.parametrize("answered", [True, False])
def test_a_suspect_is_probed_while_calls_go_on(clock: FakeClock, answered: bool) -> None:
    """Catches a store that is left alone because somebody could not wait for it."""
    opened: list[float] = []
    breaker = make(clock, on_open=lambda: opened.append(clock.now_s))
    breaker.suspect()
    assert breaker.allow()
    assert breaker.begin_probe()
    breaker.suspect()
    assert not breaker.begin_probe(), "one at a time"
    assert breaker.allow()
    breaker.end_probe(answered=answered)
    assert breaker.allow() == answered
    assert len(opened) == (not answered)
    if not answered:
        assert probe(breaker, clock, answered=True) == BACKOFF_S
    assert not breaker.begin_probe(), "there is nothing to find out"
    breaker.suspect()
    assert breaker.begin_probe(), "another suspicion"


def test_an_answer_to_a_suspicion_does_not_close_what_failures_have_opened(
    clock: FakeClock,
) -> None:
    breaker = make(clock)
    breaker.suspect()
    assert breaker.begin_probe()
    fail(breaker)
    breaker.suspect()
    breaker.end_probe(answered=True)
    assert state_of(breaker) == "open"
    assert probe(breaker, clock, answered=True) == BACKOFF_S


def test_a_prober_that_waits_is_woken_by_a_suspicion(clock: FakeClock) -> None:
    breaker = make(clock)
    begun: list[bool] = []
    thread = threading.Thread(target=lambda: begun.append(breaker.await_probe()))
    thread.start()
    breaker.suspect()
    thread.join(PATIENCE_S)
    assert begun == [True]


class Model:
    """What is promised, as naively as possible: a list of what happened."""

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self.failed_in_a_row = 0
        self.pauses_in_trouble = 0
        self.probe_from_s = self.probe_to_s = 0.0
        self.worked_s: list[float] = []

    def leave_alone(self, now_s: float) -> None:
        self.state = BreakerState.OPEN
        pause_s = min(CAP_S, BACKOFF_S * 2**self.pauses_in_trouble)
        self.pauses_in_trouble += 1
        self.probe_from_s, self.probe_to_s = now_s + pause_s / 2, now_s + pause_s

    def do(self, step: str, now_s: float) -> None:
        if step == "ok" and self.state is BreakerState.CLOSED:
            self.failed_in_a_row = 0
            self.worked_s.append(now_s)
        elif step in ("fail", "trip") and self.state is BreakerState.CLOSED:
            self.failed_in_a_row += 1
            if step == "trip" or self.failed_in_a_row == FAILURES:
                if self.worked_s and now_s - self.worked_s[0] >= CAP_S:
                    self.pauses_in_trouble = 0
                self.leave_alone(now_s)
        elif step == "answered" and self.state is BreakerState.HALF_OPEN:
            self.state, self.failed_in_a_row, self.worked_s = BreakerState.CLOSED, 0, []
        elif step == "unanswered" and self.state is BreakerState.HALF_OPEN:
            self.leave_alone(now_s)


STEPS = ["ok", "fail", "trip", "probe", "answered", "unanswered", "wait", "wait longer"]


@given(
    st.lists(st.sampled_from(STEPS), max_size=80),
    st.lists(st.floats(0.0, 1.0, exclude_max=True), min_size=1, max_size=5),
)
def test_it_does_what_the_model_does(steps: list[str], jitter: list[float]) -> None:
    clock, model = FakeClock(), Model()
    turns = [0]

    def uniform() -> float:
        turns[0] += 1
        return jitter[turns[0] % len(jitter)]

    breaker = make(clock, uniform)
    for step in steps:
        if step.startswith("wait"):
            clock.now_s += 0.4 if step == "wait" else 4.0
        elif step == "ok":
            breaker.record_success()
        elif step == "fail":
            breaker.record_failure()
        elif step == "trip":
            breaker.trip()
        elif step == "probe":
            due = breaker.begin_probe()
            if model.state is not BreakerState.OPEN or clock.now_s < model.probe_from_s:
                assert not due
            elif clock.now_s >= model.probe_to_s:
                assert due
            if due:
                model.state = BreakerState.HALF_OPEN
        else:
            breaker.end_probe(answered=step == "answered")
        model.do(step, clock.now_s)
        assert breaker.state is model.state
        assert breaker.allow() == (model.state is BreakerState.CLOSED)
        if model.state is BreakerState.OPEN:
            assert model.probe_from_s - 1e-6 <= breaker.next_probe_s <= model.probe_to_s + 1e-6
    clock.now_s += CAP_S
    if breaker.begin_probe() or breaker.state is BreakerState.HALF_OPEN:
        breaker.end_probe(answered=True)
    assert breaker.allow(), "whatever happened, one probe is enough"


def test_the_log_says_what_the_store_said(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    breaker = make(clock)
    with caplog.at_level(logging.INFO):
        for number in range(FAILURES):
            breaker.record_failure(f"wrong password, {number}")
    (record,) = caplog.records
    assert "does not answer (wrong password, 2); it is left alone" in record.getMessage()
