"""Blocks that came back into the pool, or are still there, for a session that is expected.

They take their places in the session's newest branch, as if its last request had just left
them there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spm.sam.frontier import NO_BLOCK, Frontier
from spm.sam.holders import Reservation
from spm.sam.zones import FIRST_PROTECTED, ORDINARY

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclass(frozen=True, slots=True)
class RestoredBlock:
    """A published block of the pool and its place in a session."""

    group: int
    index: int
    """Within the group's blocks."""
    block: "KVCacheBlock"


def restore_places(
    frontier: Frontier, restored: Sequence[RestoredBlock], strong_stops: Sequence[int] | None
) -> int:
    """Let ``frontier`` hold these, protected as far as the caps allow; returns how many it
    holds then. ``strong_stops``: by group, the places before it are protected; None: all."""
    table, strong, weak = frontier.table, frontier.strong, frontier.weak
    protects = strong.target >= FIRST_PROTECTED
    budget = table.ledger.budget(strong.tenant) if protects else len(restored)
    held = 0
    for place in restored:
        one = strong
        if strong_stops is not None and place.index >= strong_stops[place.group]:
            one = weak
        elif protects and not table.is_charged(place.block.block_id, strong.tenant):
            one = strong if budget > 0 else weak
            budget -= 1
        held += _hold(frontier, place, one)
    return held


def _hold(frontier: Frontier, place: RestoredBlock, one: Reservation) -> bool:
    group, index, block = place.group, place.index, place.block
    ids = frontier.ids[group]
    ids.extend([NO_BLOCK] * (index + 1 - len(ids)))
    if ids[index] == block.block_id and frontier.holds(block.block_id):
        return True
    frontier.release(group, index, ORDINARY)
    if frontier.claimant_at(block.block_id) is not None:
        _forget_former_places(frontier, block.block_id)
    expected = block.block_hash
    if expected is None or not frontier.table.claim(block, expected, one):
        return False
    ids[index] = block.block_id
    return True


def _forget_former_places(frontier: Frontier, block_id: int) -> None:
    """An ordinary block is reused without notice: a place may name it for what it held before."""
    for group, index in list(frontier.places()):
        if frontier.ids[group][index] == block_id:
            frontier.release(group, index, ORDINARY)
