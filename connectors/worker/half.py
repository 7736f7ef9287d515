"""The worker half: owns KV views, buffers, stores and their threads on one rank.

All public methods run on the worker's main thread. Loads and saves run on their own
threads and leave what they have to say in the report that goes up with the next step.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from connectors.groups import CacheGeometry
from connectors.metadata import LayoutHandshake, LoadResult, RankReport, StepCommands, WorkerReport
from connectors.stores.base import StoreKey
from connectors.stores.buffers import BufferPool
from connectors.stores.factory import create_remote_store
from connectors.stores.memory import MemoryStore
from connectors.stores.tiered import TieredStore
from connectors.worker.block_mover import BlockMover, block_mover
from connectors.worker.layout import group_layout
from connectors.worker.layout_check import verify_layout
from connectors.worker.loader import Loader
from connectors.worker.saver import SaveListener, Saver
from connectors.worker.values import ValueCodec
from spm.breaker import CircuitBreaker
from spm.config import BreakerConfig, SpmConfig
from spm.errors import IntegrityError, LayoutError
from spm.keys import Rank, block_key_of
from spm.metrics import Counters
from spm.value_format import HEADER_BYTES
from tracker.ids import BlockKey

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.005
"""How long a step that computes nothing waits for a load to end, instead of spinning."""


class _Report(SaveListener):
    """Collects one rank's news from all threads; drained by the main thread."""

    def __init__(self, rank: Rank) -> None:
        self.progress = threading.Event()
        """Set when a load or save ended; the main thread clears and waits on it."""
        self._rank = rank
        self._lock = threading.Lock()
        self._epoch = b""
        self._report = RankReport(rank, b"")

    def start_epoch(self, epoch: bytes) -> None:
        """Host changes reported from now on belong to ``epoch``."""
        with self._lock:
            self._epoch = epoch
            self._report.epoch = epoch
            self._report.host_changes.clear()
            self._report.remote_stored.clear()

    def host_stored(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            self._report.host_changes.update(dict.fromkeys(keys, True))

    def host_evicted(self, name: StoreKey) -> None:
        """The memory store's eviction callback."""
        with self._lock:
            self._report.host_changes[block_key_of(name)] = False

    def remote_stored(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            self._report.remote_stored.extend(keys)

    def save_done(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            self._report.saves_done.extend(keys)
        self.progress.set()

    def drain(self, loads: list[LoadResult]) -> RankReport:
        """Everything since the last drain."""
        with self._lock:
            report, self._report = self._report, RankReport(self._rank, self._epoch)
        report.loads = loads
        return report


class WorkerHalf:
    """One rank's connector state on the worker's side."""

    def __init__(
        self,
        config: SpmConfig,
        geometry: CacheGeometry,
        rank: Rank,
        num_blocks: int,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._rank = rank
        self._num_blocks = num_blocks
        self._counters = counters
        self._clock = clock
        self._report = _Report(rank)
        self._epoch = b""
        self._ended: list[LoadResult] = []
        self._commands: StepCommands | None = None
        self._started = False

    # --- start -------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Derive and prove the layout, then start buffers, stores and threads."""
        layouts = {
            group.group: group_layout(group, kv_caches, self._num_blocks)
            for group in self._geometry.groups
        }
        device = next(iter(kv_caches.values())).device
        mover = block_mover(list(layouts.values()), device)
        for group in self._geometry.groups:
            layout = layouts[group.group]
            verify_layout(group, layout, kv_caches, self._num_blocks, mover)
        self._codec = ValueCodec(self._rank, layouts)
        self._require_room()
        self._mover = mover
        self._start(mover)
        logger.info(
            "session-aware connector, rank %d: %s; host tier %d MiB; remote %s",
            self._rank,
            ", ".join(f"group {g}: {v.payload_bytes} B a block" for g, v in layouts.items()),
            self._config.host_bytes >> 20,
            self._config.remote.redacted_url if self._config.remote else "none",
        )

    def _require_room(self) -> None:
        largest = max(layout.payload_bytes for layout in self._codec.layouts.values())
        needed = 2 * (largest + HEADER_BYTES)
        if needed > self._config.staging_bytes:
            raise LayoutError(
                f"staging_bytes={self._config.staging_bytes}: this model's blocks need at "
                f"least {needed}"
            )

    def _start(self, mover: BlockMover) -> None:
        config = self._config
        self._pool = BufferPool(config.host_bytes + config.staging_bytes, mover.allocate)
        self._host = (
            MemoryStore(self._pool, config.host_bytes, self._report.host_evicted)
            if config.host_bytes
            else None
        )
        remote = config.remote
        self._stores = TieredStore(
            self._host,
            create_remote_store(
                remote.kind,
                pool=self._pool,
                url=remote.url,
                connect_timeout_s=remote.connect_timeout_s,
                ttl_s=remote.ttl_s or None,
            )
            if remote
            else None,
            remote_breaker(config, self._clock),
        )
        self._loader = Loader(
            self._stores,
            mover,
            self._codec,
            config,
            self._counters,
            lambda key: self._report.host_stored((key,)),
            self._report.progress,
            self._clock,
        )
        self._saver = Saver(
            self._stores,
            self._pool,
            mover,
            self._codec,
            config,
            self._counters,
            self._report,
            self._clock,
        )
        self._started = True

    def handshake(self) -> LayoutHandshake:
        """What the scheduler half needs to know of this rank."""
        layouts = [self._codec.layouts[group.group] for group in self._geometry.groups]
        return LayoutHandshake(
            self._rank,
            " ".join(layout.digest for layout in layouts),
            tuple(HEADER_BYTES + v.payload_bytes if v.payload_bytes else 0 for v in layouts),
        )

    # --- a step ------------------------------------------------------------------------

    def begin_step(self, commands: StepCommands) -> None:
        """Before the forward pass: later compute waits for earlier copies."""
        self._commands = commands
        self._mover.fence()
        if commands.key_space.epoch != self._epoch:
            self._epoch = commands.key_space.epoch
            if self._host is not None:
                self._host.clear()
            self._report.start_epoch(self._epoch)

    def start_loads(self) -> None:
        """Queue this step's loads; does not depend on a forward pass."""
        commands = self._take_commands()
        for command in commands.loads:
            self._loader.submit(command, commands.key_space)
        for job_id in commands.cancelled_jobs:
            self._loader.cancel(job_id)
        commands.loads, commands.cancelled_jobs = [], []

    def save(self) -> None:
        """After the forward pass: copy out what the step computed."""
        commands = self._take_commands()
        if commands.saves:
            self._saver.save(commands.saves, commands.key_space)
            commands.saves = []

    def _take_commands(self) -> StepCommands:
        if self._commands is None:
            raise IntegrityError("a worker hook was called outside a step")
        return self._commands

    def collect_loads(self) -> list[LoadResult]:
        """Loads that ended. A step that computes nothing waits a moment for one."""
        self._report.progress.clear()
        results = self._loader.collect()
        idle = self._commands is not None and not self._commands.has_forward
        if not results and idle and (self._loader.busy or self._saver.busy):
            self._report.progress.wait(_IDLE_WAIT_S)
            results = self._loader.collect()
        self._ended.extend(results)
        return results

    def report(self) -> WorkerReport | None:
        """News for the scheduler half; ``None`` if there is none."""
        loads, self._ended = self._ended, []
        rank_report = self._report.drain(loads)
        return None if rank_report.is_empty() else WorkerReport([rank_report])

    def end_step(self) -> None:
        """The step's commands have been carried out."""
        self._commands = None

    # --- end ---------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Finish copies, stop threads, close stores. Idempotent."""
        if not self._started:
            return
        self._started = False
        self._loader.close()
        self._saver.close()
        self._stores.close()

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raise :class:`IntegrityError`; with ``idle`` also if anything is left over."""
        self._loader.check_integrity(idle=idle)
        self._saver.check_integrity(idle=idle)
        self._stores.check_integrity()
        self._pool.check_integrity()
        held = self._host.used_bytes if self._host is not None else 0
        if idle and self._pool.used_bytes != held:
            raise IntegrityError(
                f"idle, but {self._pool.used_bytes} bytes of buffers are referenced and the "
                f"host tier holds {held}"
            )


def remote_breaker(config: SpmConfig, clock: Callable[[], float]) -> CircuitBreaker:
    """The circuit breaker a remote store is used through."""
    settings = config.remote.breaker if config.remote else BreakerConfig()
    return CircuitBreaker(
        failures=settings.failures,
        backoff_s=settings.backoff_s,
        backoff_cap_s=settings.backoff_cap_s,
        clock=clock,
    )
