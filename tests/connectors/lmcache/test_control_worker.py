"""The control worker's thread, with a scripted server."""

import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest

from connectors.lmcache.control import (
    MAX_DELETED_OBJECTS,
    DeleteResult,
    DeleteTier,
    LMCacheControl,
    ObjectName,
    ServerStatus,
    WarmRequest,
    WarmResult,
)
from connectors.lmcache.control_news import (
    ControlNews,
    KeepOver,
    SessionWarmed,
    StatusSeen,
    WarmEnded,
)
from connectors.lmcache.control_state import MAX_DELETES, MAX_WARMS_QUEUED
from connectors.lmcache.control_worker import ControlWorker
from spm.breaker import BreakerState, CircuitBreaker
from spm.config import KeepAliveConfig, SpmConfig
from spm.errors import StoreRefusedError, StoreUnavailableError
from spm.metrics import Counters, Metric, metric_key
from tests.connectors.lmcache.rig import ref_of
from tests.processes import wait_until
from tracker.ids import BlockKey

RANKS = 2
KIND = ServerStatus(256, "blake3", True, 0, 100)


class Server:
    """Answers at once, or as told."""

    def __init__(self) -> None:
        self.status_now = KIND
        self.failure: Exception | None = None
        """What every call raises."""
        self.poll_results: list[WarmResult | Exception | None] = []
        """The next answers to polls; afterwards all that was asked for is found."""
        self.submit_failure: Exception | None = None
        self.skipped: list[int] = []
        """By delete: objects in use."""
        self.submitted: list[WarmRequest] = []
        self.deleted: list[tuple[DeleteTier, int]] = []
        self.gate = threading.Event()
        """Calls wait for it."""
        self.gate.set()
        self.calls = 0

    def _called(self) -> None:
        self.calls += 1
        assert self.gate.wait(20)
        if self.failure is not None:
            raise self.failure

    def status(self, deadline_s: float) -> ServerStatus:
        self._called()
        return self.status_now

    def submit_warm(self, request: WarmRequest, deadline_s: float) -> str | None:
        self._called()
        if self.submit_failure is not None:
            raise self.submit_failure
        self.submitted.append(request)
        return None if not request.num_tokens else f"warm-{len(self.submitted)}"

    def poll_warm(self, name: str, deadline_s: float) -> WarmResult | None:
        self._called()
        result = self.poll_results.pop(0) if self.poll_results else WarmResult(2, 2)
        if isinstance(result, Exception):
            raise result
        return result

    def delete(
        self, objects: Sequence[ObjectName], tier: DeleteTier, deadline_s: float
    ) -> DeleteResult:
        self._called()
        self.deleted.append((tier, len(objects)))
        skipped = self.skipped.pop(0) if self.skipped else 0
        return DeleteResult(len(objects) - skipped, skipped)


class Site:
    def __init__(self, backoff_s: float = 60.0) -> None:
        self.server = Server()
        self.counters = Counters()
        self.breaker = CircuitBreaker(failures=2, backoff_s=backoff_s, backoff_cap_s=60.0)
        self.worker = ControlWorker(
            cast(LMCacheControl, self.server),
            self.breaker,
            self.counters,
            SpmConfig(keep_alive=KeepAliveConfig(interval_s=1.0)),
            1.0,
        )
        self.worker.use(objects_of)
        self.news: list[ControlNews] = []

    def until(self, condition: Callable[[], bool], what: str) -> None:
        def polled() -> bool:
            self.news += self.worker.poll()
            return condition()

        wait_until(polled, what)

    def ended(self, number: int) -> WarmEnded:
        def found() -> list[WarmEnded]:
            return [n for n in self.news if isinstance(n, WarmEnded) and n.number == number]

        self.until(lambda: bool(found()), f"the end of prefetch {number}")
        (news,) = found()
        return news

    def counted(self, metric: Metric, label: str = "") -> float:
        self._counted = {**getattr(self, "_counted", {}), **self._sum()}
        return cast(float, self._counted.get(metric_key(metric, label), 0))

    def _sum(self) -> dict[str, Any]:
        before = getattr(self, "_counted", {})
        return {k: before.get(k, 0) + v for k, v in self.counters.drain().items()}


def objects_of(key: BlockKey) -> list[ObjectName]:
    return [ObjectName(bytes(key), "m", rank) for rank in range(RANKS)]


def request_of(count: int = 256) -> WarmRequest:
    return WarmRequest(array("I", range(count)), count, "")


def keys_of(count: int, start: int = 0) -> list[BlockKey]:
    return [BlockKey(at.to_bytes(8, "big")) for at in range(start, start + count)]


def soon() -> float:
    return time.monotonic() + 20.0


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.server.gate.set()
    site.worker.close()


