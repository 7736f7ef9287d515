"""What is in the host and remote tiers, as vLLM KV events for KV-aware routers.

In the shape of vLLM's own offloading connector without self-describing events: a block is
named by its hash, its group and the medium. Blocks of a LoRA adapter are stored under hashes
of ours (salted by the adapter's weights), which routers will not know.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import BlockHash, ExternalBlockHash, maybe_convert_block_hash
from vllm.v1.kv_offload.base import Locality

from spm.residency import Tier
from tracker.ids import BlockKey, GroupId, SessionRef, split_block_key

_MEDIUM = {Tier.HOST: MEDIUM_CPU, Tier.REMOTE: MEDIUM_STORAGE}
_LOCALITY = {Tier.HOST: Locality.LOCAL.value, Tier.REMOTE: Locality.REMOTE.value}

_Place = tuple[BlockKey, Tier]


class TierEvents:
    """Listens to the residency index between steps. Scheduler thread only.

    A block that came and went, or went and came, since the last step is not told of. What
    is dropped for the bound leaves a router with outdated advice, nothing worse.

    After a reset every block is told to be gone, over several steps and before anything new.
    vLLM's ``AllBlocksCleared`` would not do: it is about the GPU pool as well, whose own
    events of the same step come before ours.
    """

    def __init__(self, *, enabled: bool, max_pending: int = 65_536, max_taken: int = 4096) -> None:
        """``enabled``: whether vLLM publishes KV events; otherwise nothing is kept.

        ``max_pending``: changes of each direction remembered until they are taken; beyond,
        the oldest are dropped. ``max_taken``: changes told in one step, so that a mass
        eviction cannot stall the scheduler.
        """
        self._enabled = enabled
        self._max_pending = max_pending
        self._max_taken = max_taken
        self._lost: Iterator[_Place] | None = None
        """All that a router may believe to be there since before a reset."""
        self._came: OrderedDict[_Place, None] = OrderedDict()
        self._went: OrderedDict[_Place, None] = OrderedDict()
        self._prefetched: deque[tuple[BlockKey, SessionRef | None]] = deque(maxlen=max_pending)

    def prefetched(self, key: BlockKey, ref: SessionRef | None) -> None:
        """A block was put into the GPU pool without a request, for a session if it still wants
        it; its removal is told by vLLM itself."""
        if self._enabled:
            self._prefetched.append((key, ref))

    def changed(self, key: BlockKey, tier: Tier, present: bool) -> None:
        """All ranks' values of ``key`` are known to be in ``tier`` now, or no longer are."""
        if not self._enabled:
            return
        place = (key, tier)
        told, undone = (self._came, self._went) if present else (self._went, self._came)
        if place in undone:
            del undone[place]
            return
        told[place] = None
        if len(told) > self._max_pending:
            told.popitem(last=False)

    def cleared(self, held: Mapping[Tier, Iterable[BlockKey]]) -> None:
        """Nothing is anywhere any more; ``held`` is what was."""
        if not self._enabled:
            return
        went, self._went = self._went, OrderedDict()
        self._came.clear()
        if self._lost is None:  # else nothing has been told of since the last reset
            places = ((key, tier) for tier, keys in held.items() for key in keys)
            self._lost = chain(went, places)

    def take(self) -> list[KVCacheEvent]:
        """What has changed since the last call; the rest with the next if it is very much."""
        gone: list[_Place] = []
        if self._lost is not None:
            gone += islice(self._lost, self._max_taken)
            if len(gone) < self._max_taken:
                self._lost = None
        gone += _take(self._went, self._max_taken - len(gone))
        came = _take(self._came, self._max_taken - len(gone))
        moved = [*_removed(gone), *(_stored(key, tier) for key, tier in came)]
        room = min(self._max_taken, len(self._prefetched))
        return moved + [_published(*self._prefetched.popleft()) for _ in range(room)]


def _take(places: OrderedDict[_Place, None], limit: int) -> list[_Place]:
    return [places.popitem(last=False)[0] for _ in range(min(limit, len(places)))]


def _named(key: BlockKey) -> tuple[ExternalBlockHash, GroupId]:
    block_hash, group = split_block_key(key)
    return maybe_convert_block_hash(BlockHash(block_hash)), group


def _stored(key: BlockKey, tier: Tier) -> BlockStored:
    block_hash, group = _named(key)
    return BlockStored(
        block_hashes=[block_hash],
        parent_block_hash=None,
        token_ids=[],
        block_size=0,
        lora_id=None,
        medium=_MEDIUM[tier],
        lora_name=None,
        group_idx=group,
        locality=_LOCALITY[tier],
    )


def _published(key: BlockKey, ref: SessionRef | None) -> BlockStored:
    block_hash, group = _named(key)
    return BlockStored(
        block_hashes=[block_hash],
        parent_block_hash=None,
        token_ids=[],
        block_size=0,
        lora_id=None,
        medium=MEDIUM_GPU,
        lora_name=None,
        group_idx=group,
        session_id=ref.session_id if ref is not None else None,
    )


def _removed(places: list[_Place]) -> list[BlockRemoved]:
    """One event for each tier and group."""
    hashes: dict[tuple[Tier, GroupId], list[ExternalBlockHash]] = {}
    for key, tier in places:
        block_hash, group = _named(key)
        hashes.setdefault((tier, group), []).append(block_hash)
    return [
        BlockRemoved(
            block_hashes=gone,
            medium=_MEDIUM[tier],
            group_idx=group,
            locality=_LOCALITY[tier],
        )
        for (tier, group), gone in hashes.items()
    ]
