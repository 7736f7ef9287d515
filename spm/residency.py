"""Which tier holds which block, as last confirmed. Advice for planning, never a promise.

Owned by the scheduler thread. A block counts as held by a tier only when every rank has
it: ranks that disagree must never see different hit lengths.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Protocol

from spm.keys import Rank
from tracker.errors import IntegrityError
from tracker.ids import BlockKey


class Tier(Enum):
    """Where a block's KV can be, besides vLLM's own pool."""

    HOST = "host"
    REMOTE = "remote"


class ResidencyListener(Protocol):
    """Is told what changes, after it has; on the thread of the index, which it must not call
    to change anything."""

    def changed(self, key: BlockKey, tier: Tier, present: bool) -> None:
        """All ranks' values of ``key`` are known to be in ``tier`` now, or no longer are."""
        ...

    def cleared(self, held: Mapping[Tier, Iterable[BlockKey]]) -> None:
        """Nothing is known to be anywhere any more. ``held``: by tier what was, to be gone
        through once, also later."""
        ...


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
        self._cleared_s = -math.inf
        self._listeners: tuple[ResidencyListener, ...] = ()

    def listen(self, listener: ResidencyListener) -> None:
        """Tell ``listener`` of every change from now on."""
        self._listeners += (listener,)

    def note_host(self, rank: Rank, changes: Mapping[BlockKey, bool]) -> None:
        """One rank's report: True for what its host tier gained, False for what it lost."""
        bit = 1 << rank
        for key, present in changes.items():
            before = self._host.get(key, 0)
            mask = before | bit if present else before & ~bit
            if mask:
                self._host[key] = mask
            else:
                self._host.pop(key, None)
            if (mask == self._all_ranks) != (before == self._all_ranks):
                self._tell(key, Tier.HOST, present)

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
        self._confirm(keys, self._clock())

    def note_seen(self, keys: Iterable[BlockKey], asked_s: float) -> None:
        """Every rank's value was there when the store was asked, at clock reading ``asked_s``
        or later. What was asked for before the last :meth:`clear` means nothing now."""
        if asked_s > self._cleared_s:
            self._confirm(keys, asked_s)

    def note_gone(self, keys: Iterable[BlockKey], asked_s: float) -> None:
        """Some rank's value was not in the remote store, asked for at ``asked_s``. What was
        confirmed later is back; writes not all ranks have acknowledged go on."""
        for key in keys:
            confirmed_s = self._remote.get(key)
            if confirmed_s is not None and confirmed_s <= asked_s:
                self._drop_remote(key)

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """These were asked for and not found on at least one rank, in any tier."""
        for key in keys:
            if self._host.pop(key, None) == self._all_ranks:
                self._tell(key, Tier.HOST, False)
            self._drop_remote(key)
            self._remote_partial.pop(key, None)

    def doubt_remote(self, keys: Iterable[BlockKey]) -> None:
        """What was known of the remote store may be outdated (it came back empty, say)."""
        for key in keys:
            self._drop_remote(key)
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

    def remote_age_s(self, key: BlockKey) -> float | None:
        """Seconds since the block was last confirmed in the remote store; None: not known
        to be there."""
        confirmed_s = self._remote.get(key)
        return None if confirmed_s is None else self._clock() - confirmed_s

    def clear(self) -> None:
        """Forget everything (cache reset, new epoch)."""
        host, remote = self._host, self._remote
        self._host, self._remote, self._remote_partial = {}, OrderedDict(), OrderedDict()
        self._cleared_s = self._clock()
        for listener in self._listeners:
            in_host = (key for key, mask in host.items() if mask == self._all_ranks)
            listener.cleared({Tier.HOST: in_host, Tier.REMOTE: remote.keys()})

    @property
    def num_host_keys(self) -> int:
        return len(self._host)

    @property
    def num_remote_keys(self) -> int:
        return len(self._remote)

    def _confirm(self, keys: Iterable[BlockKey], as_of_s: float) -> None:
        for key in keys:
            known_s = self._remote.get(key)
            self._remote[key] = as_of_s if known_s is None else max(known_s, as_of_s)
            self._remote.move_to_end(key)
            if known_s is None:
                self._tell(key, Tier.REMOTE, True)
        while len(self._remote) > self._max_remote_keys:
            key, _ = self._remote.popitem(last=False)
            self._tell(key, Tier.REMOTE, False)

    def _drop_remote(self, key: BlockKey) -> None:
        if self._remote.pop(key, None) is not None:
            self._tell(key, Tier.REMOTE, False)

    def _tell(self, key: BlockKey, tier: Tier, present: bool) -> None:
        for listener in self._listeners:
            listener.changed(key, tier, present)

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
