"""Block hashes of scripted contexts, without their tokens. Pure.

A trajectory's context only grows, so that a block is named by the trajectory and its place; what
lies in the shared prefix, by the prefix and its place.
"""

import hashlib
from collections.abc import Callable
from functools import lru_cache

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

from benchmarks.agents.workload import Trajectory


@lru_cache(maxsize=1 << 20)
def _hash(name: str, index: int) -> BlockHash:
    return BlockHash(hashlib.blake2b(f"{name}/{index}".encode(), digest_size=32).digest())


def block_hasher(trajectory: Trajectory, block_tokens: int) -> Callable[[Request], list[BlockHash]]:
    """What vLLM calls whenever a request's tokens have become more: hashes of new full blocks."""
    shared = trajectory.system_tokens // block_tokens

    def new_hashes(request: Request) -> list[BlockHash]:
        first, stop = len(request.block_hashes), request.num_tokens // block_tokens
        return [
            _hash(trajectory.system if index < shared else trajectory.name, index)
            for index in range(first, stop)
        ]

    return new_hashes
