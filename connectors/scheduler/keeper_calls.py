"""What the store keeper asks the store: about blocks, each of which is a value a rank."""

import math
from collections.abc import Sequence

from connectors.stores.base import KVStore, StoreKey
from spm.keys import KeyNames, Rank
from tracker.ids import BlockKey

_LONGEST_LIFE_S = 30 * 86_400


class BlockCalls:
    """Calls of one store about all ranks' values of blocks. Any thread; raises ``StoreError``.

    A block is there when every rank's value is, gone when some rank's is, and unknown (None)
    when nobody answered for a rank and no other rank's is gone.
    """

    def __init__(self, store: KVStore, world_size: int, grace_s: int) -> None:
        """``grace_s``: how long a deleted value lives on where the store can do that."""
        self._store = store
        self._ranks = [Rank(rank) for rank in range(world_size)]
        self._grace_s = grace_s
        self._can = store.capabilities

    @property
    def ranks(self) -> int:
        """How many values a block is."""
        return len(self._ranks)

    @property
    def can_touch(self) -> bool:
        """Whether values can be kept alive."""
        return self._can.touch

    @property
    def can_delete(self) -> bool:
        """Whether values can be deleted, or told to expire."""
        return self._can.delete or (self._can.exact_ttl and self._grace_s > 0)

    def touch(
        self,
        space: KeyNames,
        held: Sequence[tuple[BlockKey, float]],
        now_s: float,
        deadline_s: float,
    ) -> list[bool | None]:
        """Refresh blocks, each to live at least until its instant. A store that cannot is only
        asked what it has."""
        names = self._names(space, [key for key, _ in held])
        if not self._can.touch:
            return self._by_block(self._store.contains_many(names, deadline_s))
        if not self._can.exact_ttl:
            return self._by_block(self._store.touch_many(names, deadline_s))
        lives = [_seconds(until_s - now_s) for _, until_s in held for _ in self._ranks]
        return self._by_block(self._store.touch_many(names, deadline_s, lives))

    def delete(self, space: KeyNames, keys: Sequence[BlockKey], deadline_s: float) -> int:
        """Have values deleted, with a grace if the store can; returns how many there were."""
        names = self._names(space, keys)
        if self._can.exact_ttl and self._grace_s > 0:
            return self._store.expire_many(names, self._grace_s, deadline_s)
        return self._store.delete_many(names, deadline_s)

    def _names(self, space: KeyNames, keys: Sequence[BlockKey]) -> list[StoreKey]:
        return [space.store_key(key, rank) for key in keys for rank in self._ranks]

    def _by_block(self, by_value: Sequence[bool | None]) -> list[bool | None]:
        ranks = len(self._ranks)
        if ranks == 1:
            return list(by_value)
        parts = [by_value[at : at + ranks] for at in range(0, len(by_value), ranks)]
        return [False if False in part else None if None in part else True for part in parts]


def _seconds(left_s: float) -> int:
    return math.ceil(min(max(left_s, 0.0), _LONGEST_LIFE_S))
