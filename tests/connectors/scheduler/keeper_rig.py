"""A StoreKeeper on a scripted store and a clock that a test moves."""

import threading
import time
from collections.abc import Sequence

from connectors.scheduler.keeper_news import News
from connectors.scheduler.store_keeper import StoreKeeper
from connectors.stores.base import StoreCapabilities, StoreKey
from spm.breaker import CircuitBreaker
from spm.config import KeepAliveConfig, SpmConfig
from spm.keys import Fingerprint, KeySpace, Rank
from spm.metrics import Counters
from spm.remote_config import RemoteConfig
from tests.clock import FakeClock
from tests.connectors.scheduler.scripted_store import ALL, PATIENCE_S, Call, Gate, ScriptedStore
from tracker.ids import BlockHash, BlockKey, GroupId, make_block_key

SPACE = KeySpace("test", Fingerprint(bytes(16)))
LATER_S = 10_000.0
"""An instant after the end of every test."""


def block(number: int) -> BlockKey:
    return make_block_key(BlockHash(number.to_bytes(32, "big")), GroupId(0))


def blocks(*numbers: int) -> list[BlockKey]:
    return [block(number) for number in numbers]


def numbers_of(keys: Sequence[BlockKey]) -> list[int]:
    return sorted(int.from_bytes(key[:-4], "big") for key in keys)


def settings(
    *,
    interval_s: float = 10.0,
    max_keys_per_s: int = 1_000_000,
    delete_grace_s: int = 60,
    ttl_s: int = 0,
    max_keys: int = 1_000_000,
) -> SpmConfig:
    return SpmConfig(
        remote=RemoteConfig("redis://unused", ttl_s=ttl_s),
        max_keys=max_keys,
        events_stream="events",
        events_stream_length=1000,
        keep_alive=KeepAliveConfig(interval_s, max_keys_per_s, delete_grace_s),
    )


class Rig:
    """The keeper and its parts. Time moves only by :meth:`after`."""

    def __init__(
        self,
        config: SpmConfig | None = None,
        capabilities: StoreCapabilities = ALL,
        world_size: int = 1,
    ) -> None:
        self.clock = FakeClock()
        self.store = ScriptedStore(capabilities)
        self.counters = Counters()
        self.breaker = CircuitBreaker(
            failures=2, backoff_s=8, backoff_cap_s=8, clock=self.clock, uniform=lambda: 0.0
        )
        self.told = 0
        self.world_size = world_size
        self.keeper = StoreKeeper(
            self.store,
            self.breaker,
            self.counters,
            config or settings(),
            world_size,
            self._on_news,
            self.clock,
        )
        self.keeper.use(SPACE)

    def _on_news(self) -> None:
        self.told += 1

    def names(self, *numbers: int, space: KeySpace = SPACE) -> list[StoreKey]:
        ranks = [Rank(rank) for rank in range(self.world_size)]
        return [space.store_key(block(number), rank) for number in numbers for rank in ranks]

    def stored(self, *numbers: int) -> list[BlockKey]:
        """Blocks that are in the store."""
        self.store.present.update(self.names(*numbers))
        return blocks(*numbers)

    def settle(self) -> None:
        """Until the worker has done all it may do now."""
        give_up_s = time.monotonic() + PATIENCE_S
        state = self.keeper._state
        while time.monotonic() < give_up_s:
            with state.condition:
                if state.waiting:
                    return
            time.sleep(0)
        raise AssertionError("the keeper never came to rest")

    def after(self, seconds: float, steps: int = 1) -> None:
        """Let time pass, in ``steps`` steps, and the worker do what is due after each."""
        for _ in range(steps):
            with self.keeper._state.condition:
                self.clock.now_s += seconds / steps
                self.keeper._state.wake()
            self.keeper._prober.probe_if_due()
            self.settle()

    def hold_up(self) -> Gate:
        """The worker is busy with a question until the gate is opened."""
        self.store.gate = gate = Gate()
        assert self.keeper.read_document(-1, StoreKey("gate"), 1, LATER_S)
        assert gate.entered.wait(PATIENCE_S)
        self.store.calls.clear()
        return gate

    def calls(self, *methods: str) -> list[Call]:
        """Those made so far, of these methods, once the worker is at rest, and no probes; and
        forgets them."""
        self.settle()
        made, self.store.calls = self.store.calls, []
        made = [call for call in made if not call.names or not call.names[0].endswith(":probe")]
        return [call for call in made if not methods or call.method in methods]

    def touched(self) -> list[StoreKey]:
        return [name for call in self.calls("touch") for name in call.names]

    def news(self) -> list[News]:
        self.settle()
        return self.keeper.poll()

    def counted(self) -> dict[str, float]:
        self.settle()
        return dict(self.counters.drain())

    def close(self) -> None:
        self.keeper.check_integrity()
        self.keeper.close()
        ours = ("spm-store-keeper", "spm-probe")
        left = [thread for thread in threading.enumerate() if thread.name in ours]
        assert not left, "thread left over"