def test_a_prefetch_is_polled_until_it_is_over_and_told_once(site: Site) -> None:
    site.server.poll_results = [None, StoreUnavailableError("for a moment"), None]

    assert site.worker.warm(1, request_of(), soon())

    assert site.ended(1) == WarmEnded(1, WarmResult(2, 2))
    site.worker.warm(2, request_of(), soon())
    site.ended(2)
    assert sum(isinstance(one, WarmEnded) for one in site.news) == 2


def test_less_than_a_chunk_is_over_at_once(site: Site) -> None:
    site.worker.warm(1, request_of(0), soon())

    assert site.ended(1).result == WarmResult(0, 0)


def test_a_refusal_is_told_in_its_words_and_does_not_open_the_breaker(site: Site) -> None:
    site.server.submit_failure = StoreRefusedError("no layout registered")
    for number in range(5):
        site.worker.warm(number, request_of(), soon())

    assert {site.ended(n).detail for n in range(5)} == {"no layout registered"}
    assert site.worker.breaker_state is BreakerState.CLOSED


def test_a_server_that_forgot_a_prefetch_ends_it(site: Site) -> None:
    site.server.poll_results = [StoreRefusedError("unknown")]
    site.worker.warm(1, request_of(), soon())

    assert site.ended(1) == WarmEnded(1, None, "unknown")


def test_a_prefetch_that_never_ends_is_given_up_at_its_deadline(site: Site) -> None:
    site.server.poll_results = [None] * 1000
    site.worker.warm(1, request_of(), time.monotonic() + 0.3)

    assert "not done in time" in site.ended(1).detail


def test_while_the_server_is_left_alone_prefetches_fail_at_once(site: Site) -> None:
    site.until(lambda: site.worker.server is not None, "a status")
    site.server.failure = StoreUnavailableError("down")
    for number in range(2):
        site.worker.warm(number, request_of(), soon())
        site.ended(number)
    assert site.worker.breaker_state is BreakerState.OPEN
    calls = site.server.calls

    site.worker.warm(7, request_of(), soon())

    assert "does not answer" in site.ended(7).detail
    assert site.server.calls == calls


def test_a_server_that_is_back_is_found_by_a_probe_of_our_own() -> None:
    """Catches a breaker that waits for somebody to ask, while everybody is refused."""
    site = Site(backoff_s=0.01)
    site.until(lambda: site.worker.server is not None, "a status")
    site.server.failure = StoreUnavailableError("down")
    for number in range(2):
        site.worker.warm(number, request_of(), soon())
        site.ended(number)
    site.server.failure = None

    site.until(lambda: site.worker.breaker_state is BreakerState.CLOSED, "a probe")
    site.worker.close()


def test_nobody_hears_of_a_forgotten_prefetch(site: Site) -> None:
    site.server.poll_results = [None] * 3
    site.worker.warm(1, request_of(), soon())
    site.worker.forget(1)
    site.worker.warm(2, request_of(), soon())

    site.ended(2)
    assert not any(isinstance(one, WarmEnded) and one.number == 1 for one in site.news)


def test_over_the_bound_a_prefetch_is_refused(site: Site) -> None:
    site.until(lambda: site.worker.server is not None, "a status")
    site.server.gate.clear()
    site.worker.warm(0, request_of(), soon())
    site.until(lambda: site.server.calls == 2, "a call under way")

    accepted = [site.worker.warm(n, request_of(), soon()) for n in range(1, MAX_WARMS_QUEUED + 2)]

    assert accepted == [True] * MAX_WARMS_QUEUED + [False]


def test_a_session_is_kept_once_an_interval_until_its_time_is_over(site: Site) -> None:
    ref = ref_of("s")
    site.worker.keep(ref, request_of(512), time.monotonic() + 2.5)

    site.until(lambda: KeepOver(ref) in site.news, "the end of its time")

    times = site.news.count(SessionWarmed(ref, 512, WarmResult(2, 2)))
    assert times in (1, 2)
    assert site.counted(Metric.KEEP_ALIVE_KEYS, "touched") == 2 * times


def test_a_dropped_session_is_not_kept(site: Site) -> None:
    site.worker.keep(ref_of("a"), request_of(), soon())
    site.worker.keep(ref_of("b"), request_of(), soon())
    site.worker.drop(ref_of("a"))

    site.until(lambda: any(isinstance(n, SessionWarmed) for n in site.news), "a kept session")

    assert {n.ref for n in site.news if isinstance(n, SessionWarmed)} == {ref_of("b")}
    assert site.worker.sessions_kept()[0] == 1


