"""The kinds of remote store and how to make one. A new store is registered here."""

from collections.abc import Callable

from connectors.stores.base import KVStore
from connectors.stores.buffers import BufferPool
from connectors.stores.faulty import FaultyStore
from spm.errors import ConfigError
from spm.fault_plan import FaultPlan, FaultsConfig
from spm.secret import SecretSource

_Constructor = Callable[[str, BufferPool, float, "int | None", "SecretSource | None"], KVStore]


def create_remote_store(
    kind: str,
    *,
    pool: BufferPool,
    url: str,
    connect_timeout_s: float,
    ttl_s: int | None,
    password: SecretSource | None = None,
    faults: FaultsConfig | None = None,
) -> KVStore:
    """A store that connects on first use. Values read land in buffers of ``pool``.

    ``ttl_s``: lifetime of a value in seconds; None or 0: no expiry. ``password``: where it is,
    if there is one and it is not in the URL. ``faults``: those put into it on purpose. Raises
    ConfigError for an unknown kind or a URL the store cannot use.
    """
    constructor = _CONSTRUCTORS.get(kind)
    if constructor is None:
        known = ", ".join(sorted(_CONSTRUCTORS))
        raise ConfigError(f"unknown kind of remote store {kind!r}; known: {known}")
    store = constructor(url, pool, connect_timeout_s, ttl_s, password)
    return store if faults is None else FaultyStore(store, FaultPlan(faults), pool)


def _memory(
    url: str,
    pool: BufferPool,
    connect_timeout_s: float,
    ttl_s: int | None,
    password: SecretSource | None,
) -> KVStore:
    """A stand-in without a server, for trials: half of the pool, because values that a
    host tier keeps as well cannot be reclaimed from either."""
    from connectors.stores.memory import MemoryStore

    return MemoryStore(pool, pool.capacity_bytes // 2)


def _redis(
    url: str,
    pool: BufferPool,
    connect_timeout_s: float,
    ttl_s: int | None,
    password: SecretSource | None,
) -> KVStore:
    from connectors.stores.redis import RedisStore

    return RedisStore(
        url, pool, connect_timeout_s=connect_timeout_s, ttl_s=ttl_s, password=password
    )


_CONSTRUCTORS: dict[str, _Constructor] = {"memory": _memory, "redis": _redis}
