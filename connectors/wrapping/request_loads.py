"""Loads of the wrapped connector for vLLM's requests, as seen at vLLM's hooks.

Knows which requests' blocks are being written into, and what arrived for whom. Scheduler
thread only; O(1) a hook, and O(requests with loads) only in a step in which blocks failed.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks


@dataclass(slots=True)
class _Load:
    local_tokens: int
    external_tokens: int
    beside_steps: bool
    """Asynchronous: the request waits, and its blocks hold nothing before it has ended."""
    block_ids: list[int] = field(default_factory=list)
    """Of a model with one KV cache group: the request's, from the first on."""


class RequestLoads:
    """Those of one engine."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._offers: dict[str, _Load] = {}
        """Answers that vLLM may act on in this step or, if it finds no blocks, in none."""
        self._loads: dict[str, _Load] = {}
        """From the first block that was allocated for it to the request's end."""
        self._going_on: set[str] = set()

    def asked(self, request_id: str, local_tokens: int, tokens: int, beside_steps: bool) -> None:
        """The connector offered ``tokens`` behind the local ones."""
        if tokens:
            self._offers[request_id] = _Load(local_tokens, tokens, beside_steps)
        elif self._offers:
            self._offers.pop(request_id, None)

    def allocated(self, request_id: str, blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """vLLM has blocks for the request, and lets so many tokens be loaded."""
        load = self._offers.pop(request_id, None)
        if load is None or not external_tokens:
            return
        load.external_tokens = external_tokens
        if len(blocks.blocks) == 1:
            load.block_ids = [block.block_id for block in blocks.blocks[0]]
        self._loads[request_id] = load
        if load.beside_steps:
            self._going_on.add(request_id)

    def ended(self, received: Iterable[str], failed: Iterable[str], failed_ids: Set[int]) -> None:
        """One step's news: loads that are over on all ranks, those of them that failed as a
        whole, and blocks that were not filled."""
        for request_id in failed:
            self._lose(request_id, 0)
        if failed_ids:
            for request_id, load in self._loads.items():
                at = next((i for i, b in enumerate(load.block_ids) if b in failed_ids), None)
                if at is not None:
                    self._lose(request_id, at * self._block_tokens - load.local_tokens)
        self._going_on.difference_update(received)

    def _lose(self, request_id: str, arrived_tokens: int) -> None:
        load = self._loads.get(request_id)
        if load is not None:
            load.external_tokens = min(load.external_tokens, max(0, arrived_tokens))

    def is_loading(self, request_id: str) -> bool:
        """Whether a load is still writing into the request's blocks."""
        return request_id in self._going_on

    def finished(self, request_id: str) -> int:
        """The request is over; returns the tokens that were loaded for it. A load may go on:
        vLLM keeps its blocks."""
        self._offers.pop(request_id, None)
        self._going_on.discard(request_id)
        load = self._loads.pop(request_id, None)
        return load.external_tokens if load is not None else 0

    @property
    def going_on(self) -> bool:
        """Whether a request waits for a load."""
        return bool(self._going_on)

    def __len__(self) -> int:
        """Requests with a record."""
        return len(self._loads.keys() | self._offers.keys())
