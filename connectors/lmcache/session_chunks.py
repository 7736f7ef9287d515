"""Chunk keys of sessions: what of a session LMCache stores as one, under names that we know."""

from array import array
from collections.abc import Sequence
from typing import Protocol

from spm.agent_hint import BlockRange
from spm.keys import KeyNames
from tracker.ids import BlockKey, GroupId

CHUNK_GROUP = GroupId(0)
"""Of chunk keys."""


class ChunkKeys(Protocol):
    """How LMCache tells chunks apart, and what it calls them."""

    @property
    def chunk_tokens(self) -> int:
        """Length of a chunk: only whole ones are stored."""
        ...

    @property
    def names(self) -> KeyNames:
        """Of the values in Redis."""
        ...

    @property
    def values_a_chunk(self) -> int:
        """How many values a chunk is there, all ranks together."""
        ...

    def keys(
        self, tokens: "array[int]", known: Sequence[BlockKey], cache_salt: str
    ) -> list[BlockKey]:
        """Keys of the whole chunks of ``tokens`` behind the first ``len(known)``, whose keys
        these are."""
        ...


class SessionChunks:
    """Chunk keys of one session's chain, as far as it has come."""

    __slots__ = ("_chunk_keys", "_salt", "_tokens", "keys")

    def __init__(self, chunk_keys: ChunkKeys, tokens: "array[int]", cache_salt: str) -> None:
        """``tokens`` may be appended to, and not be changed otherwise."""
        self._chunk_keys = chunk_keys
        self._tokens = tokens
        self._salt = cache_salt
        self.keys: list[BlockKey] = []
        self.extend()

    def extend(self) -> None:
        """Take in what was appended."""
        if len(self._tokens) // self._chunk_keys.chunk_tokens > len(self.keys):
            self.keys += self._chunk_keys.keys(self._tokens, self.keys, self._salt)

    def is_of(self, tokens: "array[int]") -> bool:
        """Whether these are the tokens it goes along with."""
        return self._tokens is tokens


def chunks_inside(span: BlockRange, block_tokens: int, chunk_tokens: int) -> BlockRange:
    """Chunks no part of which is outside a range of logical blocks."""
    start = -(-span.start * block_tokens // chunk_tokens)
    return BlockRange(start, max(start, span.stop * block_tokens // chunk_tokens))


def chunks_covering(stop: int, block_tokens: int, chunk_tokens: int) -> int:
    """How many chunks, from the first on, hold all of the first ``stop`` logical blocks."""
    return -(-stop * block_tokens // chunk_tokens)
