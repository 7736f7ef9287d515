"""The runs that the demo compares, by store: one server configuration each."""

from dataclasses import dataclass

from spm.demo.conversation import LAST_ROUND_BEFORE_RESTART, ROUNDS
from spm.demo.lmcache_process import CHUNK_TOKENS, LMCacheSpec
from spm.demo.server import BLOCK_SIZE, ConnectorSettings

SMALL_POOL_TOKENS = 4_864
"""Room for one session and a bit: the others' traffic always evicts it."""

BIG_POOL_TOKENS = 19_200
"""Room for all sessions: nothing is ever evicted."""

_HOST_BYTES = 2 << 30


@dataclass(frozen=True)
class Phase:
    """One run of (a part of) the conversation on one server."""

    name: str
    title: str
    pool_tokens: int = SMALL_POOL_TOKENS
    uses_connector: bool = True
    host_bytes: int = 0
    uses_redis: bool = False
    uses_lmcache: bool = False
    """An LMCache server of the phase's own moves the KV, and Redis is its second tier."""
    first_round: int = 1
    last_round: int = ROUNDS

    def connector(
        self, redis_url: str | None, lmcache: LMCacheSpec | None = None
    ) -> ConnectorSettings | None:
        """The connector's part of the server's configuration."""
        if not self.uses_connector:
            return None
        if self.uses_lmcache and lmcache is not None:
            return ConnectorSettings(0, others={"store": lmcache.store_settings()})
        return ConnectorSettings(self.host_bytes, redis_url if self.uses_redis else None)

    @property
    def fills_redis(self) -> bool:
        """Whether a later phase goes on with what this one leaves in Redis."""
        return self.uses_redis and self.last_round < ROUNDS

    def describe_pool(self) -> str:
        """The size of the GPU pool in words."""
        return f"GPU pool {self.pool_tokens:,} tokens"


REFERENCE = Phase(
    name="reference",
    title="vLLM alone, room for all sessions (GPU hits)",
    pool_tokens=BIG_POOL_TOKENS,
    uses_connector=False,
)
RECOMPUTE = Phase(
    name="recompute",
    title="vLLM alone, small GPU pool (recompute)",
    uses_connector=False,
)
HOST = Phase(
    name="host",
    title="with the connector: host memory",
    host_bytes=_HOST_BYTES,
)
REDIS = Phase(
    name="redis",
    title="with the connector: Redis only",
    uses_redis=True,
    last_round=LAST_ROUND_BEFORE_RESTART,
)
RESTART = Phase(
    name="restart",
    title="with the connector: engine restarted, same Redis",
    uses_redis=True,
    first_round=LAST_ROUND_BEFORE_RESTART + 1,
)

LMCACHE = Phase(
    name="lmcache",
    title="with the connector: LMCache server",
    uses_redis=True,
    uses_lmcache=True,
    last_round=LAST_ROUND_BEFORE_RESTART,
)
LMCACHE_RESTART = Phase(
    name="restart",
    title="with the connector: all but Redis restarted",
    uses_redis=True,
    uses_lmcache=True,
    first_round=LAST_ROUND_BEFORE_RESTART + 1,
)


@dataclass(frozen=True)
class Store:
    """Where the demo keeps KV, and the runs that show it."""

    name: str
    phases: tuple[Phase, ...]
    """What ``--phases`` may name; the reference always runs, as everything is compared to it."""
    block_size: int
    """Of all runs, the reference too: then a hit in the store is as long as a hit in the GPU pool,
    and both compute the same number of tokens. Else vLLM's results differ in their last bits."""


REDIS_STORE = Store("redis", (RECOMPUTE, HOST, REDIS, RESTART), BLOCK_SIZE)
LMCACHE_STORE = Store("lmcache", (RECOMPUTE, LMCACHE, LMCACHE_RESTART), CHUNK_TOKENS)
STORES = {store.name: store for store in (REDIS_STORE, LMCACHE_STORE)}


def select_phases(store: Store, names: list[str] | None, *, redis_installed: bool) -> list[Phase]:
    """The phases to run, in order: all of them, or those named and what they depend on."""
    wanted = set(names) if names is not None else {phase.name for phase in store.phases}
    restarted = [phase for phase in store.phases if phase.first_round > 1]
    if any(phase.name in wanted for phase in restarted):
        wanted |= {phase.name for phase in store.phases if phase.fills_redis}
    chosen = [phase for phase in store.phases if phase.name in wanted]
    return [REFERENCE, *(p for p in chosen if redis_installed or not p.uses_redis)]
