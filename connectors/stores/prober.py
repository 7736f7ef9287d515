"""Finds out when a store that is left alone answers again, so that no request has to."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Literal

from connectors.stores.base import KVStore, StoreKey
from spm.breaker import CircuitBreaker
from spm.config import SpmConfig
from spm.errors import StoreError
from spm.metrics import Counters, Metric
from spm.remote_config import BreakerConfig

logger = logging.getLogger(__name__)


class StoreProber:
    """One thread that sleeps while the breaker is closed, and probes when it says so.

    A probe is one small question under a deadline, over a store that others use too.
    """

    def __init__(
        self,
        store: KVStore,
        breaker: CircuitBreaker,
        config: SpmConfig,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The store belongs to the caller, who closes it after this."""
        self._store = store
        self._breaker = breaker
        self._nobodys_key = StoreKey(f"{config.namespace}:probe")
        self._deadline_s = _deadline_s(config)
        self._counters = counters
        self._clock = clock
        self._thread = threading.Thread(target=self._run, name="spm-probe", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def probe_if_due(self) -> bool:
        """What the thread does when a probe is due; returns whether one was."""
        due = self._breaker.begin_probe()
        if due:
            self._probe()
        return due

    def close(self) -> None:
        """Stop the thread; waits at most for the probe under way. Idempotent."""
        self._breaker.retire()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while self._breaker.await_probe():
            self._probe()

    def _probe(self) -> None:
        answered = False
        end_s = self._clock() + self._deadline_s
        try:
            self._store.contains_many([self._nobodys_key], end_s)
            answered = self._clock() < end_s
        except StoreError as error:
            logger.debug("a probe failed: %s", error)
        except Exception:  # thread boundary: the thread must outlive any bug below
            logger.exception("unexpected error in a probe; the store is left alone")
            self._counters.add(Metric.INTERNAL_ERRORS, label="prober")
        finally:
            self._breaker.end_probe(answered=answered)


def _deadline_s(config: SpmConfig) -> float:
    """As long as requests wait for a lookup, and long enough to connect. A store that no
    request asks is given what its other work is given."""
    if config.remote is None:
        return config.batch_deadline_s
    patience_s = max(config.lookup_deadline_s, config.remote.connect_timeout_s)
    return min(config.batch_deadline_s, patience_s)


def remote_breaker(
    config: SpmConfig,
    clock: Callable[[], float],
    counters: Counters,
    side: Literal["scheduler", "worker"],
    name: str = "the store",
) -> CircuitBreaker:
    """The circuit breaker that one side uses a remote store through; ``name`` is for log lines."""
    settings = config.remote.breaker if config.remote else BreakerConfig()
    return CircuitBreaker(
        failures=settings.failures,
        backoff_s=settings.backoff_s,
        backoff_cap_s=settings.backoff_cap_s,
        clock=clock,
        name=name,
        on_open=lambda: counters.add(Metric.BREAKER_OPENINGS, label=side),
    )
