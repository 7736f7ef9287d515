"""What the scheduler half remembers of one request, from arrival to its end."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from connectors.scheduler.hit_planner import Hit
from spm.residency import Tier
from tracker.ids import BlockKey, GroupId, SessionRef

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class PendingLookup:
    """An existence query on its way; answers to any other ``number`` are stale."""

    number: int
    deadline_s: float


@dataclass(slots=True)
class RequestRecord:
    """Owned by the scheduler thread; created at arrival, dropped when vLLM says finished."""

    request: "Request"
    session: SessionRef | None
    considered_blocks: list[int]
    """By group: blocks below this index need no more thought about saving."""
    published: dict[GroupId, set[int]] = field(default_factory=dict)
    """Of groups with a sliding window: indexes of the blocks that vLLM has published."""
    lookup: PendingLookup | None = None
    lookup_done: bool = False
    """The remote store was asked once (or did not answer in time) for this request."""
    remote_skipped: bool = False
    """Served, at least once, as if there were no remote store; counted."""
    tries_remote: bool = False
    """Sent to find out whether the remote store has become faster than computing."""
    hit: Hit | None = None
    """Last plan given to vLLM, until blocks are allocated for it."""
    job_id: int | None = None
    """Load in flight; its result clears it."""
    loaded: bool = False
    """A load of ours has ended and none has begun since."""
    external_refused: bool = False
    """A load failed: what is missing now is recomputed, never asked for again."""
    gpu_tokens: int = 0
    loaded_tokens: dict[Tier, int] = field(default_factory=dict)

    def note_loaded(self, tokens: dict[Tier, int]) -> None:
        """Where the prompt came from: what happens after a preemption says nothing about it,
        as in vLLM's own statistics."""
        if not self.request.num_preemptions:
            self.loaded_tokens = tokens


@dataclass(slots=True)
class LoadJob:
    """A load in flight, waiting for one answer from every rank."""

    request_id: str
    ranks_left: int
    counted_keys: dict[BlockKey, int]
    """Keys of the group that token counts are taken from, in order, and the tokens each
    stands for: the first also for those that a sliding window has left behind."""
    keys: tuple[BlockKey, ...] = ()
    """All that are loaded."""
    failed: bool = False
    failed_keys: set[BlockKey] = field(default_factory=set)
    remote_keys: set[BlockKey] = field(default_factory=set)
