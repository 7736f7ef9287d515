"""The worker half: owns KV views, buffers, stores and their threads on one rank.

All public methods run on the worker's main thread. Loads and saves run on their own
threads and leave what they have to say in the report that goes up with the next step.
"""

import logging
import time
from collections.abc import Callable, Mapping

import torch

from connectors.groups import CacheGeometry
from connectors.metadata import LayoutHandshake, LoadResult, StepCommands, WorkerReport
from connectors.stores.base import KVStore
from connectors.stores.buffers import BufferPool
from connectors.stores.factory import create_remote_store
from connectors.stores.memory import MemoryStore
from connectors.stores.prober import remote_breaker
from connectors.stores.tiered import TieredStore
from connectors.worker.block_mover import BlockMover, block_mover
from connectors.worker.layout import group_layout
from connectors.worker.layout_check import verify_layout
from connectors.worker.loader import Loader
from connectors.worker.news import WorkerNews
from connectors.worker.saver import Saver
from connectors.worker.values import ValueCodec
from spm.config import SpmConfig
from spm.errors import IntegrityError, LayoutError
from spm.keys import KeySpace, Rank
from spm.metrics import Counters
from spm.value_auth import Purpose, authenticator
from spm.value_format import HEADER_BYTES

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.005
"""How long a step that computes nothing waits for a load to end, instead of spinning."""


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
        make_remote: Callable[..., KVStore] = create_remote_store,
        kernels: Callable[[], str] = str,
    ) -> None:
        """``make_remote`` takes the arguments of :func:`create_remote_store`; ``kernels``
        says how attention packs a block, and is asked when KV caches are registered."""
        self._config = config
        self.geometry = geometry
        self._rank = rank
        self._num_blocks = num_blocks
        self._counters = counters
        self._clock = clock
        self._make_remote = make_remote
        self._kernels = kernels
        self._news = WorkerNews(rank)
        self._key_space: KeySpace | None = None
        self._ended: list[LoadResult] = []
        self._commands: StepCommands | None = None
        self._started = False

    @property
    def keeps_prefix_of_failed_load(self) -> bool:
        """Whether recomputing can begin at the first block that did not arrive."""
        return self.geometry.keeps_prefix_of_failed_load

    # --- start -------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Derive and prove the layout, then start buffers, stores and threads."""
        layouts = {
            group.group: group_layout(group, kv_caches, self._num_blocks)
            for group in self.geometry.groups
        }
        device = next(iter(kv_caches.values())).device
        mover = block_mover(list(layouts.values()), device)
        for group in self.geometry.groups:
            layout = layouts[group.group]
            verify_layout(group, layout, kv_caches, self._num_blocks, mover)
        auth = authenticator(self._config.remote, Purpose.VALUES)
        self._codec = ValueCodec(self._rank, layouts, auth)
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
            MemoryStore(self._pool, config.host_bytes, self._news.host_evicted)
            if config.host_bytes
            else None
        )
        remote = config.remote
        self._stores = TieredStore(
            self._host,
            self._make_remote(
                remote.kind,
                pool=self._pool,
                url=remote.url,
                connect_timeout_s=remote.connect_timeout_s,
                ttl_s=remote.ttl_s or None,
                password=remote.password,
                faults=remote.faults,
            )
            if remote
            else None,
            remote_breaker(config, self._clock, self._counters, "worker"),
            self._clock,
        )
        self._prober = self._stores.start_prober(config, self._counters) if remote else None
        self._loader = Loader(
            self._stores,
            mover,
            self._codec,
            config,
            self._counters,
            lambda name: self._news.host_stored((name,)),
            self._news.progress,
            self._clock,
        )
        self._saver = Saver(
            self._stores,
            self._pool,
            mover,
            self._codec,
            config,
            self._counters,
            self._news,
            self._clock,
        )
        self._started = True

    def handshake(self) -> LayoutHandshake:
        """What the scheduler half needs to know of this rank."""
        layouts = [self._codec.layouts[group.group] for group in self.geometry.groups]
        return LayoutHandshake(
            self._rank,
            " ".join([*(layout.digest for layout in layouts), self._kernels()]),
            tuple(HEADER_BYTES + v.payload_bytes if v.payload_bytes else 0 for v in layouts),
        )

    # --- a step ------------------------------------------------------------------------

    def begin_step(self, commands: StepCommands) -> None:
        """Before the forward pass: later compute waits for earlier copies."""
        self._commands = commands
        self._mover.fence()
        if commands.key_space != self._key_space:
            self._key_space = commands.key_space
            self._news.start_epoch(commands.key_space)
            if self._host is not None:
                self._host.clear()

    def start_loads(self) -> None:
        """Queue this step's loads; does not depend on a forward pass."""
        commands = self._take_commands()
        for command in commands.loads:
            self._loader.submit(command, commands.key_space)
        for job_id in commands.promoted_jobs:
            self._loader.promote(job_id)
        for job_id in commands.cancelled_jobs:
            self._loader.cancel(job_id)
        commands.loads, commands.cancelled_jobs, commands.promoted_jobs = [], [], []

    def save(self) -> None:
        """After the forward pass, if there is one: copy out what the step computed, and
        send on what is only in the host tier."""
        commands = self._take_commands()
        if commands.saves:
            self._saver.save(commands.saves, commands.key_space)
            commands.saves = []

    def _take_commands(self) -> StepCommands:
        if self._commands is None:
            raise IntegrityError("a worker hook was called outside a step")
        return self._commands

    def collect_loads(self) -> list[LoadResult]:
        """Loads that ended. A step that computes nothing waits a moment for one, or because
        the scheduler half waits."""
        self._news.progress.clear()
        results = self._loader.collect()
        commands = self._commands
        idle = commands is not None and not commands.has_forward
        linger = commands is not None and commands.linger
        if not results and idle and (linger or self._loader.busy or self._saver.busy):
            self._news.progress.wait(_IDLE_WAIT_S)
            results = self._loader.collect()
        self._ended.extend(results)
        return results

    def report(self) -> WorkerReport | None:
        """News for the scheduler half; ``None`` if there is none."""
        loads, self._ended = self._ended, []
        rank_report = self._news.drain(loads, self._host, self._stores.breaker.state)
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
        if self._prober is not None:
            self._prober.close()
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
