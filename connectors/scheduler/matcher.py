"""Answers vLLM's "how much of this prompt do you have?" from memory, asking the remote
store in the background when that would make a difference."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from connectors.groups import CacheGeometry
from connectors.scheduler.hit_planner import GroupKeys, HitPlan, Presence, plan_hit
from connectors.scheduler.lookup import LookupQuery, LookupService
from connectors.scheduler.records import PendingLookup, RequestRecord
from connectors.scheduler.reload_choice import ReloadChoice
from connectors.scheduler.store_health import StoreHealth
from spm.events import BlocksConfirmed, BlocksDoubted
from spm.keys import KeySpace, Rank
from spm.manager import SessionAwarePoolingManager
from spm.metrics import Counters, Metric
from spm.residency import Tier
from tracker.ids import BlockKey

if TYPE_CHECKING:
    from vllm.v1.request import Request


class HitMatcher:
    """Owned by the scheduler thread. ``lookups`` is ``None`` without a remote store, and so
    are ``health`` and ``choice``, which say when it is not worth a thought."""

    def __init__(
        self,
        geometry: CacheGeometry,
        manager: SessionAwarePoolingManager,
        lookups: LookupService | None,
        lookup_deadline_s: float,
        world_size: int,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
        health: StoreHealth | None = None,
        choice: ReloadChoice | None = None,
        size_of: Callable[[BlockKey], int] = lambda key: 0,
    ) -> None:
        """``size_of``: bytes of a block's largest value."""
        self._geometry = geometry
        self._manager = manager
        self._lookups = lookups
        self._lookup_deadline_s = lookup_deadline_s
        self._world_size = world_size
        self._counters = counters
        self._clock = clock
        self._health = health
        self._choice = choice
        self._size_of = size_of
        self._last_number = 0

    def match(
        self, record: RequestRecord, local_tokens: int, key_space: KeySpace
    ) -> tuple[int | None, bool]:
        """``(tokens beyond local_tokens, True)``, ``(0, False)``, or ``(None, False)`` for
        "ask again next step". Leaves the plan in ``record.hit``."""
        record.hit = None
        if not record.request.num_preemptions:
            record.gpu_tokens = local_tokens
        limit = self.loadable_tokens(record.request)
        if record.external_refused or record.job_id is not None or limit <= local_tokens:
            return 0, False
        usable = self._health is None or self._health.usable
        if record.lookup is not None:
            if not usable:
                record.lookup = None  # whatever the answer is, nothing will be loaded
            elif self._clock() < record.lookup.deadline_s:
                return None, False
        plan = self._plan(record, local_tokens, limit, usable=usable)
        if plan.unknown and self._must_wait(record, plan.unknown, key_space):
            return None, False
        if plan.hit.external_tokens <= 0:
            return 0, False
        record.hit = plan.hit
        return plan.hit.external_tokens, True

    def loadable_tokens(self, request: "Request") -> int:
        """Longest prefix of a request that need not be computed."""
        limit = request.num_tokens - 1  # one token is left to compute, as in vLLM
        return limit - limit % self._geometry.alignment_tokens

    def group_keys(self, request: "Request", local: int, limit: int) -> list[GroupKeys]:
        """By group: keys of the blocks between two lengths in tokens."""
        result = []
        for group in self._geometry.groups:
            first, stop = local // group.block_tokens, limit // group.block_tokens
            keys = self._geometry.keys_of(request, group, first, stop)
            result.append(GroupKeys(group, first, keys))
        return result

    # --- with the remote store, or without it -------------------------------------------

    def _plan(
        self, record: RequestRecord, local_tokens: int, limit: int, *, usable: bool
    ) -> HitPlan:
        """As if there were no remote store while it is left alone, and where computing is
        faster than what it would supply."""
        groups = self.group_keys(record.request, local_tokens, limit)
        alignment = self._geometry.alignment_tokens
        plan = plan_hit(groups, local_tokens, alignment, self._presence(record))
        size_bytes = self._remote_bytes(plan)
        if size_bytes is None:
            return plan
        if usable and not self._may_be_slow(record, size_bytes, plan):
            return plan
        near = plan_hit(groups, local_tokens, alignment, self._near_presence)
        if usable:
            assert self._choice is not None
            # Nobody knows yet how much of what is unknown is there: all of it, say.
            longest = limit if plan.unknown else plan.hit.total_tokens
            tokens, asks = longest - near.hit.total_tokens, bool(plan.unknown)
            if self._choice.favours_load(size_bytes, tokens, asks=asks):
                return plan
            if self._choice.grant_trial():
                record.tries_remote = True
                return plan
        if not record.remote_skipped:
            record.remote_skipped = True
            why = "slow" if usable else "breaker"
            self._counters.add(Metric.REMOTE_SKIPPED, label=why)
        return near

    def _may_be_slow(self, record: RequestRecord, size_bytes: int, plan: HitPlan) -> bool:
        if self._choice is None or record.tries_remote:
            return False
        return self._choice.may_be_slow(size_bytes, asks=bool(plan.unknown))

    def _remote_bytes(self, plan: HitPlan) -> int | None:
        """What the remote store would be read for, or asked about; None: nothing."""
        tier_of = self._manager.residency.tier_of
        planned = (key for keys in plan.hit.keys.values() for key in keys.values())
        remote = [key for key in planned if tier_of(key) is not Tier.HOST]
        remote += plan.unknown
        return sum(map(self._size_of, remote)) if remote else None

    def _near_presence(self, key: BlockKey) -> Presence:
        held = self._manager.residency.tier_of(key) is Tier.HOST
        return Presence.HELD if held else Presence.ABSENT

    def _presence(self, record: RequestRecord) -> Callable[[BlockKey], Presence]:
        """A request asks the remote store at most once; then unknown means absent."""
        otherwise = Presence.ABSENT
        if self._lookups is not None and not record.lookup_done:
            otherwise = Presence.UNKNOWN
        tier_of = self._manager.residency.tier_of
        return lambda key: Presence.HELD if tier_of(key) is not None else otherwise

    def _must_wait(
        self, record: RequestRecord, unknown: Sequence[BlockKey], key_space: KeySpace
    ) -> bool:
        """Submit the query once, then wait for its answer a bounded time."""
        if record.lookup is None:
            record.lookup = self._submit(record, unknown, key_space)
        elif self._clock() >= record.lookup.deadline_s:
            self._counters.add(Metric.LOOKUPS, label="late")
            record.lookup = None
            if self._choice is not None:
                self._choice.looked_up(self._lookup_deadline_s)
        record.lookup_done = record.lookup is None
        return record.lookup is not None

    def _submit(
        self, record: RequestRecord, unknown: Sequence[BlockKey], key_space: KeySpace
    ) -> PendingLookup | None:
        assert self._lookups is not None
        ranks = [Rank(rank) for rank in range(self._world_size)]
        self._last_number += 1
        now_s = self._clock()
        query = LookupQuery(
            self._last_number,
            record.request.request_id,
            tuple(unknown),
            tuple(tuple(key_space.store_key(key, rank) for rank in ranks) for key in unknown),
            now_s + self._lookup_deadline_s,
            now_s,
        )
        if not self._lookups.submit(query):
            return None
        return PendingLookup(query.number, query.deadline_s)

    def take_answers(self, records: Mapping[str, RequestRecord]) -> None:
        """Apply answers that arrived; those nobody waits for any more are dropped."""
        for answer in self._lookups.poll() if self._lookups is not None else ():
            record = records.get(answer.query.request_id)
            if record is None or record.lookup is None:
                continue
            if record.lookup.number != answer.query.number:
                continue
            in_vain = answer.present is None and self._clock() >= record.lookup.deadline_s
            record.lookup, record.lookup_done = None, True
            if in_vain and self._choice is not None:
                self._choice.looked_up(self._lookup_deadline_s)
            if answer.present is not None:
                if self._choice is not None:
                    self._choice.looked_up(answer.answered_s - answer.query.asked_s)
                pairs = list(zip(answer.query.keys, answer.present, strict=True))
                self._manager.handle(BlocksConfirmed([key for key, here in pairs if here]))
                self._manager.handle(BlocksDoubted([key for key, here in pairs if not here]))

    def close(self) -> None:
        """Stop the lookup thread."""
        if self._lookups is not None:
            self._lookups.close()
