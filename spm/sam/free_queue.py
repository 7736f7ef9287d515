"""A drop-in for vLLM's free-block queue in which some blocks are taken later than others.

One doubly linked list, as in vLLM, with boundary sentinels between the zones::

    head  finished | demoted | ordinary | associated | later t1 | later t2 | soon t1 ...  tail

In the protected zones a boundary also follows each deadline tick that occurs, so that the
reservation that expires first is the first to break. Within a segment the order is vLLM's:
least recently freed first, and of one request the tail of its prefix first.

While no block is marked every operation does what vLLM's does, on the ordinary segment.
``remove`` is vLLM's own. Belongs to the scheduler thread.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from spm.errors import IntegrityError
from spm.sam.zones import (
    ASSOCIATED,
    DEMOTED,
    FINISHED,
    FIRST_PROTECTED,
    ORDINARY,
    Target,
    Zone,
    target_of,
    target_tick,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spm.sam.holders import Holder
    from spm.sam.ledger import Ledger

_FIRST_SOON = target_of(Zone.SOON)


class Marks(Protocol):
    """What the queue needs to know of blocks; ``BlockTable`` keeps it."""

    ledger: "Ledger"
    holders: "list[Holder | None]"
    """By block id: who says where the block belongs when it is free; None: ordinary."""
    owners: "list[bytes | None]"
    """By block id: the hash that what is known of the block belongs to."""

    def freed(self, block: KVCacheBlock) -> Target:
        """A marked block is freed that may have lost its mark: its target now."""

    def reused(self, blocks: "Sequence[KVCacheBlock]") -> None:
        """These, from outside the ordinary zone, were handed out: forget them."""

    def emptied(self, blocks: "Sequence[KVCacheBlock]") -> None:
        """These are freed without a hash: forget what may be known of them."""

    def relieve(self) -> bool:
        """Ordinary blocks have run out: move what has expired there; False if nothing has."""


class ZonedFreeBlockQueue(FreeKVCacheBlockQueue):
    """vLLM's queue, with zones. See the module's docstring."""

    def __init__(self, blocks: list[KVCacheBlock], marks: Marks) -> None:
        """``blocks`` are the free ones in the order in which they are to be taken."""
        super().__init__(blocks)
        self._marks = marks
        self._ledger = marks.ledger
        self._finished_end = KVCacheBlock(block_id=-1)
        self._ordinary_start = KVCacheBlock(block_id=-1)
        self._ordinary_end = KVCacheBlock(block_id=-1)
        associated_end = KVCacheBlock(block_id=-1)
        self._link_after(self.fake_free_list_head, self._finished_end)
        self._link_after(self._finished_end, self._ordinary_start)
        before_tail = self.fake_free_list_tail.prev_free_block
        assert before_tail is not None
        self._link_after(before_tail, self._ordinary_end)
        self._link_after(self._ordinary_end, associated_end)
        self._ends: dict[Target, KVCacheBlock] = {
            FINISHED: self._finished_end,
            DEMOTED: self._ordinary_start,
            ORDINARY: self._ordinary_end,
            ASSOCIATED: associated_end,
        }
        """By target: the boundary that ends its segment."""
        self._protected: list[Target] = []
        """Targets of the protected segments that exist, in order."""
        self.low_zones_used = False
        """Whether a finished or demoted block may be free."""
        self._unexpired_tick = -1
        """The tick at which no segment was found expired, until another is made."""

    @staticmethod
    def _link_after(previous: KVCacheBlock, node: KVCacheBlock) -> None:
        following = previous.next_free_block
        assert following is not None
        previous.next_free_block = node
        node.prev_free_block = previous
        node.next_free_block = following
        following.prev_free_block = node

    # --- vLLM's operations -------------------------------------------------------------

    def popleft(self) -> KVCacheBlock:
        """Take the first free block; ValueError when there is none, as in vLLM."""
        if self.num_free_blocks == 0:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the first ``n`` free blocks. O(n), plus empty segments it clears away."""
        if n == 0:
            return []
        assert self.num_free_blocks >= n
        if self._ledger.num_marked or self._protected:
            return self._pop_marked(n)
        # All free blocks are ordinary (in a protected segment, some would still wait to be
        # moved): as in vLLM, and the end of the segment cannot come in between.
        start = self._ordinary_start
        block: Any = start.next_free_block  # Any here and below: a linked node has neighbours
        self.num_free_blocks -= n
        if n == 1:
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            start.next_free_block = following
            following.prev_free_block = start
            return [block]
        taken: list[KVCacheBlock] = []
        for _ in range(n):
            taken.append(block)
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        start.next_free_block = block
        block.prev_free_block = start
        return taken

    def _pop_marked(self, n: int) -> list[KVCacheBlock]:
        """From the ordinary segment as far as it goes, unless something goes first."""
        if self.low_zones_used:
            return self._pop_across(n)
        if n == 1:  # a decoding request's block: by far the most frequent call
            block: Any = self._ordinary_start.next_free_block
            if block.block_id >= 0:
                self.remove(block)
                return [block]
        taken = self._pop_run(self._ordinary_start, n)
        missing = n - len(taken)
        return taken + self._pop_across(missing) if missing else taken

    def append(self, block: KVCacheBlock) -> None:
        """Put back one block, where it belongs. O(1)."""
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Put back blocks, each at the end of the segment where it belongs. O(blocks), plus
        O(log segments) for each deadline not seen before."""
        if not blocks:
            return
        if self._ledger.num_marked:
            self._append_sorted(blocks)
        else:
            end = self._ordinary_end
            last: Any = end.prev_free_block
            for block in blocks:
                block.prev_free_block = last
                last.next_free_block = block
                last = block
            last.next_free_block = end
            end.prev_free_block = last
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Put back blocks that hold nothing reusable, to be taken before ordinary ones."""
        if not blocks:
            return
        if self._ledger.num_marked:
            self._marks.emptied(blocks)
        previous: Any = self._ordinary_start
        first = previous.next_free_block
        for block in blocks:
            block.prev_free_block = previous
            previous.next_free_block = block
            previous = block
        previous.next_free_block = first
        first.prev_free_block = previous
        self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All free blocks in the order in which they would be taken. O(free blocks)."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """The free blocks that would be taken after ``cursor``, in order."""
        return (b for b in super().iter_blocks_after(cursor) if b.block_id >= 0)

    # --- zones -------------------------------------------------------------------------

    def move(self, block: KVCacheBlock, target: Target) -> None:
        """Move a free block to the end of another segment. O(1), or O(log segments)."""
        self.remove(block)
        end = self._end_of(target)
        assert end.prev_free_block is not None
        self._link_after(end.prev_free_block, block)
        self.num_free_blocks += 1

    @property
    def has_ordinary(self) -> bool:
        """Whether an ordinary block is free."""
        return self._ordinary_start.next_free_block is not self._ordinary_end

    def count_low(self, limit: int) -> int:
        """Free blocks that nobody wants kept (ordinary ones and those before them), counted
        up to ``limit``. O(limit)."""
        count, node = 0, self.fake_free_list_head.next_free_block
        while node is not None and node is not self._ordinary_end and count < limit:
            count += node.block_id >= 0
            node = node.next_free_block
        return count

    def any_expired(self, now_tick: int) -> bool:
        """Whether a segment's deadline has passed. O(1) when asked again in the same tick."""
        if now_tick == self._unexpired_tick:
            return False
        first_soon = bisect_left(self._protected, _FIRST_SOON)
        if any(
            target_tick(target) <= now_tick
            for target in (*self._protected[:1], *self._protected[first_soon : first_soon + 1])
        ):
            return True
        self._unexpired_tick = now_tick
        return False

    def expired(self, now_tick: int, limit: int) -> list[KVCacheBlock]:
        """Up to ``limit`` free blocks whose deadline has passed; segments found empty go."""
        found: list[KVCacheBlock] = []
        for zone_start in (FIRST_PROTECTED, _FIRST_SOON):
            position = bisect_left(self._protected, zone_start)
            while position < len(self._protected) and len(found) < limit:
                target = self._protected[position]
                if target >= _FIRST_SOON > zone_start or target_tick(target) > now_tick:
                    break
                segment = self._segment(position, limit - len(found))
                found += segment
                if segment:
                    position += 1
                else:
                    self._drop_segment(position)
        return found

    def _segment(self, position: int, limit: int) -> list[KVCacheBlock]:
        """The first ``limit`` blocks of one protected segment."""
        before = self._protected[position - 1] if position else ASSOCIATED
        blocks: list[KVCacheBlock] = []
        block: Any = self._ends[before].next_free_block
        while block.block_id >= 0 and len(blocks) < limit:
            blocks.append(block)
            block = block.next_free_block
        return blocks

    def _end_of(self, target: Target) -> KVCacheBlock:
        """The boundary that ends a segment, made if there is none yet."""
        end = self._ends.get(target)
        if end is None:
            position = bisect_left(self._protected, target)
            before = self._protected[position - 1] if position else ASSOCIATED
            end = KVCacheBlock(block_id=-1)
            self._link_after(self._ends[before], end)
            self._ends[target] = end
            self._unexpired_tick = -1
            self._protected.insert(position, target)
        elif target <= DEMOTED:
            self.low_zones_used = True
        return end

    def _drop_segment(self, position: int) -> None:
        boundary = self._ends.pop(self._protected.pop(position))
        before, after = boundary.prev_free_block, boundary.next_free_block
        assert before is not None
        assert after is not None
        before.next_free_block = after
        after.prev_free_block = before

    def _append_sorted(self, blocks: list[KVCacheBlock]) -> None:
        marks = self._marks
        holders, owners = marks.holders, marks.owners
        current = ORDINARY
        end = self._ordinary_end
        last: Any = end.prev_free_block
        for block in blocks:
            block_id = block.block_id
            target = ORDINARY
            holder = holders[block_id]
            if holder is not None:
                target = holder.target
                # The property costs as much as all the rest of this loop.
                if target < ORDINARY or owners[block_id] != block._block_hash:
                    target = marks.freed(block)
            if target != current:
                last.next_free_block = end
                end.prev_free_block = last
                current = target
                end = self._end_of(current)
                last = end.prev_free_block
            block.prev_free_block = last
            last.next_free_block = block
            last = block
        last.next_free_block = end
        end.prev_free_block = last

    def _pop_across(self, n: int) -> list[KVCacheBlock]:
        """Take ``n`` blocks from wherever the list begins, zone after zone."""
        taken: list[KVCacheBlock] = []
        boundary = self.fake_free_list_head
        while len(taken) < n:
            following = boundary.next_free_block
            assert following is not self.fake_free_list_tail, "num_free_blocks is out of sync"
            assert following is not None
            if following.block_id >= 0:
                run = self._pop_run(boundary, n - len(taken))
                taken += run
                if boundary is not self._ordinary_start:
                    self._marks.reused(run)
            elif following is self._ordinary_end and self._marks.relieve():
                boundary = self._ordinary_start
            else:
                boundary = following
                if boundary is self._ordinary_start:
                    self.low_zones_used = False
        if boundary is not self._finished_end and boundary is not self.fake_free_list_head:
            self._drop_leading_segments()
        return taken

    def _pop_run(self, boundary: KVCacheBlock, limit: int) -> list[KVCacheBlock]:
        """Take up to ``limit`` blocks that follow ``boundary`` in its segment."""
        run: list[KVCacheBlock] = []
        block: Any = boundary.next_free_block
        for _ in range(limit):
            if block.block_id < 0:
                break
            run.append(block)
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        boundary.next_free_block = block
        block.prev_free_block = boundary
        self.num_free_blocks -= len(run)
        return run

    def _drop_leading_segments(self) -> None:
        """Protected segments that were emptied, so that the next walk is short."""
        while self._protected:
            end = self._ends[self._protected[0]]
            if end.prev_free_block is None or end.prev_free_block.block_id >= 0:
                return
            self._drop_segment(0)

    def segments(self) -> "list[tuple[Target, list[KVCacheBlock]]]":
        """Every segment and its blocks, in order; :class:`IntegrityError` if the links of
        two neighbours disagree. O(free blocks)."""
        targets = {id(end): target for target, end in self._ends.items()}
        found, waiting = list[tuple[Target, list[KVCacheBlock]]](), list[KVCacheBlock]()
        node = self.fake_free_list_head
        while node.next_free_block is not None:
            if node.next_free_block.prev_free_block is not node:
                raise IntegrityError(f"the links around block {node.block_id} disagree")
            node = node.next_free_block
            if node.block_id >= 0:
                waiting.append(node)
            elif node is not self.fake_free_list_tail:
                found.append((targets[id(node)], waiting))
                waiting = []
        if waiting or node is not self.fake_free_list_tail or len(found) != len(self._ends):
            raise IntegrityError("the list of free blocks is broken")
        return found
