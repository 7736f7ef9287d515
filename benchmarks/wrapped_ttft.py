"""Time to first token through a connector of vLLM's, alone and with ours around it.

Two of vLLM's servers on the real model. A new prompt, each server's own, goes to one of them:
cold; again, as GPU hits; and again after its GPU cache was emptied, so that the connector loads
it. No request names a session. One request at a time, interleaved, each time in another order.
"""

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lmcache_peer import OtherConnector, start_lmcache
from benchmarks.resumes import BLOCK_TOKENS, REST_S, Times, server_spec, start_servers
from benchmarks.served import Server, random_prompt
from spm.demo.lmcache_process import CHUNK_TOKENS
from spm.demo.server import ConnectorSettings

_LOADED_TOKENS = 6 * CHUNK_TOKENS
_PROMPT_TOKENS = _LOADED_TOKENS + BLOCK_TOKENS // 2
"""Less than one step takes: ExampleConnector loads nothing else right."""
_WARM_SAMPLES = 3
_EXTERNAL = ("vllm:prompt_tokens_by_source_total", 'source="external_kv_transfer"')


@dataclass(frozen=True)
class Wrapping(ConnectorSettings):
    """Ours around another connector."""

    around: OtherConnector | None = None

    def transfer_config(self) -> dict[str, Any]:
        assert self.around is not None
        inner = self.around.transfer_config()
        names = ("kv_connector", "kv_connector_extra_config")
        extra = {"wrap": {name: inner[name] for name in names}}
        return {**super().transfer_config(), "kv_connector_extra_config": extra}


async def measure_lmcache(logs: Path, repeats: int, seed: int) -> Times:
    """``LMCacheMPConnector``, both with one server of LMCache's."""
    async with contextlib.AsyncExitStack() as stack:
        spec = await start_lmcache(stack, logs / "lmcache-server.log", None)
        connector = OtherConnector(0, extra={"lmcache.mp.server_urls": [spec.url]})
        return await _measure(stack, logs, {"alone": connector, "around": connector}, repeats, seed)


async def measure_example(logs: Path, repeats: int, seed: int) -> Times:
    """``ExampleConnector``, which writes and reads files in the step itself."""
    connectors = {}
    for side in ("alone", "around"):
        directory = logs / f"example-{side}-kv"
        directory.mkdir()
        extra = {"shared_storage_path": str(directory)}
        connectors[side] = OtherConnector(0, name="ExampleConnector", extra=extra)
    async with contextlib.AsyncExitStack() as stack:
        return await _measure(stack, logs, connectors, repeats, seed)


async def _measure(
    stack: contextlib.AsyncExitStack,
    logs: Path,
    connectors: Mapping[str, OtherConnector],
    repeats: int,
    seed: int,
) -> Times:
    rng = random.Random(seed)
    name = connectors["alone"].name
    sides = {"alone": connectors["alone"], "wrapped": Wrapping(0, around=connectors["around"])}
    specs = {side: server_spec(logs, f"{name}-{side}", how) for side, how in sides.items()}
    servers = await start_servers(stack, specs, rng)
    times: Times = defaultdict(list)
    for number in range(1, repeats + 1):
        print(f"  {name}: repeat {number} of {repeats}", flush=True)
        for side in rng.sample(list(servers), len(servers)):
            await _once(servers[side], side, random_prompt(rng, _PROMPT_TOKENS), times)
    return times


async def _once(server: Server, side: str, prompt: list[int], times: Times) -> None:
    times[f"{side} cold"].append(await _ttft(server, prompt))
    for _ in range(_WARM_SAMPLES):
        times[f"{side} gpu hit"].append(await _ttft(server, prompt))
    for _ in range(_WARM_SAMPLES):
        await server.drop_gpu_cache()
        before = await server.metric(*_EXTERNAL)
        times[f"{side} loaded"].append(await _ttft(server, prompt))
        loaded = await server.metric(*_EXTERNAL) - before
        assert loaded == _LOADED_TOKENS, f"{side}: {loaded} tokens loaded"


async def _ttft(server: Server, prompt: list[int]) -> float:
    await asyncio.sleep(REST_S)
    return await server.ttft(prompt)
