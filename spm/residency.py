"""Which tier holds which block, as last confirmed. Advice for planning, never a promise.

Owned by the scheduler thread. A block counts as held by a tier only when every rank has
it: ranks that disagree must never see different hit lengths.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from enum import Enum

from spm.keys import Rank
from tracker.errors import IntegrityError
from tracker.ids import BlockKey


class Tier(Enum):
    """Where a block's KV can be, besides vLLM's own pool."""

    HOST = "host"
    REMOTE = "remote"


class ResidencyIndex:
    """Host presence exactly as workers report it; remote presence with an age.

    ``max_remote_keys`` bounds what is remembered of the remote store, least recently
    confirmed forgotten first: forgetting costs one existence query later.
    """

    def __init__(
        self,
        world_size: int,
        max_remote_keys: int,
        remote_ttl_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._all_ranks = (1 << world_size) - 1
        self._max_remote_keys = max_remote_keys
        self._remote_ttl_s = remote_ttl_s
        self._clock = clock
        self._host: dict[BlockKey, int] = {}
        self._remote: OrderedDict[BlockKey, float] = OrderedDict()
        self._remote_partial: OrderedDict[BlockKey, int] = OrderedDict()

    def note_host(self, rank: Rank, changes: Mapping[BlockKey, bool]) -> None:
        """One rank's report: True for what its host tier gained, False for what it lost."""
        bit = 1 << rank
        for key, present in changes.items():
            mask = self._host.get(key, 0)
            mask = mask | bit if present else mask & ~bit
            if mask:
                self._host[key] = mask
            else:
                self._host.pop(key, None)

    def note_remote_stored(self, rank: Rank, keys: Iterable[BlockKey]) -> None:
        """One rank's writes were acknowledged; known once all ranks have said so."""
        for key in keys:
            mask = self._remote_partial.pop(key, 0) | (1 << rank)
            if mask == self._all_ranks:
                self.confirm_remote((key,))
            else:
                self._remote_partial[key] = mask
        while len(self._remote_partial) > self._max_remote_keys:
            self._remote_partial.popitem(last=False)

    def confirm_remote(self, keys: Iterable[BlockKey]) -> None:
        """Every rank's value was there just now (lookup, load or acknowledged write)."""
        now_s = self._clock()
        for key in keys:
            self._remote[key] = now_s
            self._remote.move_to_end(key)
        while len(self._remote) > self._max_remote_keys:
            self._remote.popitem(last=False)

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """These were asked for and not found on at least one rank, in any tier."""
        for key in keys:
            self._host.pop(key, None)
            self._remote.pop(key, None)
            self._remote_partial.pop(key, None)

    def doubt_remote(self, keys: Iterable[BlockKey]) -> None:
        """What was known of the remote store may be outdated (it came back empty, say)."""
        for key in keys:
            self._remote.pop(key, None)
            self._remote_partial.pop(key, None)

    def tier_of(self, key: BlockKey) -> Tier | None:
        """Nearest tier known to hold the block; ``None``: not known."""
        if self._host.get(key) == self._all_ranks:
            return Tier.HOST
        return Tier.REMOTE if self.remote_is_fresh(key) else None

    def is_stored(self, key: BlockKey, tier: Tier) -> bool:
        """Whether the block was ever confirmed in ``tier`` and not found missing since."""
        if tier is Tier.HOST:
            return self._host.get(key) == self._all_ranks
        return key in self._remote

    def remote_is_fresh(self, key: BlockKey) -> bool:
        """Whether remote presence was confirmed at most ``remote_ttl_s`` ago."""
        confirmed_s = self._remote.get(key)
        return confirmed_s is not None and self._clock() - confirmed_s <= self._remote_ttl_s

    def clear(self) -> None:
        """Forget everything (cache reset, new epoch)."""
        self._host.clear()
        self._remote.clear()
        self._remote_partial.clear()

    @property
    def num_host_keys(self) -> int:
        return len(self._host)

    @property
    def num_remote_keys(self) -> int:
        return len(self._remote)

    def check_integrity(self) -> None:
        """Raise :class:`IntegrityError` if a bound or a rank mask is broken."""
        for name, masks in (("host", self._host), ("remote", self._remote_partial)):
            bad = [mask for mask in masks.values() if not 0 < mask <= self._all_ranks]
            if bad:
                raise IntegrityError(f"{name} rank masks out of range: {bad[:3]}")
        for name, size in (
            ("remote", len(self._remote)),
            ("partly stored", len(self._remote_partial)),
        ):
            if size > self._max_remote_keys:
                raise IntegrityError(f"{size} {name} keys, at most {self._max_remote_keys}")
        both = self._remote_partial.keys() & self._remote.keys()
        if any(self._remote_partial[key] == self._all_ranks for key in both):
            raise IntegrityError("a fully stored key is still counted as partly stored")
