"""Claims of a whole chain of blocks: what a request that ends leaves behind.

A turn mostly repeats the one before it. What both have in common is not touched: its
reservations say something new, once, for all their blocks.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spm.sam.frontier import NO_BLOCK, Frontier, hashed_ids
from spm.sam.zones import DEMOTED, FIRST_PROTECTED, ORDINARY, Target

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

Targets = tuple[Target, Target]
"""Where the protected places belong, and the others."""


@dataclass(slots=True)
class Association:
    """What became of one hint."""

    blocks: int = 0
    """Places claimed."""
    protected: int = 0
    clipped: int = 0
    """Places that a cap kept from being protected."""
    late: int = 0
    """Groups whose blocks were free already when the hint acted."""


def claim_chain(
    frontier: Frontier,
    groups: "Sequence[Sequence[KVCacheBlock]]",
    targets: Targets,
    strong_stops: Sequence[int] | None,
    hits: Sequence[int],
    windows: Container[int],
) -> Association:
    """Let ``frontier`` hold the blocks of a request that ends, by group and logical index,
    instead of what it held before. ``strong_stops``: by group, the places before it are
    protected; None: all. ``hits``: by group, the places that were in the pool already when
    the request came. ``windows``: groups of which vLLM lets blocks go before the end."""
    done = Association()
    kept = []
    for group, blocks in enumerate(groups):
        done.late += _is_free(blocks)
        ids = hashed_ids(blocks)
        kept.append(frontier.common_prefix(group, ids))
        frontier.cut(group, kept[group], DEMOTED)
        frontier.ids[group] += ids[kept[group] :]
        _note_borrowed(frontier, group, kept[group], min(hits[group], len(ids)))
    for one in (frontier.strong, frontier.weak):
        frontier.table.accept_losses(one)
    _renew(frontier, targets)
    for group, blocks in enumerate(groups):
        _claim_from(frontier, group, blocks, kept[group])
    _divide(frontier, strong_stops, done)
    for group, blocks in enumerate(groups):
        # Freed already, or let go by a sliding window: the tail is to be taken first.
        if done.late or (group in windows and any(_is_let_go(block) for block in blocks)):
            _put_right(frontier, group)
    return done


def reclaim_chain(
    frontier: Frontier,
    targets: Targets,
    strong_stops: Sequence[int] | None,
    done: Association,
) -> None:
    """The same for what the frontier holds already, its blocks in use or free."""
    for group, index in frontier.places():
        if not frontier.holds(frontier.ids[group][index]):
            frontier.release(group, index, ORDINARY)
    _renew(frontier, targets)
    _divide(frontier, strong_stops, done)
    for group in range(len(frontier.ids)):
        _put_right(frontier, group)


def _note_borrowed(frontier: Frontier, group: int, start: int, stop: int) -> None:
    """Hits that no session holds were computed for nobody's session."""
    table, ids = frontier.table, frontier.ids[group]
    borrowed = min(frontier.borrowed[group], start)
    for index in range(stop - 1, start - 1, -1):
        if ids[index] != NO_BLOCK and not table.has_session(ids[index]):
            borrowed = index + 1
            break
    frontier.borrowed[group] = borrowed


def _is_let_go(block: "KVCacheBlock") -> bool:
    """Whether a sliding window has left the block behind, and it may be free."""
    return block.is_null or block.prev_free_block is not None


def _is_free(blocks: "Sequence[KVCacheBlock]") -> bool:
    """Whether vLLM has freed a request's blocks, which it does all at once."""
    last = next((block for block in reversed(blocks) if not block.is_null), None)
    return last is not None and last.ref_cnt == 0


def _renew(frontier: Frontier, targets: Targets) -> None:
    """Say something new of all that is held. What would break a cap becomes weak first."""
    table, strong, weak = frontier.table, frontier.strong, frontier.weak
    if targets[0] >= FIRST_PROTECTED > strong.target:
        surplus = strong.blocks - table.ledger.budget(strong.tenant)
        if surplus > 0:
            for group, index in frontier.places():
                block_id = frontier.ids[group][index]
                if surplus > 0 and block_id != NO_BLOCK and table.holders[block_id] is strong:
                    table.transfer(block_id, strong, weak)
                    surplus -= 1
    table.retarget(weak, targets[1])
    table.retarget(strong, targets[0])


def _claim_from(
    frontier: Frontier, group: int, blocks: "Sequence[KVCacheBlock]", start: int
) -> None:
    """Claim the places from ``start`` on, for ``strong`` as far as the caps allow."""
    table, ids, strong, weak = frontier.table, frontier.ids[group], frontier.strong, frontier.weak
    protects = strong.target >= FIRST_PROTECTED
    budget = table.ledger.budget(strong.tenant) if protects else len(ids)
    wanted = [blocks[i] for i in range(start, len(ids)) if ids[i] != NO_BLOCK]
    left = table.take_new(wanted, strong, weak, budget)
    if not left:
        return
    budget, lost = table.ledger.budget(strong.tenant) if protects else len(ids), set[int]()
    for block in left:
        expected, one = block.block_hash, strong
        if protects and not table.is_charged(block.block_id, strong.tenant):
            one = strong if budget > 0 else weak
            budget -= 1
        if expected is None or not table.claim(block, expected, one):
            lost.add(block.block_id)
    if lost:
        ids[start:] = [NO_BLOCK if block_id in lost else block_id for block_id in ids[start:]]


def _divide(frontier: Frontier, strong_stops: Sequence[int] | None, done: Association) -> None:
    """Give each place to the reservation it belongs to: the prefix is protected first."""
    table, strong, weak = frontier.table, frontier.strong, frontier.weak
    if strong_stops is not None:
        for ids, stop in zip(frontier.ids, strong_stops, strict=True):
            for block_id in ids[stop:]:
                if block_id != NO_BLOCK:
                    table.transfer(block_id, strong, weak)
    if weak.blocks or weak.shared:
        protects = strong.target >= FIRST_PROTECTED
        budget = table.ledger.budget(strong.tenant) if protects else frontier.num_places
        for group, ids in enumerate(frontier.ids):
            stop = len(ids) if strong_stops is None else strong_stops[group]
            budget = _promote(frontier, ids[:stop], budget)
    _count(frontier, strong_stops, done)


def _promote(frontier: Frontier, ids: Sequence[int], budget: int) -> int:
    """Protect more of what only a cap kept weak, the prefix first; returns what is left of
    the budget."""
    table, strong, weak = frontier.table, frontier.strong, frontier.weak
    holders, shared = table.holders, weak.shared
    if budget <= 0 and not shared:
        return budget
    for block_id in ids:
        if holders[block_id] is weak or block_id in shared:
            charged = table.is_charged(block_id, strong.tenant)
            if charged or budget > 0:
                table.transfer(block_id, weak, strong)
                budget -= not charged
            elif not shared:
                break
    return budget


def _count(frontier: Frontier, strong_stops: Sequence[int] | None, done: Association) -> None:
    held = sum(len(ids) - ids.count(NO_BLOCK) for ids in frontier.ids)
    done.blocks += held
    if frontier.strong.target >= FIRST_PROTECTED:
        weak = frontier.weak.blocks + len(frontier.weak.shared)
        done.protected += held - weak
        done.clipped += weak if strong_stops is None else 0


def _put_right(frontier: Frontier, group: int) -> None:
    """Free blocks move to where they belong now, the tail first."""
    for block_id in reversed(frontier.ids[group]):
        if frontier.claimant_at(block_id) is not None:
            frontier.table.put_right(block_id)
