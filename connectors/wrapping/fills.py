"""One load at a time into free blocks of vLLM's pool, asked for on behalf of a stand-in.

The stand-in is a session's prefix. What vLLM's pool has of it is held where it is, the rest
goes into blocks taken for it, which become ordinary cached blocks when every rank has them.
Scheduler thread only.

Workers may write into the blocks until every rank has answered: until then they belong to
nobody else, whatever becomes of whoever wanted them.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from connectors.scheduler.gpu_pool import GpuPool
from connectors.scheduler.pool_room import PoolRoom
from connectors.wrapping.chains import SessionChain
from connectors.wrapping.envelope import FillCommand, FillResult
from connectors.wrapping.fill_state import Fill, FillEnd, FillOutcome, Phase, StandInNews
from connectors.wrapping.stand_in import StandIns
from spm.errors import ConnectorError, IntegrityError
from spm.sam.restoring import RestoredBlock
from tracker.ids import BlockKey

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_GRACE = 5
"""Deadlines more for which an idle engine looks for a late answer."""


class PoolFills:
    """Those of one engine: at most one that goes on, and for as long as a connector owes an
    answer to one that was given up, none that begins."""

    def __init__(
        self,
        stand_ins: StandIns,
        room: PoolRoom,
        ranks: Callable[[], int],
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        """``ranks``: that tell of each load."""
        self._stand_ins = stand_ins
        self._room = room
        self._ranks = ranks
        self._patience_s = deadline_s
        self._clock = clock
        self.pool: GpuPool | None = None
        """None: nothing can be put into vLLM's pool. Set before the first step."""
        self.loads_in_step = False
        """The connector was found to load within a request's own step only."""
        self._fill: Fill | None = None
        self._on_way: frozenset[BlockKey] = frozenset()
        """Blocks that requests may wait for."""

    # --- asking ------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a fill goes on."""
        return self._fill is not None

    @property
    def overdue(self) -> bool:
        """Whether the connector owes an answer for too long: steps go on without it."""
        return self._fill is not None and self._clock() >= self._fill.deadline_s

    @property
    def is_loading(self) -> bool:
        """Whether workers may be writing into blocks."""
        return self._fill is not None and self._fill.phase is Phase.LOADING

    @property
    def num_blocks(self) -> int:
        """That are taken."""
        return len(self._fill.taken) if self._fill is not None else 0

    def room(self, wanted: int, promised: int) -> int:
        """Blocks that a prefetch may take, beside those that others were promised."""
        return self._room.offer(self.pool, wanted, promised) if self.pool is not None else 0

    def start(self, chain: SessionChain, stop: int, tell: Callable[[FillOutcome], None]) -> None:
        """Bring the chain's first ``stop`` logical blocks into the pool. ``tell`` hears once what
        came of it, maybe at once, and begins no other then. In a step, and only if not
        :attr:`busy`."""
        assert self._fill is None
        try:
            stand_in = self._stand_ins.new(chain, stop)
        except ConnectorError:
            tell(FillOutcome(FillEnd.RAISED, []))
            return
        self._fill = Fill(chain, stop, tell, self._clock() + self._patience_s, stand_in)

    def local_blocks(self, chain: SessionChain, stop: int) -> "list[KVCacheBlock]":
        """What the pool has of the chain's first ``stop`` blocks, without a hole."""
        found: list[KVCacheBlock] = []
        for key in chain.keys[:stop]:
            block = self.pool.find(key) if self.pool is not None else None
            if block is None:
                break
            found.append(block)
        return found

    def awaits(self, key: BlockKey) -> bool:
        """Whether the block is on its way into the pool, and due soon."""
        return key in self._on_way

    # --- a step ------------------------------------------------------------------------

    def step(self) -> list[FillCommand]:
        """Once a step, after vLLM has scheduled it; returns what workers are to know."""
        fill = self._fill
        if fill is None:
            return []
        commands: list[FillCommand] = []
        if fill.phase is Phase.ASKING:
            commands = self._ask(fill)
        elif fill.phase is Phase.LOADING and self.overdue and not fill.stand_in.finished:
            fill.stale, self._on_way = True, frozenset()
            fill.end(FillEnd.LATE)
            self._finish(fill)  # as a request that is aborted while it waits
        if fill.phase is Phase.OVER:
            self._finish(fill)
            fill.phase = Phase.SAVING
        self._let_go(fill)
        return commands

    def _ask(self, fill: Fill) -> list[FillCommand]:
        if not self._stand_ins.works:
            self._give_up(fill, FillEnd.RAISED)
            return []
        local = self.local_blocks(fill.chain, fill.stop)
        local_tokens = len(local) * self._stand_ins.block_tokens
        try:
            tokens, beside_steps = fill.stand_in.ask(local_tokens)
            if tokens is None:
                if self.overdue:
                    self._give_up(fill, FillEnd.LATE)
                return []
            end_blocks = (local_tokens + tokens) // self._stand_ins.block_tokens
            why = None if beside_steps and end_blocks > len(local) else FillEnd.NOTHING
            if fill.stale or fill.tell is None:  # the answer was waited for: it frees its locks
                why = FillEnd.NOTHING
            elif tokens and not beside_steps:
                why, self.loads_in_step = FillEnd.IN_STEP, True
            if why is None and self._begin(fill, local, local_tokens + tokens):
                return self._command(fill)
            fill.stand_in.decline(tokens)
            self._give_up(fill, why or FillEnd.NO_ROOM)
        except ConnectorError:
            self._give_up(fill, FillEnd.RAISED)
        return []

    def _begin(self, fill: Fill, local: "list[KVCacheBlock]", end_tokens: int) -> bool:
        """Hold the prefix, take what is to be filled; False: there is no room."""
        pool, block_tokens = self.pool, self._stand_ins.block_tokens
        count = -(-end_tokens // block_tokens) - len(local)
        if pool is None or count > fill.stop - len(local):
            return False
        pool.hold(local)  # first: what is free now may be what is taken next
        if not self._room.has(pool, count):
            pool.let_go(local)
            return False
        fill.prefix, fill.taken, fill.end_tokens = local, pool.take(count), end_tokens
        fill.phase, fill.ranks_left = Phase.LOADING, self._ranks()
        self._on_way = frozenset(fill.chain.keys[len(local) : end_tokens // block_tokens])
        return True

    def _command(self, fill: Fill) -> list[FillCommand]:
        """Let the connector load. If it raises, nobody knows whether it will: the blocks stay
        taken until it says so."""
        prefix_ids = tuple(block.block_id for block in fill.prefix)
        ids = tuple(block.block_id for block in fill.taken)
        tokens = fill.end_tokens - len(prefix_ids) * self._stand_ins.block_tokens
        try:
            fill.stand_in.allocate((*fill.prefix, *fill.taken), tokens)
        except ConnectorError:
            fill.stale, fill.deadline_s, self._on_way = True, self._clock(), frozenset()
            fill.end(FillEnd.RAISED)
            self._finish(fill)
        return [FillCommand(fill.stand_in.id, ids, prefix_ids)]

    def _give_up(self, fill: Fill, why: FillEnd) -> None:
        """Nothing is being loaded for it."""
        self._finish(fill)
        fill.phase = Phase.SAVING
        fill.end(why)

    def _finish(self, fill: Fill) -> None:
        """The connector hears that the stand-in is over; once."""
        if fill.stand_in.finish(fill.computed_tokens) and fill.taken:
            fill.ranks_saving = self._ranks()
            if fill.phase is Phase.OVER:
                fill.deadline_s = self._clock() + self._patience_s

    def _let_go(self, fill: Fill) -> None:
        """Give the blocks back if nobody writes or reads them for the connector any more."""
        if fill.phase is not Phase.SAVING or fill.ranks_left or fill.ranks_saving:
            return
        if self.pool is not None:
            self.pool.give_back([block.block_id for block in fill.taken])
            self.pool.let_go(fill.prefix)
        self._fill = None

    # --- answers -----------------------------------------------------------------------

    def take_results(self, results: Sequence[FillResult]) -> StandInNews:
        """Workers' news of one step."""
        news = StandInNews(set(), set())
        for result in results:
            fill = self._fill
            if fill is None or result.request_id != fill.stand_in.id:
                continue  # a stand-in that loaded nothing
            fill.lost.update(result.failed_block_ids)
            if result.failed:
                fill.lost.update(block.block_id for block in fill.taken)
            if result.loaded and fill.ranks_left:
                fill.ranks_left -= 1
                if not fill.ranks_left:
                    news.received.add(result.request_id)
                    self._arrived(fill)
            if result.saved and fill.ranks_saving:
                fill.ranks_saving -= 1
                if not fill.ranks_saving:
                    news.sent.add(result.request_id)
            self._let_go(fill)
        return news

    def _arrived(self, fill: Fill) -> None:
        """Every rank has answered: what all of them have becomes ordinary cached blocks."""
        fill.phase = Phase.OVER
        if fill.stand_in.finished:  # as aborted while it waited: vLLM frees the blocks now
            fill.phase, fill.ranks_saving = Phase.SAVING, 0
        self._on_way = frozenset()
        if fill.stale or self.pool is None:
            fill.end(FillEnd.SHORT)
            return
        block_tokens, first = self._stand_ins.block_tokens, len(fill.prefix)
        full = fill.end_tokens // block_tokens - first
        ids = [block.block_id for block in fill.taken[:full]]
        good = next((at for at, one in enumerate(ids) if one in fill.lost), full)
        restored = []
        for at, block_id in enumerate(ids[:good], start=first):
            key = fill.chain.keys[at]
            block = self.pool.publish(key, block_id, (at + 1) * block_tokens)
            restored.append(RestoredBlock(0, at, block))
        fill.computed_tokens = (first + good) * block_tokens
        fill.end(FillEnd.ARRIVED if good == full else FillEnd.SHORT, restored)

    def abandon(self) -> None:
        """Nobody wants to hear of it any more; what arrives is good all the same."""
        if self._fill is not None:
            self._fill.tell = None

    def cancel(self) -> None:
        """Nothing that is on its way may be used (a reset)."""
        if self._fill is not None:
            self._fill.stale, self._fill.tell = True, None
        self._on_way = frozenset()

    @property
    def pending(self) -> bool:
        """Whether steps are needed to bring it to an end. While workers may use the blocks, for
        some time more than was given: a pause or a reset has to wait for them."""
        fill = self._fill
        if fill is None:
            return False
        owed = (fill.ranks_left or fill.ranks_saving) and self._stand_ins.works
        grace_s = _GRACE * self._patience_s if owed else 0.0
        return self._clock() < fill.deadline_s + grace_s

    def check_integrity(self) -> None:
        """Raise :class:`IntegrityError` if blocks were lost."""
        if self.pool is None:
            return
        self.pool.check_integrity(lent=True)
        if self.num_blocks != self.pool.num_taken:
            raise IntegrityError(
                f"{self.pool.num_taken} blocks taken, {self.num_blocks} being filled"
            )
