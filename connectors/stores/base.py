"""The contract every store keeps. To add a store: implement :class:`KVStore` in one
file beside this one, register its kind in ``factory.py``, name the kind (and the scheme of
its URL) in ``RemoteConfig`` of ``spm/remote_config.py``, and add it to the fixture of
``tests/connectors/stores/test_contract.py``.

A store maps names to opaque values and is allowed to forget. It never raises for a
missing key; it raises :class:`spm.errors.StoreError` when it cannot answer at all.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from connectors.stores.buffers import Buffer
from spm.keys import StoreKey
from spm.residency import Tier

MAX_DOCUMENT_BYTES = 16 * 1024 * 1024
"""No store keeps a larger document."""

__all__ = [
    "MAX_DOCUMENT_BYTES",
    "KVStore",
    "ReadRequest",
    "StoreCapabilities",
    "StoreCapacity",
    "StoreKey",
    "Tier",
]


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """One value to read. ``size_bytes`` is exact: a stored value of any other length
    is a miss, so a truncated value never reaches a buffer of the wrong size."""

    key: StoreKey
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StoreCapabilities:
    """What a store can do beyond get and put; what it cannot do answers ``unsupported``."""

    remote: bool
    """Values cross a wire: checksums are verified, deadlines and the breaker apply."""
    delete: bool
    touch: bool
    """``touch_many`` refreshes what the store's own eviction looks at."""
    exact_ttl: bool
    """Values can be given an exact lifetime."""
    documents: bool = False
    """Keeps small opaque values, of any size up to :data:`MAX_DOCUMENT_BYTES`, with a lifetime."""
    streams: bool = False
    """Keeps append-only logs of bounded length."""
    residency: bool = True
    """``contains_many`` knows what is there."""
    capacity: bool = False
    """Says how full it is."""


@dataclass(frozen=True, slots=True)
class StoreCapacity:
    """How full a store is, whoever filled it."""

    used_bytes: int
    limit_bytes: int | None
    """From here on it evicts or refuses; None: it has no limit of its own."""


class KVStore(ABC):
    """Batched key-value store. Every method may be called from any I/O thread.

    ``deadline_s`` is a ``time.monotonic()`` instant; when it passes the call raises
    :class:`spm.errors.StoreTimeoutError` (or returns what it has, for reads).
    """

    @property
    @abstractmethod
    def capabilities(self) -> StoreCapabilities:
        """What this store supports; constant over its life."""

    @abstractmethod
    def get_many(self, reads: Sequence[ReadRequest], deadline_s: float) -> list[Buffer | None]:
        """Read values in one round trip, position by position.

        Returns a list as long as ``reads``; ``None`` is a miss (absent, wrong length, or
        no staging buffer was free). Positions never shift. Each returned buffer carries
        one reference that the caller must ``release()``; its contents must not be changed.
        If the store fails or the deadline passes after some values arrived, those are
        returned and the rest are ``None``; if nothing arrived it raises ``StoreError``.
        """

    @abstractmethod
    def put_many(self, items: Sequence[tuple[StoreKey, Buffer]], deadline_s: float) -> list[bool]:
        """Write values in one round trip; True only where the store acknowledged.

        Borrows the buffers: a store that keeps one takes its own reference. Writing a key
        again replaces the value. Raises ``StoreError`` if nothing was acknowledged.
        """

    @abstractmethod
    def contains_many(self, keys: Sequence[StoreKey], deadline_s: float) -> list[bool]:
        """Whether each key exists now. Advice only: a value may vanish before it is read."""

    @abstractmethod
    def delete_many(self, keys: Sequence[StoreKey], deadline_s: float) -> int:
        """Remove keys, documents' too; returns how many existed. Idempotent."""

    @abstractmethod
    def touch_many(
        self, keys: Sequence[StoreKey], deadline_s: float, ttl_s: Sequence[int] | None = None
    ) -> Sequence[bool | None]:
        """Refresh recency and lifetime; False where the value is gone, None where nobody
        answered. Raises ``StoreError`` if nobody answered for any.

        With ``exact_ttl`` value ``i`` lives on for the store's own lifetime or ``ttl_s[i]``
        seconds, whichever is longer; in a store that sets none, for ever. That takes back
        what :meth:`expire_many` did.
        """

    def expire_many(self, keys: Sequence[StoreKey], ttl_s: int, deadline_s: float) -> int:
        """Let values die in ``ttl_s`` seconds unless somebody touches them before; never
        lengthens a life. Returns how many existed; 0, and nothing changes, without
        ``exact_ttl``."""
        return 0

    def put_document(self, key: StoreKey, content: bytes, ttl_s: int, deadline_s: float) -> bool:
        """Write or replace a document that lives ``ttl_s`` seconds (0: no expiry). False if
        it is too large, refused, or the store keeps none. Raises ``StoreError``."""
        return False

    def get_document(self, key: StoreKey, max_bytes: int, deadline_s: float) -> bytes | None:
        """A document; None if it is absent or longer than ``max_bytes``, of which no more is
        held in memory than a window. Raises ``StoreError``."""
        return None

    def append_stream(
        self, key: StoreKey, entries: Sequence[bytes], max_length: int, deadline_s: float
    ) -> int:
        """Append to the log ``key``, which keeps about the last ``max_length`` entries.
        Returns how many were acknowledged; raises ``StoreError`` if none was because the
        store failed."""
        return 0

    def capacity(self, deadline_s: float) -> StoreCapacity | None:
        """How full the store is now; None if it does not say. Raises ``StoreError``."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release connections and buffers. Idempotent."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise :class:`spm.errors.IntegrityError` if the store's bookkeeping is off."""
