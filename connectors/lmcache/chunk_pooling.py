"""Sessions over an LMCache whose names in Redis are known: keep-alive, deletes, residency and
confirmation by those names, everything else as over any connector.

Scheduler thread only; the store keeper's thread talks to Redis.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from connectors.lmcache.chunk_questions import ChunkQuestions
from connectors.lmcache.session_chunks import (
    CHUNK_GROUP,
    ChunkKeys,
    SessionChunks,
    chunks_covering,
    chunks_inside,
)
from connectors.scheduler.store_keeper import KeysChecked, StoreKeeper
from connectors.wrapping.chains import SessionChain
from connectors.wrapping.pooling import PoolingParts, WrappedPooling
from spm.agent_hint import BlockRange, Edit
from spm.events import BlocksAssociated, BlocksDoubted, KeysGone, KeysSeen, SessionEvicted
from spm.metrics import Metric, metric_key
from spm.operation import Operation, Status
from spm.residency import ResidencyIndex, Tier
from spm.residency_view import Residence
from tracker.ids import BlockKey, SessionRef

_KNOWN_REMOTE = metric_key(Metric.REMOTE_BLOCKS)
_ONE_CHUNK = (1,)  # chunk ranges go to the tracker as they are


@dataclass(frozen=True, slots=True)
class ChunkResidence:
    """Implements :class:`spm.residency_view.Residence` for logical blocks: each is where its
    chunk is."""

    chunk_of: Mapping[BlockKey, BlockKey]
    residency: ResidencyIndex

    def is_stored(self, key: BlockKey, tier: Tier) -> bool:
        """As last confirmed."""
        chunk = self.chunk_of.get(key)
        return chunk is not None and self.residency.is_stored(chunk, tier)

    def remote_age_s(self, key: BlockKey) -> float | None:
        """Since Redis was last asked about the chunk; None: not known to be there."""
        chunk = self.chunk_of.get(key)
        return None if chunk is None else self.residency.remote_age_s(chunk)


class ChunkPooling(WrappedPooling):
    """Of one engine. Chunks are LMCache's: several logical blocks each. What a range has of
    them is rounded inward to give up, and outward to confirm."""

    def __init__(self, parts: PoolingParts, keeper: StoreKeeper | None) -> None:
        """Takes over ``keeper``; None: no Redis is known. Names come with :meth:`use`."""
        super().__init__(parts)
        self._keep_alive = None  # by names, or by whoever derives from this
        self._keeper = keeper
        self._chunk_keys: ChunkKeys | None = None
        self._chunks: dict[SessionRef, SessionChunks] = {}
        self._unnamed: dict[SessionRef, None] = {}
        """Sessions that came while names were not known."""
        self._block_tokens = parts.geometry.alignment_tokens
        self._questions: ChunkQuestions | None = None
        if keeper is not None:
            patience_s = parts.config.load_deadline_s
            self._questions = ChunkQuestions(keeper, parts.manager, patience_s, parts.clock)

    def use(self, chunk_keys: ChunkKeys | None) -> None:
        """Chunks are named like this from now on. None: nobody knows how."""
        self._chunk_keys = chunk_keys
        self._unnamed.update(dict.fromkeys(self._chunks))
        self._chunks.clear()
        if self._keeper is not None:
            self._keeper.use(None if chunk_keys is None else chunk_keys.names)
        if chunk_keys is not None:
            waiting, self._unnamed = self._unnamed, {}
            for ref in waiting:
                chain = self._chains.get(ref)
                if chain is not None:
                    self._associate(chunk_keys, ref, chain)

    # --- what sessions consist of ------------------------------------------------------

    def _after_association(self, ref: SessionRef, chain: SessionChain) -> None:
        if self._chunk_keys is None:
            self._unnamed[ref] = None
        else:
            self._associate(self._chunk_keys, ref, chain)

    def _associate(self, chunk_keys: ChunkKeys, ref: SessionRef, chain: SessionChain) -> None:
        chunks = self._chunks.get(ref)
        if chunks is not None and chunks.is_of(chain.tokens):
            chunks.extend()
        else:
            chunks = SessionChunks(chunk_keys, chain.tokens, chain.cache_salt or "")
            self._chunks[ref] = chunks
        self._manager.handle(BlocksAssociated(ref, {CHUNK_GROUP: chunks.keys}))

    def released(self, ref: SessionRef) -> None:
        super().released(ref)
        self._chunks.pop(ref, None)
        self._unnamed.pop(ref, None)

    def was_reset(self) -> None:
        """LMCache's names stay as they are: what it has in Redis stays valid to it."""
        super().was_reset()
        self.use(self._chunk_keys)

    # --- operations --------------------------------------------------------------------

    @property
    def _can_confirm(self) -> bool:
        by_name = self._chunk_keys is not None and self._questions is not None
        return by_name or super()._can_confirm

    def confirm(
        self, ref: SessionRef, chain: SessionChain, stop: int, tell: Callable[[int | None], None]
    ) -> Callable[[], None]:
        """By what Redis has, if names are known; else by what the connector says."""
        chunks, chunk_keys = self._chunks.get(ref), self._chunk_keys
        if chunks is None or chunk_keys is None or self._questions is None:
            if super()._can_confirm:
                return super().confirm(ref, chain, stop, tell)
            tell(None)
            return _nothing
        chunk_tokens = chunk_keys.chunk_tokens
        keys = chunks.keys[: chunks_covering(stop, self._block_tokens, chunk_tokens)]
        if not keys:  # the session is shorter than a chunk
            tell(0)
            return _nothing

        def note(found: int | None) -> None:
            tell(None if found is None else min(stop, found * chunk_tokens // self._block_tokens))

        return self._questions.ask(keys, note)

    def evict(self, ref: SessionRef, edit: Edit) -> Operation:
        """As over any connector; and chunks that lie wholly in the range and that no session
        holds any more are deleted."""
        chain, length = self._chains.get(ref), self._num_blocks(ref)
        operation = super().evict(ref, edit)
        if self._chunk_keys is None or not length:
            return operation
        span = edit.blocks if edit.blocks is not None else BlockRange(0, length)
        span = BlockRange(span.start, min(span.stop, length))
        if span.start >= span.stop:
            return operation
        inside = chunks_inside(span, self._block_tokens, self._chunk_keys.chunk_tokens)
        self._manager.handle(SessionEvicted(ref, inside, _ONE_CHUNK))
        if edit.blocks is None or chain is None:
            self._chunks.pop(ref, None)
        return self._evicted(ref, edit, span, length)

    def _evicted(self, ref: SessionRef, edit: Edit, span: BlockRange, length: int) -> Operation:
        stay = self._shared_edges(span, length)
        operation = Operation(ref, edit, span.stop - span.start)
        operation.done_blocks = operation.blocks - stay
        if not stay:
            return operation.end(Status.OK)
        detail = f"{stay} blocks share a chunk of LMCache's with blocks that stay"
        return operation.end(Status.PARTIAL, detail)

    def _num_blocks(self, ref: SessionRef) -> int:
        """Logical blocks of a session whose chain or chunks are known."""
        chain, chunk_keys = self._chains.get(ref), self._chunk_keys
        if chain is not None or chunk_keys is None:
            return len(chain) if chain is not None else 0
        held = self._manager.tracker.num_blocks(ref, CHUNK_GROUP)
        return held * chunk_keys.chunk_tokens // self._block_tokens

    def _shared_edges(self, span: BlockRange, length: int) -> int:
        """Blocks of a range whose stored chunk reaches beyond the range."""
        assert self._chunk_keys is not None
        tokens, size = self._chunk_keys.chunk_tokens, self._block_tokens
        whole = length * size // tokens * tokens // size  # behind that nothing is stored
        stop = min(span.stop, whole)
        if span.start >= stop:
            return 0
        inside = chunks_inside(BlockRange(span.start, stop), size, tokens)
        covered = (inside.stop - inside.start) * tokens // size
        return stop - span.start - covered

    def external_blocks(self, ref: SessionRef, chain: SessionChain) -> Residence:
        known = super().external_blocks(ref, chain)
        chunks = self._chunks.get(ref)
        if chunks is None or self._chunk_keys is None or self._keeper is None:
            return known
        size, tokens = self._block_tokens, self._chunk_keys.chunk_tokens
        chunk_of = {
            name: chunks.keys[at * size // tokens]
            for at, name in enumerate(chain.names)
            if at * size // tokens < len(chunks.keys)
        }
        return ChunkResidence(chunk_of, self._manager.residency)

    # --- a step ------------------------------------------------------------------------

    def tick(self) -> None:
        super().tick()
        if self._manager.has_key_news:
            self._pass_on()
        if self._keeper is None or self._questions is None:
            return
        for news in self._keeper.poll():
            if isinstance(news, KeysChecked):
                self._questions.checked(news.number, news.present)
            elif isinstance(news, KeysSeen):
                self._manager.handle(news)
                self._seen(news)
            elif isinstance(news, KeysGone):
                self._manager.handle(news)
                self._gone(news)
        self._questions.tick()

    def _pass_on(self) -> None:
        """Which keys are to be kept alive, which no longer, and which may go."""
        for keys, until_s in self._manager.take_holds():
            self._hold(keys, until_s)
        self._drop(self._manager.take_released())
        deletable = self._manager.take_deletable()
        if deletable:
            self._drop(deletable)  # a touch would take a delete back
            self._delete(deletable)
            self._manager.handle(BlocksDoubted(deletable))

    def _hold(self, keys: Sequence[BlockKey], until_s: float) -> None:
        if self._keeper is not None:
            self._keeper.hold(keys, until_s)

    def _drop(self, keys: Sequence[BlockKey]) -> None:
        if self._keeper is not None:
            self._keeper.drop(keys)

    def _delete(self, keys: Sequence[BlockKey]) -> None:
        """Nobody on this engine holds these."""
        if self._keeper is not None:
            self._keeper.delete(keys)

    def _seen(self, news: KeysSeen) -> None:
        """Keep-alive found these."""

    def _gone(self, news: KeysGone) -> None:
        """Keep-alive missed these."""

    @property
    def has_pending_work(self) -> bool:
        asks = self._questions is not None and self._questions.pending
        return asks or super().has_pending_work

    # --- what is told ------------------------------------------------------------------

    def sizes(self) -> tuple[int, ...]:
        return (*super().sizes(), self._manager.residency.num_remote_keys)

    def gauges(self) -> dict[str, float]:
        kept = self._keeper.gauges() if self._keeper is not None else {}
        known = {_KNOWN_REMOTE: float(self._manager.residency.num_remote_keys)}
        return {**super().gauges(), **known, **kept}

    def close(self) -> None:
        super().close()
        if self._keeper is not None:
            self._keeper.close()

    def check_integrity(self, *, idle: bool) -> None:
        super().check_integrity(idle=idle)
        if self._keeper is not None:
            self._keeper.check_integrity()


def _nothing() -> None:
    """There is nothing to withdraw."""
