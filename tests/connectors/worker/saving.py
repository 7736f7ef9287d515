"""A saver over its parts, with copies and a listener that tests control."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from connectors.stores.base import ReadRequest, StoreKey
from connectors.stores.tiered import TieredStore
from connectors.worker.block_mover import CpuBlockMover, Place
from connectors.worker.layout import GroupLayout
from connectors.worker.saver import SaveListener, Saver
from spm.config import SpmConfig
from tests.connectors.worker.kit import (
    NUM_BLOCKS,
    PATIENCE_S,
    SPACE,
    Parts,
    host_only,
    key_of,
    moves,
)
from tracker.ids import BlockKey

CONFIG = SpmConfig(host_bytes=12_000, staging_bytes=12_000)


class GatedMover(CpuBlockMover):
    """Copies that take as long as the test wants, or fail at either end."""

    def __init__(self, layouts: Sequence[GroupLayout]) -> None:
        super().__init__(layouts)
        self.gate = threading.Event()
        self.gate.set()
        self.gather_error: Exception | None = None
        self.finish_error: Exception | None = None

    def gather(self, layout: GroupLayout, places: Sequence[Place]) -> object:
        if self.gather_error is not None:
            raise self.gather_error
        return super().gather(layout, places)

    def finish_gather(self, ticket: object) -> None:
        assert self.gate.wait(PATIENCE_S)
        if self.finish_error is not None:
            raise self.finish_error


class Listener(SaveListener):
    """Remembers what was reported, and how much memory was in use at each answer."""

    def __init__(self, used_bytes: Callable[[], int]) -> None:
        self._used_bytes = used_bytes
        self._changed = threading.Condition()
        self.host: list[StoreKey] = []
        self.remote: list[StoreKey] = []
        self.done: list[BlockKey] = []
        self.used_at_answer: list[int] = []

    def host_stored(self, names: Sequence[StoreKey]) -> None:
        self.host.extend(names)

    def remote_stored(self, names: Sequence[StoreKey]) -> None:
        self.remote.extend(names)

    def save_done(self, keys: Sequence[BlockKey]) -> None:
        with self._changed:
            self.used_at_answer.append(self._used_bytes())
            self.done.extend(keys)
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.done) >= count, PATIENCE_S)


class Bench(Parts):
    """A saver over its parts; block ``i + 1`` holds payload ``i``."""

    def __init__(
        self, *, host: bool = True, remote: bool = True, stop_deadline_s: float = PATIENCE_S
    ) -> None:
        super().__init__(replace(CONFIG, stop_deadline_s=stop_deadline_s))
        self.stores = TieredStore(
            self.host if host else None,
            self.remote if remote else None,
            self.stores.breaker,
            self.clock,
        )
        for index in range(NUM_BLOCKS - 1):
            self.compute(index)
        self.gated = GatedMover(list(self.codec.layouts.values()))
        self.listener = Listener(lambda: self.pool.used_bytes)
        self.saver = Saver(
            self.stores,
            self.pool,
            self.gated,
            self.codec,
            self.config,
            self.counters,
            self.listener,
            self.clock,
        )

    def compute(self, index: int, seed: int | None = None) -> None:
        content = self.payload(index if seed is None else seed)
        self.memory.write_block(self.memory.groups[0], index + 1, content)

    def save(self, *indexes: int) -> None:
        self.saver.save(moves(*indexes), SPACE)

    def offload(self, *indexes: int) -> None:
        """From the host tier to the remote."""
        self.saver.save(host_only(*indexes), SPACE)

    def hold_everything(self) -> None:
        self.gated.gate.clear()
        self.remote.gate.clear()

    def finish(self) -> None:
        self.gated.gate.set()
        self.remote.gate.set()
        self.saver.close()
        self.pool.check_integrity()
        self.host.check_integrity()
        assert self.pool.used_bytes == self.host.used_bytes, "a buffer leaked"

    def answered(self, *indexes: int) -> None:
        self.listener.wait(len(indexes))
        assert sorted(self.listener.done) == sorted(key_of(i) for i in indexes)

    def in_host(self, *indexes: int) -> list[bytes | None]:
        reads = [ReadRequest(self.name(index), self.value_bytes) for index in indexes]
        found: list[bytes | None] = []
        for buffer in self.host.get_many(reads):
            found.append(None if buffer is None else bytes(buffer.view))
            if buffer is not None:
                buffer.release()
        return found
