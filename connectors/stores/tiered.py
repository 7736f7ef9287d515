"""The host tier in front of the remote one, which a circuit breaker guards."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from connectors.stores.base import (
    KVStore,
    ReadRequest,
    StoreCapabilities,
    StoreCapacity,
    StoreKey,
    Tier,
)
from connectors.stores.buffers import Buffer
from connectors.stores.memory import MemoryStore
from connectors.stores.prober import StoreProber
from spm.breaker import CircuitBreaker
from spm.config import SpmConfig
from spm.errors import StoreError, StoreRefusedError, StoreTimeoutError
from spm.metrics import Counters

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TierHit:
    """A value and where it was found. The buffer carries one reference to release."""

    buffer: Buffer
    tier: Tier


class TieredStore(KVStore):
    """Asks the host tier first and the remote only for what is missing there.

    While the breaker does not allow the remote it is not touched: its values are misses
    and writes to it False, at once. A remote failure is raised only where the host tier
    contributed nothing to the answer. Any thread.
    """

    def __init__(
        self,
        host: MemoryStore | None,
        remote: KVStore | None,
        breaker: CircuitBreaker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes over both stores: :meth:`close` closes them. Either may be absent.
        ``clock`` gives the monotonic seconds that deadlines are compared with."""
        self._host = host
        self._remote = remote
        self._breaker = breaker
        self._clock = clock
        self._lock = threading.Lock()
        self._reading_since_s: list[float] = []
        """Of reads of the remote that are under way; with ``_lock`` held."""
        self._last_value_s = -float("inf")

    @property
    def capabilities(self) -> StoreCapabilities:
        """The remote's, or the host's if there is no remote."""
        store = self._remote or self._host
        if store is None:
            return StoreCapabilities(
                remote=False, delete=False, touch=False, exact_ttl=False, residency=False
            )
        return store.capabilities

    @property
    def breaker(self) -> CircuitBreaker:
        return self._breaker

    @property
    def has_remote(self) -> bool:
        """Whether there is a remote store, reachable or not."""
        return self._remote is not None

    def start_prober(self, config: SpmConfig, counters: Counters) -> StoreProber:
        """A thread that finds out when the remote, which there must be, can be used again.
        To be closed before the store."""
        assert self._remote is not None
        prober = StoreProber(self._remote, self._breaker, config, counters, self._clock)
        prober.start()
        return prober

    @property
    def silent_s(self) -> float:
        """For so long the remote has been read and no read has ended with a value."""
        with self._lock:
            if not self._reading_since_s:
                return 0.0
            since_s = max(min(self._reading_since_s), self._last_value_s)
        return self._clock() - since_s

    def get_host(self, reads: Sequence[ReadRequest]) -> list[Buffer | None]:
        """Like :meth:`get_many`, from the host tier only: by reference, never blocks, never
        raises ``StoreError``."""
        return self._host.get_many(reads) if self._host is not None else [None] * len(reads)

    def get_many_by_tier(
        self, reads: Sequence[ReadRequest], deadline_s: float, *, hurried: bool = False
    ) -> list[TierHit | None]:
        """Like :meth:`get_many`, telling the tiers apart. ``hurried``: the deadline is sooner
        than a store may take, so that one which misses it need not have failed.

        Values from the remote are unverified and not kept in the host tier; after
        verifying one, :meth:`promote` it.
        """
        hits: list[TierHit | None] = [None] * len(reads)
        if self._host is not None:
            for at, buffer in enumerate(self._host.get_many(reads)):
                hits[at] = TierHit(buffer, Tier.HOST) if buffer is not None else None
        missing = [at for at, hit in enumerate(hits) if hit is None]
        try:
            found = self._get_remote([reads[at] for at in missing], deadline_s, hurried)
        except StoreError:
            if len(missing) == len(reads):
                raise
            return hits
        except BaseException:
            for hit in hits:
                if hit is not None:
                    hit.buffer.release()
            raise
        for at, buffer in zip(missing, found, strict=True):
            hits[at] = TierHit(buffer, Tier.REMOTE) if buffer is not None else None
        return hits

    def get_many(self, reads: Sequence[ReadRequest], deadline_s: float) -> list[Buffer | None]:
        hits = self.get_many_by_tier(reads, deadline_s)
        return [hit.buffer if hit is not None else None for hit in hits]

    def promote(self, key: StoreKey, buffer: Buffer) -> bool:
        """Keep a verified value in the host tier; False if there is none or it is too small."""
        return self.put_host([(key, buffer)])[0]

    def put_host(self, items: Sequence[tuple[StoreKey, Buffer]]) -> list[bool]:
        """Write to the host tier only. Never blocks, never raises ``StoreError``."""
        return self._host.put_many(items) if self._host is not None else [False] * len(items)

    def put_remote(self, items: Sequence[tuple[StoreKey, Buffer]], deadline_s: float) -> list[bool]:
        """Write to the remote only. Raises ``StoreError`` if nothing was acknowledged."""
        refused = [False] * len(items)
        return self._ask(items, refused, lambda remote: remote.put_many(items, deadline_s))

    def put_many(self, items: Sequence[tuple[StoreKey, Buffer]], deadline_s: float) -> list[bool]:
        """Write to both tiers; True where at least one has the value."""
        kept = self.put_host(items)
        return _either(kept, lambda: self.put_remote(items, deadline_s))

    def contains_many(self, keys: Sequence[StoreKey], deadline_s: float) -> list[bool]:
        """Whether either tier has each key; the remote is asked for the others only."""
        held = self._host.contains_many(keys) if self._host is not None else [False] * len(keys)
        missing = [key for key, there in zip(keys, held, strict=True) if not there]
        absent = [False] * len(missing)
        try:
            remote = iter(
                self._ask(missing, absent, lambda store: store.contains_many(missing, deadline_s))
            )
        except StoreError:
            if not any(held):
                raise
            return held
        return [there or next(remote) for there in held]

    def delete_many(self, keys: Sequence[StoreKey], deadline_s: float) -> int:
        """Remove from both tiers; returns the larger of their counts. If the remote fails
        the host tier has forgotten the keys all the same."""
        deleted = self._host.delete_many(keys) if self._host is not None else 0
        return max(deleted, self._ask(keys, 0, lambda remote: remote.delete_many(keys, deadline_s)))

    def touch_many(
        self, keys: Sequence[StoreKey], deadline_s: float, ttl_s: Sequence[int] | None = None
    ) -> list[bool | None]:
        """Refresh in both tiers; True where at least one has the key."""
        held = self._host.touch_many(keys) if self._host is not None else [False] * len(keys)
        absent: Sequence[bool | None] = [False] * len(keys)
        return _either(
            held,
            lambda: self._ask(
                keys, absent, lambda remote: remote.touch_many(keys, deadline_s, ttl_s)
            ),
        )

    def expire_many(self, keys: Sequence[StoreKey], ttl_s: int, deadline_s: float) -> int:
        """In the remote; the host tier's values have no lifetime."""
        return self._ask(keys, 0, lambda remote: remote.expire_many(keys, ttl_s, deadline_s))

    def put_document(self, key: StoreKey, content: bytes, ttl_s: int, deadline_s: float) -> bool:
        """To the remote, or to the host tier if there is no remote."""
        if self._remote is None:
            return self._host is not None and self._host.put_document(key, content, ttl_s)
        return self._ask(
            [key], False, lambda remote: remote.put_document(key, content, ttl_s, deadline_s)
        )

    def get_document(self, key: StoreKey, max_bytes: int, deadline_s: float) -> bytes | None:
        """From the remote, or from the host tier if there is no remote."""
        if self._remote is None:
            return self._host.get_document(key, max_bytes) if self._host is not None else None
        return self._ask(
            [key], None, lambda remote: remote.get_document(key, max_bytes, deadline_s)
        )

    def append_stream(
        self, key: StoreKey, entries: Sequence[bytes], max_length: int, deadline_s: float
    ) -> int:
        """In the remote; the host tier keeps no logs."""
        return self._ask(
            entries,
            0,
            lambda remote: remote.append_stream(key, entries, max_length, deadline_s),
        )

    def capacity(self, deadline_s: float) -> StoreCapacity | None:
        """The remote's, or the host tier's if there is no remote."""
        if self._remote is None:
            return self._host.capacity() if self._host is not None else None
        return self._ask([self._remote], None, lambda remote: remote.capacity(deadline_s))

    def close(self) -> None:
        for store in (self._host, self._remote):
            if store is not None:
                store.close()

    def check_integrity(self) -> None:
        for store in (self._host, self._remote):
            if store is not None:
                store.check_integrity()

    def _get_remote(
        self, reads: Sequence[ReadRequest], deadline_s: float, hurried: bool
    ) -> list[Buffer | None]:
        absent: list[Buffer | None] = [None] * len(reads)
        return self._ask(
            reads, absent, lambda remote: self._read(remote, reads, deadline_s), deadline_s, hurried
        )

    def _read(
        self, remote: KVStore, reads: Sequence[ReadRequest], deadline_s: float
    ) -> list[Buffer | None]:
        since_s = self._clock()
        with self._lock:
            self._reading_since_s.append(since_s)
        try:
            found = remote.get_many(reads, deadline_s)
        finally:
            with self._lock:
                self._reading_since_s.remove(since_s)
        if any(buffer is not None for buffer in found):
            self._last_value_s = self._clock()
        return found

    def _ask(
        self,
        subjects: Sequence[object],
        otherwise: _T,
        call: Callable[[KVStore], _T],
        deadline_s: float = float("inf"),
        hurried: bool = False,
    ) -> _T:
        """``call`` the remote if the breaker allows, else ``otherwise``; reports the outcome.

        A read that ran into its deadline is a failure even if some values came: a store
        that is always late must be left alone too. A store that refuses is there.
        """
        if self._remote is None or not subjects or not self._breaker.allow():
            return otherwise
        try:
            answer = call(self._remote)
        except StoreRefusedError:
            raise
        except StoreError as error:
            self._failed(error, hurried=hurried and isinstance(error, StoreTimeoutError))
            raise
        if self._clock() < deadline_s:
            self._breaker.record_success()
        else:
            self._failed("its answers are late", hurried=hurried)
        return answer

    def _failed(self, why: object, *, hurried: bool) -> None:
        if hurried:
            self._breaker.suspect()
        else:
            self._breaker.record_failure(why)


def _either(host: list[bool], ask_remote: Callable[[], Sequence[_T]]) -> list[bool | _T]:
    """Host or remote, key by key; a remote failure counts only if the host has nothing."""
    try:
        remote = ask_remote()
    except StoreError:
        if not any(host):
            raise
        return [*host]
    return [here or there for here, there in zip(host, remote, strict=True)]
