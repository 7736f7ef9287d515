"""A store keeper without a thread: it answers a number of steps later, from the simulated
store, and remembers what it was told."""

from collections.abc import Iterable, Sequence

from connectors.scheduler.store_keeper import DocumentRead, KeysChecked, News, StoreKeeper
from connectors.stores.base import StoreCapabilities
from spm.breaker import BreakerState
from spm.events import KeysGone, KeysSeen
from spm.keys import KeyNames, Rank, StoreKey
from tests.connectors.scheduler.simulated_worker import Conditions
from tracker.ids import BlockKey

_CAPABILITIES = StoreCapabilities(
    remote=True,
    delete=True,
    touch=True,
    exact_ttl=True,
    documents=True,
    streams=True,
    capacity=True,
)


class SimulatedKeeper(StoreKeeper):
    """``steps``: until an answer comes; None: the store does not answer in time.
    ``delete_steps``: until a deletion is carried out, unless its key is held before."""

    def __init__(self, conditions: Conditions, world_size: int) -> None:
        self.steps: int | None = 0
        self.delete_steps = 0
        self.refuses = False
        self.held: dict[BlockKey, float] = {}
        self.deleted: list[BlockKey] = []
        self.published: list[bytes] = []
        self.news: list[News] = []
        self._conditions = conditions
        self._ranks = [Rank(rank) for rank in range(world_size)]
        self._space: KeyNames | None = None
        self._now = 0
        self._waiting: list[tuple[int, News]] = []
        self._deleting: dict[BlockKey, int] = {}

    capabilities = _CAPABILITIES
    breaker_state = BreakerState.CLOSED

    def tick(self) -> None:
        self._now += 1
        self._delete_due()

    def use(self, key_space: KeyNames | None) -> None:
        """What was asked under the old names is answered at once, and by nobody."""
        self._space = key_space
        self.held.clear()
        self._deleting.clear()
        waiting, self._waiting, self.news = self._waiting, [], []
        for _, one in waiting:
            if isinstance(one, KeysChecked):
                self._waiting.append((self._now, KeysChecked(one.number, None)))
            elif isinstance(one, DocumentRead):
                self._waiting.append((self._now, DocumentRead(one.number, None)))

    def hold(self, keys: Sequence[BlockKey], until_s: float) -> int:
        if self._space is None:
            return 0
        for key in keys:
            self._deleting.pop(key, None)
            self.held[key] = max(until_s, self.held.get(key, 0.0))
        return len(keys)

    def drop(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self.held.pop(key, None)

    def check(self, number: int, keys: Sequence[BlockKey], deadline_s: float) -> bool:
        if self.refuses or self._space is None:
            return False
        present = None if self.steps is None else tuple(self._present(keys))
        self._answer(KeysChecked(number, present))
        return True

    def _present(self, keys: Iterable[BlockKey]) -> list[bool]:
        assert self._space is not None
        values, space = self._conditions.values, self._space
        return [all(space.store_key(key, rank) in values for rank in self._ranks) for key in keys]

    def delete(self, keys: Sequence[BlockKey]) -> int:
        if self._space is None:
            return 0
        for key in keys:
            self.held.pop(key, None)
            self._deleting[key] = self._now + self.delete_steps
        self.deleted += keys
        self._delete_due()
        return len(keys)

    def _delete_due(self) -> None:
        for key in [key for key, when in self._deleting.items() if when <= self._now]:
            del self._deleting[key]
            self._forget(key)

    def _forget(self, key: BlockKey) -> None:
        assert self._space is not None
        for rank in self._ranks:
            self._conditions.values.pop(self._space.store_key(key, rank), None)

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
        for key in keys:
            self._forget(key)
        self.news.append(KeysGone(tuple(keys), asked_s))

    def keep_alive(self, asked_s: float) -> None:
        """Touch everything that is held; the news comes as late as any answer."""
        if self._space is None or self.steps is None:
            return
        there = dict(zip(self.held, self._present(self.held), strict=True))
        self._answer(KeysSeen(tuple(key for key, seen in there.items() if seen), asked_s))
        self._answer(KeysGone(tuple(key for key, seen in there.items() if not seen), asked_s))

    def poll(self) -> list[News]:
        news, self.news = self.news, []
        news += [answer for when, answer in self._waiting if when <= self._now]
        self._waiting = [(when, answer) for when, answer in self._waiting if when > self._now]
        return news

    def _answer(self, answer: News) -> None:
        self._waiting.append((self._now + (self.steps or 0), answer))

    def status(self) -> dict[str, float | None]:
        kept = {"keys": len(self.held), "interval_s": 30.0, "behind_s": 0.0, "keys_per_s": 0.0}
        return {**kept, "used_bytes": len(self._conditions.values), "limit_bytes": None}

    def gauges(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing runs."""

    def check_integrity(self) -> None:
        """There are no books."""
