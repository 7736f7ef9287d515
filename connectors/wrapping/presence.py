"""What a wrapped connector was last known to have of sessions. Scheduler thread only."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from connectors.wrapping.chains import SessionChain
from spm.residency import Tier
from tracker.ids import BlockKey, SessionRef


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """Implements :class:`spm.residency_view.Residence`: these blocks are behind the connector,
    as it said ``age_s`` ago. Which tiers it has there, it does not say: they count as remote."""

    names: Collection[BlockKey]
    age_s: float

    def is_stored(self, key: BlockKey, tier: Tier) -> bool:
        """As last confirmed."""
        return tier is Tier.REMOTE and key in self.names

    def remote_age_s(self, key: BlockKey) -> float | None:
        """Since then; None: not known to be there."""
        return self.age_s if key in self.names else None


class KnownPrefixes:
    """By session, the last answer about how much of it is stored."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: dict[SessionRef, tuple[BlockKey | None, int, float]] = {}
        """Name of the last stored block, number of blocks, and when that was."""

    def note(self, ref: SessionRef, chain: SessionChain, blocks: int) -> None:
        """The first ``blocks`` logical blocks of the session's chain are stored, just now."""
        last = chain.names[blocks - 1] if blocks else None
        self._last[ref] = (last, blocks, self._clock())

    def of(self, ref: SessionRef, chain: SessionChain) -> StoredPrefix:
        """What is known; nothing if the session has gone elsewhere since."""
        last, blocks, at_s = self._last.get(ref, (None, 0, 0.0))
        if not blocks or len(chain) < blocks or chain.names[blocks - 1] != last:
            return StoredPrefix((), 0.0)
        return StoredPrefix(frozenset(chain.names[:blocks]), self._clock() - at_s)

    @property
    def total_blocks(self) -> int:
        """Of all sessions, what they share counted for each; O(sessions)."""
        return sum(blocks for _, blocks, _ in self._last.values())

    def forget(self, ref: SessionRef) -> None:
        """The session is gone, or gave its blocks up."""
        self._last.pop(ref, None)

    def clear(self) -> None:
        """Nothing is known any more."""
        self._last.clear()
