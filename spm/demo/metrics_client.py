"""Where the tokens of one prompt came from, read from the server's own ``/metrics``."""

import asyncio
import time
from dataclasses import dataclass

import aiohttp

from spm.metrics_page import MetricsPage

_VLLM_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
_SPM_LOADED = "spm:loaded_tokens_total"

_SETTLE_TIMEOUT_S = 3.0
_SETTLE_POLL_S = 0.1


@dataclass(frozen=True)
class TokenSources:
    """Prompt tokens by origin: vLLM counts gpu, external and computed; we split external."""

    gpu: int = 0
    external: int = 0
    computed: int = 0
    host: int = 0
    remote: int = 0

    def __sub__(self, other: "TokenSources") -> "TokenSources":
        return TokenSources(
            self.gpu - other.gpu,
            self.external - other.external,
            self.computed - other.computed,
            self.host - other.host,
            self.remote - other.remote,
        )

    def accounts_for(self, prompt_tokens: int) -> bool:
        """Whether every token of the prompt has shown up, and every external one by tier."""
        total = self.gpu + self.external + self.computed
        return total == prompt_tokens and self.host + self.remote == self.external


def parse_sources(text: str, *, tiers: bool = True) -> TokenSources:
    """Add up the counters of interest in Prometheus' text format, over all engines.

    Without ``tiers`` somebody else's connector loads, and what comes from it is all ``remote``:
    which of its tiers it was is not told."""
    page = MetricsPage(text)

    def from_source(source: str) -> int:
        return int(page.total(_VLLM_BY_SOURCE, source=source))

    external = from_source("external_kv_transfer")
    return TokenSources(
        gpu=from_source("local_cache_hit"),
        external=external,
        computed=from_source("local_compute"),
        host=int(page.total(_SPM_LOADED, tier="host")) if tiers else 0,
        remote=int(page.total(_SPM_LOADED, tier="remote")) if tiers else external,
    )


async def read_sources(
    http: aiohttp.ClientSession, url: str, *, tiers: bool = True
) -> TokenSources:
    """The totals since the server started."""
    async with http.get(f"{url}/metrics") as response:
        return parse_sources(await response.text(), tiers=tiers)


async def settled_sources(
    http: aiohttp.ClientSession,
    url: str,
    before: TokenSources,
    prompt_tokens: int,
    *,
    tiers: bool = True,
) -> TokenSources:
    """The sources of one finished request; counters may trail it by a step, so wait for them."""
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    while True:
        delta = await read_sources(http, url, tiers=tiers) - before
        if delta.accounts_for(prompt_tokens) or time.monotonic() > deadline:
            return delta
        await asyncio.sleep(_SETTLE_POLL_S)
