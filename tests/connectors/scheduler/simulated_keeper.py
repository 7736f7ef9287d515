"""A store keeper without a thread: it answers a number of steps later, from the simulated
store, and remembers what it was told."""

from collections.abc import Iterable, Sequence

from connectors.scheduler.store_keeper import DocumentRead, KeysChecked, News, StoreKeeper
from connectors.stores.base import StoreCapabilities
from spm.breaker import BreakerState
from spm.events import KeysGone
from spm.keys import KeySpace, Rank, StoreKey
from tests.connectors.scheduler.simulated_worker import Conditions
from tracker.ids import BlockKey

_CAPABILITIES = StoreCapabilities(
    remote=True, delete=True, touch=True, exact_ttl=True, documents=True, streams=True
)


class SimulatedKeeper(StoreKeeper):
    """``steps``: until an answer comes; None: the store does not answer in time."""

    def __init__(self, conditions: Conditions, world_size: int) -> None:
        self.steps: int | None = 0
        self.refuses = False
        self.held: dict[BlockKey, float] = {}
        self.deleted: list[BlockKey] = []
        self.published: list[bytes] = []
        self.news: list[News] = []
        self._conditions = conditions
        self._ranks = [Rank(rank) for rank in range(world_size)]
        self._space: KeySpace | None = None
        self._now = 0
        self._waiting: list[tuple[int, News]] = []

    capabilities = _CAPABILITIES
    breaker_state = BreakerState.CLOSED

    def tick(self) -> None:
        self._now += 1

    def use(self, key_space: KeySpace | None) -> None:
        self._space = key_space
        self.held.clear()

    def hold(self, keys: Sequence[BlockKey], until_s: float) -> int:
        for key in keys:
            self.held[key] = max(until_s, self.held.get(key, 0.0))
        return len(keys)

    def drop(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self.held.pop(key, None)

    def check(self, number: int, keys: Sequence[BlockKey], deadline_s: float) -> bool:
        if self.refuses:
            return False
        assert self._space is not None
        values, space = self._conditions.values, self._space
        present = tuple(
            all(space.store_key(key, rank) in values for rank in self._ranks) for key in keys
        )
        self._answer(KeysChecked(number, None if self.steps is None else present))
        return True

    def delete(self, keys: Sequence[BlockKey]) -> int:
        assert self._space is not None
        for key in keys:
            self.held.pop(key, None)
            for rank in self._ranks:
                self._conditions.values.pop(self._space.store_key(key, rank), None)
        self.deleted += keys
        return len(keys)

    def write_document(self, name: StoreKey, content: bytes, ttl_s: int) -> None:
        self._conditions.documents[name] = content

    def read_document(self, number: int, name: StoreKey, max_bytes: int, deadline_s: float) -> bool:
        if self.refuses:
            return False
        content = self._conditions.documents.get(name)
        self._answer(DocumentRead(number, None if self.steps is None else content))
        return True

    def publish(self, entries: Sequence[bytes]) -> None:
        self.published += entries

    def lose(self, keys: Sequence[BlockKey], asked_s: float) -> None:
        """The store has evicted these, and keep-alive has noticed."""
        assert self._space is not None
        for key in keys:
            for rank in self._ranks:
                self._conditions.values.pop(self._space.store_key(key, rank), None)
        self.news.append(KeysGone(tuple(keys), asked_s))

    def poll(self) -> list[News]:
        news, self.news = self.news, []
        news += [answer for when, answer in self._waiting if when <= self._now]
        self._waiting = [(when, answer) for when, answer in self._waiting if when > self._now]
        return news

    def _answer(self, answer: News) -> None:
        self._waiting.append((self._now + (self.steps or 0), answer))

    def status(self) -> dict[str, float]:
        return {"keys": len(self.held), "interval_s": 30.0, "behind_s": 0.0, "keys_per_s": 0.0}

    def gauges(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing runs."""

    def check_integrity(self) -> None:
        """There are no books."""
