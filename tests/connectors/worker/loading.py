"""A loader over its parts, and the values a store should never have returned."""

import math
import threading
from collections.abc import Callable, Sequence

from connectors.metadata import BlockMove, LoadCommand, LoadResult
from connectors.stores.base import StoreKey
from connectors.stores.tiered import TieredStore
from connectors.worker.block_mover import CpuBlockMover, Place
from connectors.worker.layout import GroupLayout
from connectors.worker.loader import Loader
from spm.breaker import CircuitBreaker
from spm.config import SpmConfig
from spm.keys import Fingerprint, Rank
from spm.value_format import HEADER_BYTES, ValueIdentity, write_header
from spm.work import WorkClass
from tests.connectors.worker.kit import (
    PATIENCE_S,
    SPACE,
    Parts,
    key_of,
    moves,
)
from tests.connectors.worker.layouts import KvMemory
from tracker.ids import BlockHash, GroupId, split_block_key

CONFIG = SpmConfig(host_bytes=40_000, staging_bytes=40_000, load_threads=2, load_deadline_s=10.0)


class FlakyMover(CpuBlockMover):
    """Raises on command."""

    def __init__(self, layouts: Sequence[GroupLayout]) -> None:
        super().__init__(layouts)
        self.error: Exception | None = None
        self.meanwhile: Callable[[], None] = lambda: None
        """Happens during each copy."""

    def scatter(self, layout: GroupLayout, places: Sequence[Place]) -> None:
        if self.error is not None:
            raise self.error
        self.meanwhile()
        super().scatter(layout, places)


class Bench(Parts):
    """A loader over its parts."""

    def __init__(
        self, threads: int = 2, memory: KvMemory | None = None, *, host: bool = True
    ) -> None:
        super().__init__(CONFIG, memory)
        if not host:
            self.stores = TieredStore(None, self.remote, self.stores.breaker, self.clock)
        self.flaky = FlakyMover(list(self.codec.layouts.values()))
        self.progress = threading.Event()
        self.promoted: list[StoreKey] = []
        self._threads = threads
        self.loader = self._make_loader()
        self.blank = [self.block(block_id) for block_id in range(self.memory.num_blocks)]

    def use_breaker(self, failures: int) -> CircuitBreaker:
        """In place of one that never opens."""
        self.loader.close()
        breaker = CircuitBreaker(
            failures=failures, backoff_s=1.0, backoff_cap_s=1.0, clock=self.clock
        )
        self.stores = TieredStore(self.host, self.remote, breaker, self.clock)
        self.loader = self._make_loader()
        return breaker

    def _make_loader(self) -> Loader:
        return Loader(
            self.stores,
            self.flaky,
            self.codec,
            SpmConfig(
                batch_bytes=self.config.batch_bytes,
                load_threads=self._threads,
                load_deadline_s=10.0,
            ),
            self.counters,
            self.promoted.append,
            self.progress,
            self.clock,
        )

    def load(self, *indexes: int, job_id: int = 1, patience_s: float = math.inf) -> None:
        self.submit(moves(*indexes), job_id, patience_s)

    def submit(
        self, what: tuple[BlockMove, ...], job_id: int = 1, patience_s: float = math.inf
    ) -> None:
        command = LoadCommand(job_id, f"request-{job_id}", what, WorkClass.LOAD, patience_s)
        self.loader.submit(command, SPACE)

    def prefetch(self, what: tuple[BlockMove, ...], job_id: int = 1) -> None:
        self.loader.submit(LoadCommand(job_id, None, what, WorkClass.PREFETCH), SPACE)

    def answers(self, count: int = 1) -> list[LoadResult]:
        """Collect as the worker does until ``count`` loads have ended."""
        results: list[LoadResult] = []
        while True:
            self.progress.clear()
            results += self.loader.collect()
            if len(results) >= count:
                break
            assert self.progress.wait(PATIENCE_S), "a load was not answered"
        assert len(results) == count
        return results

    def answer(self) -> LoadResult:
        (result,) = self.answers()
        return result

    def holds(self, *indexes: int) -> None:
        """These arrived, byte for byte, and no other block was touched."""
        for block_id in range(self.memory.num_blocks):
            there = block_id - 1 in indexes
            expected = self.payload(block_id - 1) if there else self.blank[block_id]
            assert self.block(block_id) == expected, block_id

    def hang(self) -> None:
        self.remote.entered.clear()
        self.remote.gate.clear()

    def go_on(self) -> None:
        """Let hanging calls end and wait for their threads."""
        self.remote.gate.set()
        self.loader.close()


def flip(value: bytes, at: int) -> bytes:
    return value[:at] + bytes([value[at] ^ 0x10]) + value[at + 1 :]


def signed(bench: Bench, index: int, payload: bytes) -> bytes:
    """A value that is consistent in itself, whatever its length."""
    value = bytearray(HEADER_BYTES) + payload
    write_header(memoryview(value), bench.codec.identity(key_of(index), SPACE))
    return bytes(value)


def foreign(bench: Bench, index: int, **other: object) -> bytes:
    block_hash, group = split_block_key(key_of(index))
    fields: dict[str, object] = {
        "fingerprint": SPACE.effective_fingerprint,
        "rank": Rank(0),
        "group": group,
        "block_hash": block_hash,
    }
    return bench.value(index, ValueIdentity(**{**fields, **other}))  # type: ignore[arg-type]


FAULTS: dict[str, Callable[[Bench, int], bytes | None]] = {
    "missing": lambda b, i: None,
    "empty": lambda b, i: b"",
    "cut short": lambda b, i: b.value(i)[:-1],
    "header only": lambda b, i: b.value(i)[:HEADER_BYTES],
    "consistent but short": lambda b, i: signed(b, i, b.payload(i)[:-8]),
    "consistent but long": lambda b, i: signed(b, i, b.payload(i) + bytes(8)),
    "one bit of the payload": lambda b, i: flip(b.value(i), HEADER_BYTES + 77),
    "last bit of the payload": lambda b, i: flip(b.value(i), -1 % b.value_bytes),
    "one bit of the header": lambda b, i: flip(b.value(i), 40),
    "magic": lambda b, i: flip(b.value(i), 0),
    "zeros": lambda b, i: bytes(b.value_bytes),
    "another model's": lambda b, i: foreign(b, i, fingerprint=Fingerprint(b"x" * 16)),
    "another rank's": lambda b, i: foreign(b, i, rank=Rank(1)),
    "another group's": lambda b, i: foreign(b, i, group=GroupId(1)),
    "another block's": lambda b, i: foreign(b, i, block_hash=BlockHash(b"y" * 32)),
}


def spoil(bench: Bench, fault: str, index: int) -> None:
    value = FAULTS[fault](bench, index)
    bench.remote.exact = False
    if value is None:
        bench.remote.values.pop(bench.name(index))
    else:
        bench.remote.values[bench.name(index)] = value
