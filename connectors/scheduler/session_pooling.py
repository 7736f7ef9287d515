"""The capability protocol over our own tiers: what sessions can ask of the host and the remote
store, and the background work that keeps what they have alive.

Scheduler thread only. Decides; the workers and the store keeper do the I/O.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from connectors.groups import CacheGeometry
from connectors.scheduler.gpu_pool import GpuPool
from connectors.scheduler.manifests import Manifests
from connectors.scheduler.offloader import Offloader
from connectors.scheduler.operations import RunningOperations
from connectors.scheduler.prefetcher import Prefetcher
from connectors.scheduler.session_blocks import SessionBlocks
from connectors.scheduler.store_keeper import DocumentRead, KeysChecked, StoreKeeper
from spm import events
from spm.agent_hint import BlockRange, Edit, PrefetchTarget
from spm.capability import Capabilities
from spm.config import SpmConfig
from spm.manager import SessionAwarePoolingManager
from spm.manifest import SessionManifest
from spm.operation import Operation, Status, ended
from spm.residency import Tier
from spm.residency_view import AsWritten, Residence, residency_view
from spm.sam.manager import SessionAwareManager
from tracker.ids import BlockKey, GroupId, SessionRef

logger = logging.getLogger(__name__)


class SessionPooling:
    """Implements :class:`spm.capability.PoolingCapability`."""

    def __init__(
        self,
        config: SpmConfig,
        geometry: CacheGeometry,
        manager: SessionAwarePoolingManager,
        sam: SessionAwareManager,
        prefetcher: Prefetcher,
        offloader: Offloader,
        keeper: StoreKeeper | None,
        manifests: Manifests | None,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """``keeper``: None without a remote store; ``manifests``: None if there are none."""
        self._config = config
        self._geometry = geometry
        self._scales = geometry.scales
        self._manager = manager
        self._sam = sam
        self._prefetcher = prefetcher
        self._offloader = offloader
        self._keeper = keeper
        self._manifests = manifests
        self._clock = clock
        self._wall_clock = wall_clock
        self._blocks = SessionBlocks(geometry, manager.tracker)
        self._recalling: dict[Operation, None] = {}
        self.operations = RunningOperations(manager, config)
        self._salted: dict[SessionRef, None] = {}
        """Sessions whose blocks are named by an adapter's weights: vLLM knows them by other
        names."""
        self.pool: GpuPool | None = None
        self.block_bytes: Mapping[GroupId, int] = {}

    def bind(self, pool: GpuPool | None) -> None:
        """Before the first step: vLLM's pool; None if nothing can be put there."""
        self.pool = self._prefetcher.jobs.pool = self._offloader.pool = pool

    def set_block_bytes(self, block_bytes: Mapping[GroupId, int]) -> None:
        """Before the first step: stored size of a block by group, all ranks together."""
        self.block_bytes = {group: max(1, size) for group, size in block_bytes.items()}
        if self._manifests is not None:
            self._manifests.block_bytes = self.block_bytes

    # --- the protocol ------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        store = self._keeper.capabilities if self._keeper is not None else None
        return Capabilities(
            offload=True,
            prefetch=self.pool is not None or self._has_both_tiers,
            evict=True,
            release=True,
            query_residency=True,
            touch=store is not None and store.touch,
            delete=store is not None and store.delete,
            exact_ttl=store is not None and store.exact_ttl,
            manifests=self._manifests is not None,
            events=bool(self._config.events_stream) and store is not None and store.streams,
            residency=store is not None and store.residency,
            capacity=store is not None and store.capacity,
        )

    @property
    def _has_both_tiers(self) -> bool:
        return self._config.host_bytes > 0 and self._config.remote is not None

    def register_cache(
        self,
        ref: SessionRef,
        keys: Mapping[GroupId, Sequence[BlockKey | None]],
        *,
        salted: bool = False,
    ) -> None:
        """``salted``: an adapter's weights are part of the names."""
        self._manager.handle(events.BlocksAssociated(ref, keys))
        if salted and self._is_known(ref):
            self._salted[ref] = None  # its names say nothing to an engine that did not see it
        else:
            self._salted.pop(ref, None)
            self.refreshed(ref)

    def refreshed(self, ref: SessionRef) -> None:
        if self._manifests is not None and ref not in self._salted:
            self._manifests.note_changed(ref)

    def offload(self, ref: SessionRef, edit: Edit, operation_id: str = "") -> Operation:
        refusal = self.operations.refusal(ref, edit)
        if refusal is not None:
            return refusal
        if not self._is_known(ref):
            return ended(ref, edit, Status.NOT_FOUND, "no such session on this engine")
        blocks, cut = self._blocks.to_keep(ref, edit.blocks), self._beyond(ref, edit)
        refusal = self.operations.no_room(ref, edit, len(blocks))
        if refusal is not None:
            return refusal
        return self.operations.begun(self._offloader.start(ref, edit, blocks, cut), operation_id)

    def prefetch(self, ref: SessionRef, edit: Edit, operation_id: str = "") -> Operation:
        refusal = self.operations.refusal(ref, edit)
        if refusal is not None:
            return refusal
        to_host = edit.target is PrefetchTarget.HOST
        if to_host and not self._has_both_tiers:
            lacks = "host tier (host_bytes)" if self._config.remote else "remote store"
            detail = f"this engine has no {lacks}"
            return ended(ref, edit, Status.UNSUPPORTED, detail)
        if not self.capabilities.prefetch:
            detail = "vLLM's pool cannot be filled ahead, and there is no host tier to fill"
            return ended(ref, edit, Status.UNSUPPORTED, detail)
        if not self._is_known(ref):
            return self._prefetch_recalled(ref, edit, operation_id)
        return self.operations.begun(self._start_prefetch(ref, edit), operation_id)

    def _start_prefetch(self, ref: SessionRef, edit: Edit) -> Operation:
        cut, span = self._beyond(ref, edit), edit.blocks
        hole = self._blocks.first_hole(ref, span)
        if hole is not None:
            cut = f"the session gave block {hole} up: what lies behind it is of no use without it"
            span = BlockRange(span.start if span else 0, hole)
        blocks = self._blocks.to_resume(ref, span)
        if not blocks:
            detail = cut or "the session has no full block there"
            return ended(ref, edit, Status.NOT_FOUND, detail)
        refusal = self.operations.no_room(ref, edit, len(blocks))
        if refusal is not None:
            return refusal
        if ref in self._salted and edit.target is PrefetchTarget.GPU:
            if not self._has_both_tiers:
                detail = "blocks computed with an adapter can only be prefetched into a host tier"
                return ended(ref, edit, Status.UNSUPPORTED, detail)
            edit = Edit(edit.type, edit.blocks, PrefetchTarget.HOST)
        return self._prefetcher.start(ref, edit, blocks, cut)

    def _beyond(self, ref: SessionRef, edit: Edit) -> str:
        """What to say if a range ends behind the session's end."""
        length = self._blocks.logical_blocks(ref)
        beyond = edit.blocks is not None and edit.blocks.stop > length
        return f"the session has {length} logical blocks" if beyond else ""

    def _prefetch_recalled(self, ref: SessionRef, edit: Edit, operation_id: str) -> Operation:
        """A session of another engine: its manifest first."""
        operation = Operation(ref, edit)

        def found(manifest: SessionManifest | None) -> None:
            self._recalling.pop(operation, None)
            if operation.done:
                return
            if manifest is None and not self._is_known(ref):
                operation.end(Status.NOT_FOUND, "no such session, on this engine or in the store")
                return
            if manifest is not None and not self._is_known(ref):
                self._adopt(manifest)
            operation.follow(self._start_prefetch(ref, edit))

        if self._manifests is None or not self._manifests.read(ref, found):
            return operation.end(Status.NOT_FOUND, "no such session on this engine")
        self._recalling[operation] = None
        return self.operations.begun(operation, operation_id)

    def evict(self, ref: SessionRef, edit: Edit) -> Operation:
        if edit.blocks is None:
            self._stop(ref)
        before = len(self._manager.tracker.keys_of(ref))
        self._manager.handle(events.SessionEvicted(ref, edit.blocks, self._scales))
        left = len(self._manager.tracker.keys_of(ref))
        operation = Operation(ref, edit, before - left)
        operation.done_blocks = operation.blocks
        if self._manifests is not None and operation.blocks:
            if left:
                self.refreshed(ref)
            else:
                self._manifests.forget(ref)
        return operation.end(Status.OK if operation.blocks else Status.NOT_FOUND)

    def release(self, ref: SessionRef) -> None:
        if self._manifests is not None:
            self._manifests.forget(ref)

    def logical_blocks(self, ref: SessionRef) -> int:
        return self._blocks.logical_blocks(ref)

    def query_residency(self, ref: SessionRef) -> dict[str, Any]:
        tracker = self._manager.tracker
        chains = [tracker.blocks(ref, group.group) for group in self._geometry.groups]
        return self._residency(chains, self._manager.residency)

    def recall(self, ref: SessionRef, tell: Callable[[dict[str, Any] | None], None]) -> bool:
        def found(manifest: SessionManifest | None) -> None:
            tell(None if manifest is None else self._described(manifest))

        return self._manifests is not None and self._manifests.read(ref, found)

    # --- parts of it -------------------------------------------------------------------

    def _is_known(self, ref: SessionRef) -> bool:
        return self._manager.tracker.is_open(ref)

    def _adopt(self, manifest: SessionManifest) -> None:
        """Go on with a session that another engine began."""
        ref = manifest.session
        parent = manifest.parent
        parent_ref = SessionRef(ref.tenant, parent) if parent is not None else None
        self._manager.handle(events.SessionRecalled(ref, parent_ref, manifest.blocks))

    def _described(self, manifest: SessionManifest) -> dict[str, Any]:
        groups = self._geometry.groups
        chains = [manifest.blocks.get(group.group, ()) for group in groups]
        lengths = [len(c) * g.block_tokens for c, g in zip(chains, groups, strict=True)]
        age_s = max(0.0, self._wall_clock() - manifest.written_at_s)
        return {
            "parent_session_id": manifest.parent,
            "blocks": min(lengths) // self._geometry.alignment_tokens,
            "residency": self._residency(chains, AsWritten(self._manager.residency, age_s)),
        }

    def _residency(
        self, chains: Sequence[Sequence[BlockKey | None]], residency: Residence
    ) -> dict[str, Any]:
        """A block is in the GPU pool when vLLM has one published under its hash."""

        def in_gpu(group: GroupId, index: int) -> bool:
            key = chains[group][index]
            return key is not None and self.pool is not None and self.pool.find(key) is not None

        sizes = [self.block_bytes.get(group.group, 0) for group in self._geometry.groups]
        return residency_view(chains, self._scales, sizes, residency, in_gpu).to_wire()

    def closed(self, ref: SessionRef) -> None:
        """The session was ended or forgotten."""
        self._salted.pop(ref, None)
        self._stop(ref)

    def _stop(self, ref: SessionRef) -> None:
        """Nothing goes on for the session any more."""
        self._prefetcher.release(ref)
        self._offloader.release(ref)
        for operation in [one for one in self._recalling if one.ref == ref]:
            del self._recalling[operation]
            operation.end(Status.FAILED, "the session gave its blocks up")

    def stored_sizes(self, ref: SessionRef) -> tuple[int, int, int]:
        """Bytes of what a session needs to resume, and how many of them the host tier and the
        remote store have. O(its blocks)."""
        total = host = remote = 0
        stored = self._manager.residency.is_stored
        for one in self._blocks.to_keep(ref, None):
            size = self.block_bytes.get(self._geometry.groups[one.group].group, 0)
            total += size
            host += size * stored(one.key, Tier.HOST)
            remote += size * stored(one.key, Tier.REMOTE)
        return total, host, remote

    def logical_tokens(self, ref: SessionRef) -> int:
        """Length of the session's chain of full blocks."""
        return self.logical_blocks(ref) * self._geometry.alignment_tokens

    @property
    def pool_bytes(self) -> int:
        """Size of the GPU pool, as its blocks are stored; 0 if it is not known."""
        if self.pool is None or not self.block_bytes:
            return 0
        return self.pool.num_blocks * max(self.block_bytes.values())

    def gpu_status(self) -> dict[str, Any]:
        """vLLM's pool, for the operation ``status``."""
        return {**self._sam.gpu_status(), "block_bytes": sum(self.block_bytes.values())}

    def in_progress(self, ref: SessionRef) -> list[dict[str, Any]]:
        """Operations of a session that go on."""
        return self.operations.of(ref)

    # --- a step ------------------------------------------------------------------------

    def request_arrived(self, ref: SessionRef) -> None:
        """The session is back."""
        self._prefetcher.request_arrived(ref)
        self._offloader.request_arrived(ref)

    def tick(self) -> None:
        """Once a step, and after management: pass on to the keeper what has changed, and take
        in what it found out. Costs little when nothing has."""
        keeper = self._keeper
        if keeper is None:
            return
        if self._manager.has_key_news:
            self._tell(keeper)
        if self._manifests is not None:
            self._manifests.write_changed()
        for news in keeper.poll():
            if isinstance(news, KeysChecked):
                self._offloader.checked(news.number, news.present)
            elif isinstance(news, DocumentRead):
                if self._manifests is not None:
                    self._manifests.take_answer(news.number, news.content)
            else:
                self._manager.handle(news)

    def _tell(self, keeper: StoreKeeper) -> None:
        """Which keys are to be kept alive, which no longer, and which may go."""
        for keys, until_s in self._manager.take_holds():
            keeper.hold(keys, until_s)
        keeper.drop(self._manager.take_released())
        deletable = self._manager.take_deletable()
        if deletable:
            keeper.drop(deletable)  # a touch would give them their lifetime back
            keeper.delete(deletable)
            self._manager.handle(events.BlocksDoubted(deletable))

    def stored(self, keys: Sequence[BlockKey]) -> None:
        """The remote store has acknowledged these: those that sessions hold are kept alive."""
        if self._keeper is None:
            return
        for key in keys:
            holders = self._manager.tracker.sessions_of(key)
            if holders:
                self._keeper.hold((key,), max(map(self._manager.holding, holders)))

    @property
    def is_waiting(self) -> bool:
        """Whether an answer from the store is being waited for."""
        return self._offloader.is_asking or (self._manifests is not None and self._manifests.busy)
