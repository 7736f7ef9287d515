"""What sessions consist of, as tokens: all that can be said of them to a connector whose names
for stored values are not ours. Scheduler thread only.
"""

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from connectors.groups import CacheGeometry
from tracker.ids import BlockHash, BlockKey, SessionRef, make_block_key

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request


@dataclass(slots=True, eq=False)
class SessionChain:
    """One session's tokens from the first on, in whole logical blocks. Only ever grows: where a
    session goes back or elsewhere, it gets another chain."""

    cache_salt: str | None
    adapter: "LoRARequest | None"
    one_group: bool
    """Of KV cache groups there is but one."""
    tokens: "array[int]" = field(default_factory=lambda: array("I"))
    names: list[BlockKey] = field(default_factory=list)
    """One a logical block, which it tells from every other with all that precedes it."""

    @property
    def keys(self) -> list[BlockKey]:
        """Under which vLLM publishes the blocks; empty if it takes several a logical block."""
        return self.names if self.one_group else []

    def __len__(self) -> int:
        """Logical blocks."""
        return len(self.names)


class SessionChains:
    """Those of one engine. Over ``max_tokens`` the one that was used longest ago is forgotten;
    its session can then not be asked about, and everything else works."""

    def __init__(self, max_tokens: int, geometry: CacheGeometry) -> None:
        self._max_tokens = max_tokens
        self._geometry = geometry
        self._block_tokens = geometry.alignment_tokens
        self._chains: OrderedDict[SessionRef, SessionChain] = OrderedDict()
        self._total_tokens = 0

    @property
    def total_tokens(self) -> int:
        """Of all chains."""
        return self._total_tokens

    def put(self, ref: SessionRef, request: "Request", stop_tokens: int) -> SessionChain | None:
        """The session consists of the request's first ``stop_tokens`` now, as far as they fill
        blocks; returns its chain. None: it has none.

        O(new tokens) if it goes on from where it was. What is a part of the old chain leaves
        that as it is.
        """
        if not _has_plain_tokens(request):
            self.forget(ref)
            return None
        stop = min(stop_tokens // self._block_tokens, self._num_named(request))
        chain = self._chains.get(ref)
        if chain is not None and chain.names and stop:
            last = min(len(chain), stop)
            if self._names(request, last - 1, last) == chain.names[last - 1 : last]:
                if stop > len(chain):
                    self._extend(chain, request, stop)
                return self._used(ref)
        if not stop:
            return chain
        self.forget(ref)
        several = len(self._geometry.groups) > 1
        self._chains[ref] = SessionChain(
            request.cache_salt, request.lora_request, one_group=not several
        )
        self._extend(self._chains[ref], request, stop)
        return self._used(ref)

    def get(self, ref: SessionRef) -> SessionChain | None:
        """None: there is none, or it was forgotten."""
        return self._chains.get(ref)

    def cut(self, ref: SessionRef, blocks: int) -> None:
        """Only the first ``blocks`` logical blocks are left of it."""
        old = self._chains.get(ref)
        if old is None or blocks >= len(old):
            return
        if not blocks:
            self.forget(ref)
            return
        tokens = old.tokens[: blocks * self._block_tokens]
        self._chains[ref] = SessionChain(
            old.cache_salt, old.adapter, old.one_group, tokens, old.names[:blocks]
        )
        self._total_tokens -= len(old.tokens) - len(tokens)

    def forget(self, ref: SessionRef) -> None:
        """Nothing is left of it."""
        chain = self._chains.pop(ref, None)
        if chain is not None:
            self._total_tokens -= len(chain.tokens)

    def _extend(self, chain: SessionChain, request: "Request", stop: int) -> None:
        start, size = len(chain), self._block_tokens
        chain.tokens.extend(request.all_token_ids[start * size : stop * size])
        chain.names.extend(self._names(request, start, stop))
        self._total_tokens += (stop - start) * size

    def _num_named(self, request: "Request") -> int:
        return len(request.block_hashes) * self._geometry.hash_tokens // self._block_tokens

    def _names(self, request: "Request", start: int, stop: int) -> list[BlockKey]:
        first = self._geometry.groups[0]
        if len(self._geometry.groups) == 1:
            return self._geometry.published_keys(request, first, start, stop)
        scale = self._block_tokens // self._geometry.hash_tokens
        hashes = request.block_hashes
        ends = range((start + 1) * scale - 1, stop * scale, scale)
        return [make_block_key(BlockHash(hashes[end]), first.group) for end in ends]

    def _used(self, ref: SessionRef) -> SessionChain | None:
        self._chains.move_to_end(ref)
        while self._total_tokens > self._max_tokens:
            self.forget(next(iter(self._chains)))
        return self._chains.get(ref)

    def __len__(self) -> int:
        return len(self._chains)


def _has_plain_tokens(request: "Request") -> bool:
    """Whether its tokens say all that its KV depends on, together with salt and adapter."""
    return not (
        request.mm_features or request.prompt_token_ids is None or request.prompt_embeds is not None
    )
