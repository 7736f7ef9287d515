"""One load into vLLM's pool for a stand-in: what it holds, how far it is, and how it can end.

Scheduler thread only; owned by :class:`connectors.wrapping.fills.PoolFills`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from connectors.wrapping.chains import SessionChain
from connectors.wrapping.stand_in import StandIn
from spm.sam.restoring import RestoredBlock

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class FillEnd(Enum):
    """How a fill ended."""

    ARRIVED = "arrived"
    """All that the connector had offered."""
    NOTHING = "nothing"
    """The connector has nothing behind what the pool has."""
    SHORT = "short"
    """Not all of it arrived."""
    LATE = "late"
    """There was no answer in time."""
    IN_STEP = "in step"
    """The connector loads within a request's own step only."""
    NO_ROOM = "no room"
    """Inference needs the blocks."""
    RAISED = "raised"
    """The connector raised."""


class StandInNews(NamedTuple):
    """Stand-ins that all ranks have answered."""

    received: set[str]
    """Their load is over."""
    sent: set[str]
    """The connector let go of their blocks."""


class FillOutcome(NamedTuple):
    """What came of one."""

    end: FillEnd
    restored: list[RestoredBlock]
    """Published just now, or found published by others meanwhile."""


class Phase(Enum):
    ASKING = 1
    """How much there is to load."""
    LOADING = 2
    """Workers may write into the blocks."""
    OVER = 3
    """All ranks have answered; the connector has not been told of the stand-in's end."""
    SAVING = 4
    """The connector has, and may still read the blocks."""


@dataclass(slots=True, eq=False)
class Fill:
    chain: SessionChain
    stop: int
    tell: Callable[[FillOutcome], None] | None
    """None: nobody wants to hear of it any more."""
    deadline_s: float
    stand_in: StandIn
    phase: Phase = Phase.ASKING
    prefix: "Sequence[KVCacheBlock]" = ()
    """Held."""
    taken: "Sequence[KVCacheBlock]" = ()
    end_tokens: int = 0
    """Of the prefix and what is to be filled."""
    ranks_left: int = 0
    """That have not said that their load is over."""
    ranks_saving: int = 0
    """That have not said that the connector is done with the blocks."""
    lost: set[int] = field(default_factory=set)
    """Blocks that some rank could not fill."""
    stale: bool = False
    """Nobody may use what arrives."""
    computed_tokens: int = 0
    """With KV, when it is over."""

    def end(self, end: FillEnd, restored: Sequence[RestoredBlock] = ()) -> None:
        """Say what came of it, once."""
        tell, self.tell = self.tell, None
        if tell is not None:
            tell(FillOutcome(end, [*restored]))
