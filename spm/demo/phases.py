"""The runs that the demo compares: one server configuration each."""

from dataclasses import dataclass

from spm.demo.conversation import LAST_ROUND_BEFORE_RESTART, ROUNDS
from spm.demo.server import BLOCK_SIZE, ConnectorSettings

SMALL_POOL_BLOCKS = 148
"""Room for one session and a bit: the others' traffic always evicts it."""

BIG_POOL_BLOCKS = 600
"""Room for all sessions: nothing is ever evicted."""

_HOST_BYTES = 2 << 30


@dataclass(frozen=True)
class Phase:
    """One run of (a part of) the conversation on one server."""

    name: str
    title: str
    pool_blocks: int = SMALL_POOL_BLOCKS
    uses_connector: bool = True
    host_bytes: int = 0
    uses_redis: bool = False
    first_round: int = 1
    last_round: int = ROUNDS

    def connector(self, redis_url: str | None) -> ConnectorSettings | None:
        """The connector's part of the server's configuration."""
        if not self.uses_connector:
            return None
        return ConnectorSettings(self.host_bytes, redis_url if self.uses_redis else None)

    def describe_pool(self) -> str:
        """The size of the GPU pool in words."""
        return f"GPU pool {self.pool_blocks * BLOCK_SIZE:,} tokens"


REFERENCE = Phase(
    name="reference",
    title="vLLM alone, room for all sessions (GPU hits)",
    pool_blocks=BIG_POOL_BLOCKS,
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

SELECTABLE = (RECOMPUTE, HOST, REDIS, RESTART)
"""What ``--phases`` may name; the reference always runs, as everything is compared to it."""


def select_phases(names: list[str] | None, *, redis_installed: bool) -> list[Phase]:
    """The phases to run, in order: all of them, or those named and what they depend on."""
    wanted = set(names) if names is not None else {phase.name for phase in SELECTABLE}
    if RESTART.name in wanted:
        wanted.add(REDIS.name)  # it fills the Redis that the restarted engine reads
    chosen = [phase for phase in SELECTABLE if phase.name in wanted]
    return [REFERENCE, *(p for p in chosen if redis_installed or not p.uses_redis)]
