"""Whether vLLM's own CPU offloading connector runs on this machine: it is tried."""

import contextlib
from pathlib import Path

from benchmarks.agents.e2e_modes import BLOCK_TOKENS, MAX_MODEL_LEN
from benchmarks.lmcache_peer import OtherConnector
from spm.demo.model import ensure_model
from spm.demo.server import ServerSpec, ServerStartError, running_server

NAME = "OffloadingConnector"
_REFUSALS = ("only supported", "Exception: ", "Error: ")
"""The first of these that the log has is the reason, the others are what followed from it."""


async def try_offloading(log_path: Path, pool_blocks: int) -> str:
    """What it says when it is started; it is stopped again if it does start."""
    extra = {"cpu_bytes_to_use": 1 << 28}
    spec = ServerSpec(
        model=ensure_model(),
        pool_blocks=pool_blocks,
        log_path=log_path,
        connector=OtherConnector(0, name=NAME, extra=extra),
        block_size=BLOCK_TOKENS,
        max_model_len=MAX_MODEL_LEN,
    )
    with contextlib.suppress(ServerStartError):
        async with running_server(spec):
            return "starts here, and is not compared yet"
    return refusal(log_path.read_text(errors="replace"))


def refusal(log: str) -> str:
    """The line of a server's log that tells why it did not start."""
    lines = log.splitlines()
    for sign in _REFUSALS:
        for line in lines:
            if sign in line:
                return line.rpartition("] ")[2].strip()
    return "did not start, and its log does not tell why"
