"""Where a session's blocks are, by logical block: what ``GET /v1/sessions/{id}`` shows.

Pure, on the scheduler thread; costs time in proportion to the session's blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spm.residency import ResidencyIndex, Tier
from tracker.ids import BlockKey, GroupId

MAX_RANGES = 256
"""Ranges shown of one session."""

_GPU, _HOST, _REMOTE = 1, 2, 4
_NAMES = {_GPU: "gpu", _HOST: Tier.HOST.value, _REMOTE: Tier.REMOTE.value}
_UNTOLD = -1
"""All bits: in whatever tiers its parts will turn out to be."""


class Residence(Protocol):
    """What a view needs to know of blocks; :class:`spm.residency.ResidencyIndex` knows it."""

    def is_stored(self, key: BlockKey, tier: Tier) -> bool: ...

    def remote_age_s(self, key: BlockKey) -> float | None: ...


@dataclass(frozen=True, slots=True)
class AsWritten:
    """A session of another engine: in the remote store when its manifest was written, ``age_s``
    ago, unless this engine knows better."""

    known: ResidencyIndex
    age_s: float

    def is_stored(self, key: BlockKey, tier: Tier) -> bool:
        """As the index has it; nothing else is known of the host tier."""
        return self.known.is_stored(key, tier)

    def remote_age_s(self, key: BlockKey) -> float:
        """Since this engine's own confirmation, or else the other's."""
        age_s = self.known.remote_age_s(key)
        return self.age_s if age_s is None else age_s


@dataclass(slots=True)
class _Run:
    """Consecutive logical blocks from one start on, all of them in ``tiers``."""

    length: int
    tiers: int
    size_bytes: int
    age_s: float

    def hold(self, tiers: int, size_bytes: int, age_s: float) -> None:
        """Something in it is in these tiers."""
        self.tiers &= tiers
        self.size_bytes += size_bytes
        self.age_s = max(self.age_s, age_s)

    def add(self, other: "_Run") -> None:
        """``other`` follows this run."""
        self.length += other.length
        self.hold(other.tiers, other.size_bytes, other.age_s)


@dataclass(frozen=True, slots=True)
class ResidencyRange:
    """The logical blocks ``[block_start, block_end)``, each of which is in all of ``tiers``."""

    block_start: int
    block_end: int
    tiers: tuple[str, ...]
    size_bytes: int
    """Of one copy."""
    age_s: float | None
    """Since the oldest confirmation by the remote store; None if that is not among the tiers."""

    def to_wire(self) -> dict[str, Any]:
        """As applications see it."""
        return {
            "block_start": self.block_start,
            "block_end": self.block_end,
            "tiers": list(self.tiers),
            "bytes": self.size_bytes,
            "age_s": _rounded(self.age_s),
        }


@dataclass(frozen=True, slots=True)
class ResidencyView:
    """Logical blocks and bytes by tier, and the ranges the session consists of.

    A block counts as in a tier when all its parts that the session holds are: those of every
    KV cache group, holes left out. Of a block the session holds nothing of, it is in none.
    With more than :data:`MAX_RANGES` runs, ranges are made of 2, 4, 8... blocks each and
    name only the tiers that have all of these; the sums stay exact.
    """

    blocks: dict[str, int]
    size_bytes: dict[str, int]
    age_s: float | None
    """Since the oldest confirmation by the remote store of a block that is there."""
    ranges: tuple[ResidencyRange, ...]

    def to_wire(self) -> dict[str, Any]:
        """As applications see it."""
        return {
            **self.blocks,
            **{f"{tier}_bytes": size for tier, size in self.size_bytes.items()},
            "age_s": _rounded(self.age_s),
            "ranges": [one.to_wire() for one in self.ranges],
        }


def residency_view(
    groups: Sequence[Sequence[BlockKey | None]],
    scales: Sequence[int],
    block_bytes: Sequence[int],
    residency: Residence,
    in_gpu: Callable[[GroupId, int], bool],
) -> ResidencyView:
    """The view of one session.

    ``groups``: its keys by KV cache group and index; ``scales`` and ``block_bytes``: by group,
    its blocks in one logical block, and the size of one. ``in_gpu``: whether the session's
    block at this group and index is in the GPU pool.
    """
    lengths = [-(-len(keys) // scale) for keys, scale in zip(groups, scales, strict=True)]
    singles = [_Run(1, _UNTOLD, 0, 0.0) for _ in range(max(lengths, default=0))]
    for index, (keys, scale) in enumerate(zip(groups, scales, strict=True)):
        group, part_bytes = GroupId(index), block_bytes[index]
        for position, key in enumerate(keys):
            if key is not None:
                tiers, age_s = _where(key, residency, in_gpu(group, position))
                singles[position // scale].hold(tiers, part_bytes, age_s)
    for single in singles:
        if single.tiers == _UNTOLD:
            single.tiers = 0
    remote = [single.age_s for single in singles if single.tiers & _REMOTE]
    return ResidencyView(
        blocks={n: sum(1 for s in singles if s.tiers & bit) for bit, n in _NAMES.items()},
        size_bytes={
            n: sum(s.size_bytes for s in singles if s.tiers & bit) for bit, n in _NAMES.items()
        },
        age_s=max(remote, default=None),
        ranges=_ranges(_at_most(MAX_RANGES, singles)),
    )


def _where(key: BlockKey, residency: Residence, in_gpu: bool) -> tuple[int, float]:
    tiers = _GPU if in_gpu else 0
    if residency.is_stored(key, Tier.HOST):
        tiers |= _HOST
    age_s = residency.remote_age_s(key)
    return (tiers, 0.0) if age_s is None else (tiers | _REMOTE, age_s)


def _at_most(limit: int, singles: list[_Run]) -> list[_Run]:
    """Runs of blocks in the same tiers; for want of place, of ever larger pieces."""
    pieces = singles
    while True:
        runs: list[_Run] = []
        for piece in pieces:
            if runs and runs[-1].tiers == piece.tiers:
                runs[-1].add(piece)
            else:
                runs.append(_Run(piece.length, piece.tiers, piece.size_bytes, piece.age_s))
        if len(runs) <= limit:
            return runs
        pieces = [_joined(pieces[start : start + 2]) for start in range(0, len(pieces), 2)]


def _joined(pieces: list[_Run]) -> _Run:
    joined, *others = pieces
    for piece in others:
        joined.add(piece)
    return joined


def _ranges(runs: list[_Run]) -> tuple[ResidencyRange, ...]:
    ranges, start = [], 0
    for run in runs:
        tiers = tuple(name for bit, name in _NAMES.items() if run.tiers & bit)
        age_s = run.age_s if run.tiers & _REMOTE else None
        ranges.append(ResidencyRange(start, start + run.length, tiers, run.size_bytes, age_s))
        start += run.length
    return tuple(ranges)


def _rounded(age_s: float | None) -> float | None:
    return None if age_s is None else round(age_s, 3)
