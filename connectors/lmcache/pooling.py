"""The capability protocol over an LMCache multiprocess server.

Scheduler thread only. Two threads do the asking: the control worker talks to the server's HTTP
API, the store keeper to the Redis behind it, if its URL is known.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from connectors.lmcache.chunk_keys import ChunkNames, LMCacheModel, ServerChunkKeys
from connectors.lmcache.chunk_pooling import ChunkPooling
from connectors.lmcache.control import DeleteTier, ServerStatus, WarmResult
from connectors.lmcache.control_news import KeepOver, SessionWarmed, StatusSeen, WarmEnded
from connectors.lmcache.control_worker import ControlWorker
from connectors.lmcache.warm_operations import WarmOperations
from connectors.scheduler.store_keeper import StoreKeeper
from connectors.wrapping.chains import SessionChain
from connectors.wrapping.pooling import PoolingParts
from connectors.wrapping.presence import KnownPrefixes
from spm.agent_hint import Edit
from spm.capability import Capabilities
from spm.errors import ConfigError
from spm.metrics import Metric
from spm.operation import Operation, Status, ended
from spm.redis_url import redacted_url
from spm.residency import Tier
from spm.residency_view import Residence
from tracker.ids import BlockKey, SessionRef

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _WithHost:
    """Implements :class:`spm.residency_view.Residence`."""

    behind: Residence
    in_host: Collection[BlockKey]

    def is_stored(self, key: BlockKey, tier: Tier) -> bool:
        return key in self.in_host if tier is Tier.HOST else self.behind.is_stored(key, tier)

    def remote_age_s(self, key: BlockKey) -> float | None:
        return self.behind.remote_age_s(key)


class LMCachePooling(ChunkPooling):
    """Of one engine and its server.

    With ``l2_url`` chunks are kept alive, confirmed and looked for in Redis, under LMCache's own
    names. Without it they are kept in the server's host tier, by warm prefetches, which count as
    use there; what is stored is then as the connector's lookup says.
    """

    def __init__(
        self,
        parts: PoolingParts,
        model: LMCacheModel,
        control: ControlWorker,
        keeper: StoreKeeper | None,
    ) -> None:
        """Takes over ``control`` and ``keeper`` (None: no ``l2_url``)."""
        super().__init__(parts, keeper)
        assert parts.config.store is not None
        self._store = parts.config.store
        self._model = model
        self._control = control
        self._host = KnownPrefixes(parts.clock)
        self._warms = WarmOperations(
            control, self._block_tokens, self._note_prefetched, parts.clock
        )
        self._to_keep: dict[SessionRef, None] = {}
        """Sessions whose chunks, or time to keep them, have changed."""

    # --- what is offered ---------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """As far as the server has said by now what it is."""
        server = self._control.server
        named = self._chunk_keys is not None
        plain = super().capabilities
        return replace(
            plain,
            prefetch=plain.prefetch or (server is not None and server.has_l2),
            touch=server is not None,
            delete=named,
            residency=self._touches_redis is not None,
            capacity=self._keeper is not None and self._keeper.capabilities.capacity,
        )

    @property
    def _touches_redis(self) -> StoreKeeper | None:
        """Who keeps chunks alive by their names; None: they are kept in the host tier."""
        return self._keeper if self._chunk_keys is not None else None

    def _learn(self, server: ServerStatus) -> None:
        """The server has said what it is."""
        unnamed = self._model.unnamed
        chunk_keys = None
        if not unnamed:
            try:
                names = ChunkNames(self._model.name, self._model.world_size)
                chunk_keys = ServerChunkKeys(names, server.chunk_tokens, server.hash_algorithm)
            except ConfigError as error:
                unnamed = str(error)
        if unnamed:
            logger.warning(
                "names of LMCache's objects are not known (%s): no keep-alive in Redis, no "
                "deletes, no residency by chunk",
                unnamed,
            )
        self._control.use(None if chunk_keys is None else chunk_keys.names.objects)
        self.use(chunk_keys)

    # --- a session's life --------------------------------------------------------------

    def _after_association(self, ref: SessionRef, chain: SessionChain) -> None:
        super()._after_association(ref, chain)
        self._to_keep[ref] = None

    def refreshed(self, ref: SessionRef) -> None:
        super().refreshed(ref)
        self._to_keep[ref] = None

    def released(self, ref: SessionRef) -> None:
        super().released(ref)
        self._to_keep.pop(ref, None)

    def _stop(self, ref: SessionRef) -> None:
        super()._stop(ref)
        self._host.forget(ref)
        self._control.drop(ref)
        self._warms.release(ref)

    def was_reset(self) -> None:
        super().was_reset()
        self._host.clear()
        self._control.reset()
        self._warms.cancel_all()

    def _prefetch_to_host(self, ref: SessionRef, edit: Edit, operation_id: str) -> Operation:
        server, chain = self._control.server, self._chains.get(ref)
        if server is not None and not server.has_l2:
            detail = "LMCache has no tier behind its host memory to fetch from"
            return ended(ref, edit, Status.UNSUPPORTED, detail)
        if chain is None:
            return self._no_chain(ref, edit)
        if server is None:
            detail = "LMCache's control API has not answered yet: try again later"
            return ended(ref, edit, Status.FAILED, detail)
        operation = self._warms.start(ref, edit, chain, server)
        return operation if operation.done else self.operations.begun(operation, operation_id)

    # --- a step ------------------------------------------------------------------------

    def tick(self) -> None:
        super().tick()
        for news in self._control.poll():
            match news:
                case WarmEnded():
                    self._warms.ended(news)
                case SessionWarmed(ref, num_tokens, result):
                    self._kept(ref, num_tokens, result)
                case KeepOver(ref):
                    self._to_keep[ref] = None
                case StatusSeen(server):
                    self._learn(server)
        self._warms.tick()
        if self._to_keep:
            self._keep_sessions()

    def _keep_sessions(self) -> None:
        """Without a Redis to touch, what LMCache has is kept in its host tier."""
        server = self._control.server
        if server is None:  # they wait until it has answered
            return
        waiting, self._to_keep = self._to_keep, {}
        if self._touches_redis is not None:
            return
        for ref in waiting:
            chain, until_s = self._chains.get(ref), self._manager.holding(ref)
            if chain is None or until_s <= self._clock():
                continue
            request = self._warms.request(server, chain, len(chain))
            if request.num_tokens:
                self._control.keep(ref, request, until_s)

    def _kept(self, ref: SessionRef, num_tokens: int, result: WarmResult) -> None:
        chain = self._chains.get(ref)
        if chain is None:
            return
        if result.found == result.total:
            self._note_host(ref, chain, min(len(chain), num_tokens // self._block_tokens))
        else:
            self._host.forget(ref)

    def _note_prefetched(self, ref: SessionRef, chain: SessionChain, blocks: int) -> None:
        self._parts.counters.add(Metric.PREFETCHED_BLOCKS, blocks, "host")
        self._note_host(ref, chain, blocks)

    def _note_host(self, ref: SessionRef, chain: SessionChain, blocks: int) -> None:
        if self._chains.get(ref) is chain:
            self._host.note(ref, chain, blocks)

    def external_blocks(self, ref: SessionRef, chain: SessionChain) -> Residence:
        """LMCache evicts from its host tier without telling: what was there long ago is not said
        to be."""
        known = self._host.of(ref, chain)
        fresh = known.age_s <= self._config.residency_ttl_s
        return _WithHost(super().external_blocks(ref, chain), known.names if fresh else ())

    def _hold(self, keys: Sequence[BlockKey], until_s: float) -> None:
        super()._hold(keys, until_s)
        self._control.spare(keys)

    def _delete(self, keys: Sequence[BlockKey]) -> None:
        """LMCache deletes at once. Where Redis is known, other engines get ``delete_grace_s`` to
        touch what is there; only the host tier is emptied at once then."""
        server = self._control.server
        redis = self._touches_redis
        if redis is not None and self._config.keep_alive.delete_grace_s:
            redis.delete(keys)
            self._control.delete(keys, DeleteTier.HOST)
        elif server is not None and server.has_l2:
            self._control.delete(keys, DeleteTier.ALL)
        else:
            self._control.delete(keys, DeleteTier.HOST)

    @property
    def has_pending_work(self) -> bool:
        return self._warms.pending or super().has_pending_work

    # --- what is told ------------------------------------------------------------------

    def _external_status(self) -> dict[str, Any]:
        server, keeper = self._control.server, self._keeper
        host = None
        if server is not None:
            host = {"blocks": self._host.total_blocks, "capacity_bytes": server.limit_bytes}
        state, known = self._control.breaker_state, self._known.total_blocks
        kept: dict[str, float | None] = {}
        if keeper is not None:
            state, known = keeper.breaker_state, self._manager.residency.num_remote_keys
            kept = keeper.status()
        remote = {
            "kind": self._store.kind,
            "url": redacted_url(self._store.l2_url) if keeper else self._store.control_url,
            "breaker": state.value,
            "known_blocks": known,
            "used_bytes": kept.get("used_bytes"),
            "limit_bytes": kept.get("limit_bytes"),
        }
        return {"host": host, "remote": remote}

    @property
    def keep_alive_status(self) -> dict[str, Any] | None:
        """Of keys in Redis, or of sessions in the host tier."""
        keeper = self._touches_redis
        if keeper is not None:
            kept = keeper.status()
            return {name: kept[name] for name in ("keys", "interval_s", "behind_s", "keys_per_s")}
        sessions, behind_s = self._control.sessions_kept()
        interval_s = self._config.keep_alive.interval_s
        return {
            "keys": sessions,
            "interval_s": interval_s,
            "behind_s": behind_s,
            "keys_per_s": sessions / interval_s,
        }

    def close(self) -> None:
        super().close()
        self._control.close()

    def check_integrity(self, *, idle: bool) -> None:
        super().check_integrity(idle=idle)
        self._warms.check_integrity(idle=idle)
