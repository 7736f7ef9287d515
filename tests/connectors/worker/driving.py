"""A worker half driven as vLLM's model runner drives it."""

import threading
from collections.abc import Mapping, Sequence

import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

from connectors.groups import CacheGeometry
from connectors.metadata import (
    NO_BLOCK_ID,
    BlockMove,
    LoadCommand,
    LoadResult,
    RankReport,
    StepCommands,
)
from connectors.stores.base import StoreKey
from connectors.stores.buffers import BufferPool
from connectors.worker.half import WorkerHalf
from spm.config import SpmConfig
from spm.keys import KeySpace, Rank
from spm.metrics import Counters
from spm.remote_config import RemoteConfig
from spm.work import WorkClass
from tests.clock import FakeClock
from tests.connectors.worker.kit import NUM_BLOCKS, SPACE, FaultStore
from tests.connectors.worker.layouts import TOKENS, KvMemory, uniform
from tracker.ids import BlockKey

REMOTE = RemoteConfig(url="redis://nowhere")
CONFIG = SpmConfig(host_bytes=100_000, staging_bytes=40_000, remote=REMOTE)

_MAX_STEPS = 4000
"""Each idle step waits up to 5 ms for news, so reaching this is a defect."""


def load(job_id: int, *moves: BlockMove) -> LoadCommand:
    return LoadCommand(job_id, f"request-{job_id}", moves)


def prefetch(job_id: int, *moves: BlockMove) -> LoadCommand:
    """A load that no request waits for."""
    return LoadCommand(job_id, None, moves, WorkClass.PREFETCH)


class Worker:
    """One rank: its KV memory, its connection to a remote store, its worker half."""

    def __init__(
        self,
        config: SpmConfig = CONFIG,
        rank: int = 0,
        values: dict[StoreKey, bytes] | None = None,
        memory: KvMemory | None = None,
    ) -> None:
        self.memory = memory or uniform(KVCacheLayout.LBNHC, num_blocks=NUM_BLOCKS)
        self.clock = FakeClock()
        self.counters = Counters()
        self.geometry = CacheGeometry(self.memory.groups, TOKENS, TOKENS)
        self.space = SPACE
        self._values = values
        self.half = WorkerHalf(
            config,
            self.geometry,
            Rank(rank),
            self.memory.num_blocks,
            self.counters,
            self.clock,
            self._make_remote,
        )
        self.reports: list[RankReport] = []
        self.rank = Rank(rank)

    def _make_remote(self, kind: str, *, pool: BufferPool, **settings: object) -> FaultStore:
        assert kind == "redis"
        assert settings["url"] == REMOTE.url
        self.remote = FaultStore(pool, self._values)
        return self.remote

    def start(self, caches: Mapping[str, torch.Tensor] | None = None) -> "Worker":
        self.half.register_kv_caches(self.memory.caches if caches is None else caches)
        return self

    def start_and_stop(self) -> "Worker":
        """What is known after the start outlives the threads."""
        self.start()
        self.half.shutdown()
        return self

    def step(
        self,
        *,
        loads: Sequence[LoadCommand] = (),
        saves: Sequence[BlockMove] = (),
        cancelled: Sequence[int] = (),
        forward: bool = False,
        loads_last: bool = False,
        linger: bool = False,
    ) -> list[LoadResult]:
        """One step of vLLM's; with ``loads_last`` loads are started after the forward."""
        has_forward = forward or any(move.block_id != NO_BLOCK_ID for move in saves)
        commands = StepCommands(self.space, has_forward, [*loads], [*cancelled], [*saves], linger)
        self.half.begin_step(commands)
        if not loads_last:
            self.half.start_loads()
        self.half.save()
        if loads_last:
            self.half.start_loads()
        results = self.half.collect_loads()
        report = self.half.report()
        if report is not None:
            self.reports += report.ranks
        self.half.end_step()
        return results

    def finish(self, *, loads: int = 0, saves: int = 0) -> list[LoadResult]:
        """Empty steps until so many loads and saves are answered."""
        results: list[LoadResult] = []
        for _ in range(_MAX_STEPS):
            if len(results) >= loads and len(self.saved) >= saves:
                return results
            results += self.step()
        raise AssertionError("loads or saves were not answered")

    @property
    def saved(self) -> list[BlockKey]:
        return [key for report in self.reports for key in report.saves_done]

    @property
    def stored(self) -> list[BlockKey]:
        return [key for report in self.reports for key in report.remote_stored]

    @property
    def in_host(self) -> set[BlockKey]:
        """What the scheduler half believes of the host tier."""
        last: dict[BlockKey, bool] = {}
        for report in self.reports:
            if report.epoch == self.space.epoch:
                last.update(report.host_changes)
        return {key for key, there in last.items() if there}

    def new_epoch(self, epoch: bytes) -> None:
        """The cache is reset: from the next step on, other names."""
        self.space = KeySpace(SPACE.namespace, SPACE.fingerprint, epoch)

    def block(self, block_id: int, group: int = 0) -> bytes:
        return self.memory.block_bytes(self.memory.groups[group], block_id)

    def wipe(self) -> None:
        """Other requests have used all blocks meanwhile."""
        self.memory.fill(seed=99)


def spm_threads() -> list[str]:
    """Names of our threads that are alive."""
    return [t.name for t in threading.enumerate() if t.name.startswith("spm-")]


def value_bytes_of(worker: Worker) -> int:
    """Size of one value of the first group."""
    return worker.half.handshake().value_bytes[0]
