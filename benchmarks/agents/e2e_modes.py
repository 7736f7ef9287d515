"""The servers that are compared: what stands behind vLLM's pool, and what agents say."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from benchmarks.agents.e2e_guides import Guide, Hinting, Prefetching, Silent, expected_gaps
from benchmarks.agents.workload import Shape
from benchmarks.lmcache_peer import OtherConnector
from spm.client import AsyncSpmClient
from spm.demo.model import ensure_model
from spm.demo.server import ConnectorSettings, ServerSpec

BLOCK_TOKENS = 128
STEP_TOKENS = 512
"""Of prompts in one step: no answer waits longer than such a chunk takes."""
MAX_SEQS = 8
MAX_MODEL_LEN = 3072
HOST_BYTES = 1 << 30
"""More than one round stores."""
RESUME_FIRST = {
    "resume_first_s": 60.0,
    "max_protected_share": 1.0,
    "max_tenant_protected_share": 1.0,
}
"""As the README tells who has more agents than the pool holds."""
STOCK = "stock"
LMCACHE = "lmcache"
BEST = "redis_prefetch"


class Say(Enum):
    """What agents tell the server."""

    NOTHING = "requests as any client sends them"
    HINTS = "an agent_hint in each request"
    CLIENT = "hints, and the client library's prefetches"


@dataclass(frozen=True)
class Mode:
    """``database`` of the one Redis server that it stores in; None: it has none. ``host_bytes``
    None: no connector of ours."""

    name: str
    say: Say = Say.NOTHING
    host_bytes: int | None = None
    database: int | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it runs our connector."""
        return self.host_bytes is not None


_MODES = (
    Mode(STOCK),
    Mode("hints", Say.HINTS, 0),
    Mode("host", Say.NOTHING, HOST_BYTES),
    Mode("redis", Say.NOTHING, 0, 1),
    Mode(BEST, Say.CLIENT, HOST_BYTES, 2),
    Mode(LMCACHE, database=0),  # its adapter knows only this one
)
MODES = {mode.name: mode for mode in _MODES}


def server_spec(
    mode: Mode, logs: Path, pool_blocks: int, redis_url: str, lmcache_url: str | None
) -> ServerSpec:
    """All the same but for the connector."""
    options = {"--max-num-seqs": MAX_SEQS, "--max-num-batched-tokens": STEP_TOKENS}
    arguments = [word for name, value in options.items() for word in (name, str(value))]
    return ServerSpec(
        model=ensure_model(),
        pool_blocks=pool_blocks,
        log_path=logs / f"vllm-{mode.name}.log",
        connector=_connector(mode, redis_url, lmcache_url),
        block_size=BLOCK_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        dev_endpoints=True,
        management=mode.is_ours,
        arguments=(
            *arguments,
            "--enable-prompt-tokens-details",
            "--disable-uvicorn-access-log",
        ),
    )


def _connector(mode: Mode, redis_url: str, lmcache_url: str | None) -> ConnectorSettings | None:
    if mode.name == LMCACHE:
        assert lmcache_url is not None
        return OtherConnector(0, extra={"lmcache.mp.server_urls": [lmcache_url]})
    if mode.host_bytes is None:
        return None
    url = None if mode.database is None else f"{redis_url}/{mode.database}"
    others = {} if mode.say is Say.NOTHING else {"sam": RESUME_FIRST}
    return ConnectorSettings(mode.host_bytes, url, others)


@contextlib.asynccontextmanager
async def guide_for(mode: Mode, url: str, shape: Shape) -> AsyncIterator[Guide]:
    """What the mode's agents tell the server at ``url``, for one round."""
    if mode.say is Say.NOTHING:
        yield Silent()
    elif mode.say is Say.HINTS:
        yield Hinting(expected_gaps(shape))
    else:
        async with AsyncSpmClient(url) as spm:
            yield Prefetching(spm, expected_gaps(shape))


def rotated(modes: Sequence[str], round_number: int) -> list[str]:
    """Another one first in each round: nobody is always after the same other."""
    first = round_number % len(modes)
    return [*modes[first:], *modes[:first]]
