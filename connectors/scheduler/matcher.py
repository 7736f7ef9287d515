"""Answers vLLM's "how much of this prompt do you have?" from memory, asking the remote
store in the background when that would make a difference."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from connectors.groups import CacheGeometry
from connectors.scheduler.hit_planner import GroupKeys, Presence, plan_hit
from connectors.scheduler.lookup import LookupQuery, LookupService
from connectors.scheduler.records import PendingLookup, RequestRecord
from spm.events import BlocksConfirmed, BlocksDoubted
from spm.keys import KeySpace, Rank
from spm.manager import SessionAwarePoolingManager
from spm.metrics import Counters, Metric
from tracker.ids import BlockKey

if TYPE_CHECKING:
    from vllm.v1.request import Request


class HitMatcher:
    """Owned by the scheduler thread. ``lookups`` is ``None`` without a remote store."""

    def __init__(
        self,
        geometry: CacheGeometry,
        manager: SessionAwarePoolingManager,
        lookups: LookupService | None,
        lookup_deadline_s: float,
        world_size: int,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._geometry = geometry
        self._manager = manager
        self._lookups = lookups
        self._lookup_deadline_s = lookup_deadline_s
        self._world_size = world_size
        self._counters = counters
        self._clock = clock
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
        if record.lookup is not None and self._clock() < record.lookup.deadline_s:
            return None, False
        plan = plan_hit(
            self.group_keys(record.request, local_tokens, limit),
            local_tokens,
            self._geometry.alignment_tokens,
            self._presence(record),
        )
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
        record.lookup_done = record.lookup is None
        return record.lookup is not None

    def _submit(
        self, record: RequestRecord, unknown: Sequence[BlockKey], key_space: KeySpace
    ) -> PendingLookup | None:
        assert self._lookups is not None
        ranks = [Rank(rank) for rank in range(self._world_size)]
        self._last_number += 1
        query = LookupQuery(
            self._last_number,
            record.request.request_id,
            tuple(unknown),
            tuple(tuple(key_space.store_key(key, rank) for rank in ranks) for key in unknown),
            self._clock() + self._lookup_deadline_s,
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
            record.lookup, record.lookup_done = None, True
            if answer.present is not None:
                pairs = list(zip(answer.query.keys, answer.present, strict=True))
                self._manager.handle(BlocksConfirmed([key for key, here in pairs if here]))
                self._manager.handle(BlocksDoubted([key for key, here in pairs if not here]))

    def close(self) -> None:
        """Stop the lookup thread."""
        if self._lookups is not None:
            self._lookups.close()