def test_deletes_go_in_bounded_requests_of_one_tier(site: Site) -> None:
    site.until(lambda: site.worker.server is not None, "a status")
    site.server.gate.clear()
    site.worker.warm(1, request_of(), soon())  # until it answers, deletes wait
    count = MAX_DELETED_OBJECTS // RANKS + 7
    assert site.worker.delete(keys_of(count), DeleteTier.ALL) == count
    assert site.worker.delete(keys_of(3, count), DeleteTier.HOST) == 3
    site.server.gate.set()

    site.until(lambda: len(site.server.deleted) == 3, "deletes")

    assert site.server.deleted == [
        (DeleteTier.ALL, MAX_DELETED_OBJECTS),
        (DeleteTier.ALL, 7 * RANKS),
        (DeleteTier.HOST, 3 * RANKS),
    ]
    assert site.counted(Metric.STORE_DELETED_KEYS) == RANKS * (count + 3)


def test_what_is_wanted_again_is_not_deleted(site: Site) -> None:
    site.until(lambda: site.worker.server is not None, "a status")
    site.server.gate.clear()
    site.worker.warm(1, request_of(), soon())
    site.worker.delete(keys_of(5), DeleteTier.ALL)
    site.worker.spare(keys_of(3))
    site.server.gate.set()

    site.until(lambda: bool(site.server.deleted), "deletes")

    assert site.server.deleted == [(DeleteTier.ALL, 2 * RANKS)]


def test_objects_in_use_are_tried_again_unless_they_are_wanted_again(site: Site) -> None:
    site.until(lambda: site.worker.server is not None, "a status")
    site.server.skipped = [1, 1]
    site.server.gate.clear()
    calls = site.server.calls
    site.worker.delete(keys_of(2), DeleteTier.ALL)
    site.until(lambda: site.server.calls > calls, "a delete under way")
    site.worker.spare(keys_of(1))
    site.server.gate.set()

    site.until(lambda: len(site.server.deleted) == 3, "more tries")

    assert [objects for _, objects in site.server.deleted] == [2 * RANKS, RANKS, RANKS]


def test_deletes_that_cannot_be_done_are_counted(site: Site) -> None:
    site.until(lambda: site.worker.server is not None, "a status")
    too_many = keys_of(MAX_DELETES + 10)
    site.server.gate.clear()
    site.worker.warm(1, request_of(), soon())

    assert site.worker.delete(too_many, DeleteTier.ALL) == MAX_DELETES
    site.worker.use(None)  # other names: what waits is void
    assert site.worker.delete(keys_of(1), DeleteTier.ALL) == 0

    assert site.counted(Metric.KEEPER_DROPPED, "delete") == MAX_DELETES + 10 + 1


def test_a_status_is_told_again_only_when_the_server_is_another(site: Site) -> None:
    site.until(lambda: StatusSeen(KIND) in site.news, "a status")
    fuller = ServerStatus(256, "blake3", True, 50, 100)
    site.server.status_now = fuller
    site.until(lambda: site.worker.server == fuller, "the next status")
    other = ServerStatus(128, "blake3", True, 0, 100)
    site.server.status_now = other

    site.until(lambda: site.worker.server == other, "another server")

    site.until(lambda: StatusSeen(other) in site.news, "its status")
    assert [one for one in site.news if isinstance(one, StatusSeen)] == [
        StatusSeen(KIND),
        StatusSeen(other),
    ]


def test_after_a_reset_nothing_asked_before_is_told(site: Site) -> None:
    site.until(lambda: site.worker.server is not None, "a status")
    site.server.gate.clear()
    site.worker.keep(ref_of("s"), request_of(), soon())
    site.worker.warm(1, request_of(), soon())
    site.worker.warm(2, request_of(), soon())
    site.worker.reset()
    site.news.clear()
    site.server.gate.set()
    site.worker.warm(3, request_of(), soon())

    site.ended(3)

    assert site.news == [WarmEnded(3, WarmResult(2, 2))]
    assert site.worker.sessions_kept()[0] == 0


def test_a_session_that_was_being_kept_at_a_reset_is_not_said_to_be_there(site: Site) -> None:
    site.until(lambda: site.worker.server is not None, "a status")
    site.server.poll_results = [None] * 1000
    site.worker.keep(ref_of("s"), request_of(), soon())
    site.until(lambda: bool(site.server.submitted), "a prefetch to keep it")
    site.worker.reset()
    site.news.clear()
    site.server.poll_results.clear()
    site.until(lambda: site.counted(Metric.KEEP_ALIVE_KEYS, "touched") == 2, "its end")

    assert site.news == []


def test_a_bug_is_counted_and_the_thread_goes_on(site: Site) -> None:
    site.server.poll_results = [cast(Any, RuntimeError("a bug"))]
    site.worker.warm(1, request_of(), soon())
    site.until(lambda: site.counted(Metric.INTERNAL_ERRORS, "control") == 1, "a counted bug")

    site.worker.warm(2, request_of(), soon())

    assert site.ended(2).result == WarmResult(2, 2)


def test_a_closed_worker_takes_nothing(site: Site) -> None:
    site.worker.close()
    site.worker.close()

    assert not site.worker.warm(1, request_of(), soon())
    assert site.worker.delete(keys_of(1), DeleteTier.ALL) == 0
