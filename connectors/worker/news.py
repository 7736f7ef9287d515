"""What one rank has to tell the scheduler half, gathered from all its threads."""

import threading
from collections.abc import Sequence

from connectors.metadata import LoadResult, RankReport
from connectors.stores.base import StoreKey
from connectors.stores.memory import MemoryStore
from connectors.worker.saver import SaveListener
from spm.breaker import BreakerState
from spm.keys import KeySpace, Rank, block_key_of
from tracker.ids import BlockKey


class WorkerNews(SaveListener):
    """Collects one rank's news from all threads; drained by the main thread.

    A value's name tells the key space it was stored under: what a thread still does for an
    earlier one is no news. Threads only say which values of the host tier may have come or
    gone; whether they are there is read when the report is made, so that the order in
    which two threads say it does not matter.
    """

    def __init__(self, rank: Rank) -> None:
        self.progress = threading.Event()
        """Set when a load or save ended; the main thread clears and waits on it."""
        self._rank = rank
        self._lock = threading.Lock()
        self._key_space: KeySpace | None = None
        self._host_touched: dict[StoreKey, BlockKey] = {}
        self._report = RankReport(rank, b"")
        self._told_closed = True

    def start_epoch(self, key_space: KeySpace) -> None:
        """Changes reported from now on belong to the epoch of ``key_space``."""
        with self._lock:
            self._key_space = key_space
            self._host_touched.clear()
            self._report.epoch = key_space.epoch
            self._report.remote_stored.clear()

    def host_stored(self, names: Sequence[StoreKey]) -> None:
        with self._lock:
            self._host_touched.update(self._current(names))

    def host_evicted(self, name: StoreKey) -> None:
        """The memory store's eviction callback."""
        self.host_stored([name])

    def remote_stored(self, names: Sequence[StoreKey]) -> None:
        with self._lock:
            self._report.remote_stored.extend(self._current(names).values())

    def _current(self, names: Sequence[StoreKey]) -> dict[StoreKey, BlockKey]:
        """Block keys of the names that belong to the current key space; lock held."""
        space, keys = self._key_space, {name: block_key_of(name) for name in names}
        if space is None:
            return {}
        return {n: key for n, key in keys.items() if space.store_key(key, self._rank) == n}

    def save_done(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            self._report.saves_done.extend(keys)
        self.progress.set()

    def drain(
        self, loads: list[LoadResult], host: MemoryStore | None, breaker: BreakerState
    ) -> RankReport:
        """Everything since the last drain; ``breaker``: state of the remote store's."""
        with self._lock:
            report, self._report = self._report, RankReport(self._rank, self._report.epoch)
            touched, self._host_touched = self._host_touched, {}
        if host is not None:
            present = host.contains_many(list(touched))
            report.host_changes = dict(zip(touched.values(), present, strict=True))
        report.loads = loads
        closed = breaker is BreakerState.CLOSED
        if not (closed and self._told_closed):
            report.breaker = breaker
        self._told_closed = closed
        return report
