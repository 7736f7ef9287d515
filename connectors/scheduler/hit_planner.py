"""How much of a prompt the store can supply. Pure: reads a residency, decides, returns.

A hit of ``L`` tokens is usable when every group has every block it attends to at ``L``:
all of them for full attention, those inside the window for sliding windows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from connectors.groups import GroupGeometry
from tracker.ids import BlockKey, GroupId


class Presence(Enum):
    """What is known about a key."""

    HELD = "held"
    ABSENT = "absent"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Hit:
    """Tokens ``local_tokens..total_tokens`` can be loaded; ``keys`` by group and index."""

    local_tokens: int
    total_tokens: int
    keys: Mapping[GroupId, Mapping[int, BlockKey]]

    @property
    def external_tokens(self) -> int:
        return self.total_tokens - self.local_tokens


@dataclass(frozen=True, slots=True)
class HitPlan:
    """The hit on what is held, and the keys whose presence would decide about more."""

    hit: Hit
    unknown: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class GroupKeys:
    """Keys of one group from the first block that is not local."""

    geometry: GroupGeometry
    first_block: int
    keys: Sequence[BlockKey]


def plan_hit(
    groups: Sequence[GroupKeys],
    local_tokens: int,
    alignment_tokens: int,
    presence: Callable[[BlockKey], Presence],
) -> HitPlan:
    """Longest usable hit beyond ``local_tokens``, a multiple of ``alignment_tokens``."""
    known = [[presence(key) for key in group.keys] for group in groups]
    held = _longest(groups, known, local_tokens, alignment_tokens, {Presence.HELD})
    possible = _longest(
        groups, known, local_tokens, alignment_tokens, {Presence.HELD, Presence.UNKNOWN}
    )
    unknown: list[BlockKey] = []
    if possible > held:
        shortest = held - held % alignment_tokens + alignment_tokens  # that would be longer
        for group, states in zip(groups, known, strict=True):
            start = group.geometry.first_needed_block(shortest) - group.first_block
            stop = possible // group.geometry.block_tokens - group.first_block
            unknown.extend(
                group.keys[index]
                for index in range(max(0, start), stop)
                if states[index] is Presence.UNKNOWN
            )
    return HitPlan(_hit(groups, local_tokens, held), tuple(unknown))


def _longest(
    groups: Sequence[GroupKeys],
    known: Sequence[Sequence[Presence]],
    local_tokens: int,
    alignment_tokens: int,
    accepted: set[Presence],
) -> int:
    """Largest usable length in tokens when presences in ``accepted`` count as held."""
    runs = [_run_lengths(states, accepted) for states in known]
    longest = min(
        (group.first_block + len(group.keys)) * group.geometry.block_tokens for group in groups
    )
    length = longest - longest % alignment_tokens
    while length > local_tokens:
        if all(_usable(g, r, length) for g, r in zip(groups, runs, strict=True)):
            return length
        length -= alignment_tokens
    return local_tokens


def _run_lengths(states: Sequence[Presence], accepted: set[Presence]) -> list[int]:
    """For each block, how many blocks up to and including it are accepted in a row."""
    lengths, run = [], 0
    for state in states:
        run = run + 1 if state in accepted else 0
        lengths.append(run)
    return lengths


def _usable(group: GroupKeys, runs: Sequence[int], length: int) -> bool:
    """Whether one group has every non-local block it attends to at ``length`` tokens."""
    stop = length // group.geometry.block_tokens
    needed = stop - max(group.first_block, group.geometry.first_needed_block(length))
    return needed <= 0 or runs[stop - 1 - group.first_block] >= needed


def _hit(groups: Sequence[GroupKeys], local_tokens: int, total_tokens: int) -> Hit:
    keys: dict[GroupId, dict[int, BlockKey]] = {}
    for group in groups:
        stop = total_tokens // group.geometry.block_tokens
        start = max(group.first_block, group.geometry.first_needed_block(total_tokens))
        keys[group.geometry.group] = {
            index: group.keys[index - group.first_block] for index in range(start, stop)
        }
    return Hit(local_tokens, total_tokens, keys)
