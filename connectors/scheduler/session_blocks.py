"""Which stored blocks an operation on a session is about. Pure; scheduler thread."""

from collections.abc import Sequence
from dataclasses import dataclass

from connectors.groups import CacheGeometry, GroupGeometry
from spm.agent_hint import BlockRange
from tracker.ids import BlockKey, SessionRef
from tracker.session_key_tracker import SessionKeyTracker


@dataclass(frozen=True, slots=True)
class SessionBlock:
    """One block of one KV cache group of a session."""

    group: int
    index: int
    """Within the group's blocks."""
    key: BlockKey
    end_tokens: int
    """Tokens of the session up to and including the block's."""


class SessionBlocks:
    """Reads a session's chain of blocks. A *logical* block is as long as vLLM's alignment of
    hits: the longest block of any group."""

    def __init__(self, geometry: CacheGeometry, tracker: SessionKeyTracker) -> None:
        self._geometry = geometry
        self._tracker = tracker

    def logical_blocks(self, ref: SessionRef) -> int:
        """Length of the chain that a request of the session can resume from."""
        lengths = [
            self._tracker.num_blocks(ref, group.group) * group.block_tokens
            for group in self._geometry.groups
        ]
        return min(lengths, default=0) // self._geometry.alignment_tokens

    def first_hole(self, ref: SessionRef, blocks: BlockRange | None) -> int | None:
        """The first logical block of a range that the session gave up; what lies behind it is
        of no use without it. None: there is none. Sliding windows do not count."""
        start, length = blocks.start if blocks else 0, self.logical_blocks(ref)
        stop = min(blocks.stop, length) if blocks else length
        holes = []
        for group in self._geometry.groups:
            if group.window_tokens is None:
                keys = self._tracker.blocks(ref, group.group)
                scale = self._geometry.alignment_tokens // group.block_tokens
                span = range(start * scale, min(stop * scale, len(keys)))
                holes += [index // scale for index in span if keys[index] is None][:1]
        return min(holes, default=None)

    def to_keep(self, ref: SessionRef, blocks: BlockRange | None) -> list[SessionBlock]:
        """What of a range a request that resumes at the session's end needs, in prefix
        order, groups side by side."""
        return self._needed(ref, blocks, self.logical_blocks(ref))

    def to_resume(self, ref: SessionRef, blocks: BlockRange | None) -> list[SessionBlock]:
        """The same for a request that resumes at the range's end, if that is before the
        session's."""
        length = self.logical_blocks(ref)
        return self._needed(ref, blocks, min(blocks.stop, length) if blocks else length)

    def _needed(
        self, ref: SessionRef, blocks: BlockRange | None, resume_at: int
    ) -> list[SessionBlock]:
        start, stop = (blocks.start, blocks.stop) if blocks else (0, resume_at)
        found: list[SessionBlock] = []
        for position, group in enumerate(self._geometry.groups):
            keys = self._tracker.blocks(ref, group.group)
            scale = self._geometry.alignment_tokens // group.block_tokens
            first = group.first_needed_block(resume_at * self._geometry.alignment_tokens)
            span = range(max(start * scale, first), min(stop, resume_at) * scale)
            found += _listed(position, group, keys, span)
        found.sort(key=lambda one: (one.end_tokens, one.group))
        return found


def _listed(
    position: int, group: GroupGeometry, keys: Sequence[BlockKey | None], span: range
) -> list[SessionBlock]:
    return [
        SessionBlock(position, index, key, (index + 1) * group.block_tokens)
        for index in span
        if index < len(keys) and (key := keys[index]) is not None
    ]
