"""What a server's ``/metrics`` say over a round: tokens by source, bytes moved, pool use."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields

import aiohttp

from spm.demo.metrics_client import TokenSources, parse_sources
from spm.metrics_page import MetricsPage

_POOL_USE = "vllm:kv_cache_usage_perc"
_POLL_S = 0.5


@dataclass(frozen=True)
class Counters:
    """Since a server started, or, as a difference, over some time. ``loaded_*`` and ``saved_*``
    are of our connector; another one does not tell. ``load_s``: from command to completion,
    summed over loads."""

    sources: TokenSources
    loaded_host_bytes: float = 0.0
    loaded_remote_bytes: float = 0.0
    saved_host_bytes: float = 0.0
    saved_remote_bytes: float = 0.0
    loaded_host_blocks: float = 0.0
    loaded_remote_blocks: float = 0.0
    load_s: float = 0.0
    prefetched_gpu_blocks: float = 0.0
    prefetched_host_blocks: float = 0.0
    preemptions: float = 0.0

    def __sub__(self, other: "Counters") -> "Counters":
        names = [one.name for one in fields(self) if one.name != "sources"]
        less = {name: getattr(self, name) - getattr(other, name) for name in names}
        return Counters(self.sources - other.sources, **less)


_NAMES: dict[str, tuple[str, dict[str, str]]] = {
    "loaded_host_bytes": ("spm:loaded_bytes_total", {"tier": "host"}),
    "loaded_remote_bytes": ("spm:loaded_bytes_total", {"tier": "remote"}),
    "saved_host_bytes": ("spm:saved_bytes_total", {"tier": "host"}),
    "saved_remote_bytes": ("spm:saved_bytes_total", {"tier": "remote"}),
    "loaded_host_blocks": ("spm:loaded_blocks_total", {"tier": "host"}),
    "loaded_remote_blocks": ("spm:loaded_blocks_total", {"tier": "remote"}),
    "load_s": ("spm:load_seconds_total", {}),
    "prefetched_gpu_blocks": ("spm:prefetched_blocks_total", {"target": "gpu"}),
    "prefetched_host_blocks": ("spm:prefetched_blocks_total", {"target": "host"}),
    "preemptions": ("vllm:num_preemptions_total", {}),
}


def parse_counters(text: str, *, tiers: bool) -> Counters:
    """From Prometheus' text format. ``tiers``: whether it tells which tier loads came from."""
    page = MetricsPage(text)
    totals = {field: page.total(name, **labels) for field, (name, labels) in _NAMES.items()}
    return Counters(parse_sources(text, tiers=tiers), **totals)


def parse_pool_use(text: str) -> float:
    """The share of the pool's blocks that requests hold now; cached free ones do not count."""
    return MetricsPage(text).largest(_POOL_USE)


async def read_metrics(http: aiohttp.ClientSession, url: str) -> str:
    """The text of a server's metrics."""
    async with http.get(f"{url}/metrics") as response:
        response.raise_for_status()
        return await response.text()


@contextlib.asynccontextmanager
async def watched_pool(http: aiohttp.ClientSession, url: str) -> AsyncIterator[list[float]]:
    """Shares of the pool in use, one for each half second inside the block."""
    seen: list[float] = []

    async def watch() -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            seen.append(parse_pool_use(await read_metrics(http, url)))

    watching = asyncio.create_task(watch())
    try:
        yield seen
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
