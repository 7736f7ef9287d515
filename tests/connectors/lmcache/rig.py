"""Sessions over an LMCache without a model: everything of the scheduler side but vLLM's
scheduler and the wrapped connector."""

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from connectors.lmcache.chunk_pooling import ChunkPooling
from connectors.wrapping.chains import SessionChain, SessionChains
from connectors.wrapping.pooling import PoolingParts
from spm import events
from spm.agent_hint import BlockRange, Edit, EditType, PrefetchTarget
from spm.config import SpmConfig
from spm.manager import SessionAwarePoolingManager
from spm.metrics import Counters
from spm.operation import Operation
from tests.connectors.scheduler.kit import geometry_of
from tests.connectors.scheduler.vllm_parts import Attention
from tests.processes import wait_until
from tracker.ids import BlockKey, SessionId, SessionRef, TenantId

BLOCK_TOKENS = 32
CHUNK_TOKENS = 256
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
KEEP_S = 600.0


def ref_of(name: str) -> SessionRef:
    return SessionRef(TenantId("t"), SessionId(name))


def tokens_of(session: int, count: int) -> "array[int]":
    return array("I", (session * 100_003 + at for at in range(count)))


class Lookups:
    """The wrapped connector's answers to stand-ins."""

    def __init__(self) -> None:
        self.blocks: int | None = None
        self.asked: list[int] = []
        self.busy = False

    def ask(
        self, chain: SessionChain, stop: int, tell: Callable[[int | None], None]
    ) -> Callable[[], None]:
        self.asked.append(stop)
        tell(self.blocks)
        return lambda: None

    def fail_all(self) -> None: ...

    def status(self) -> dict[str, Any]:
        return {}


class Prefetches:
    """Nothing can be loaded ahead into the GPU pool."""

    is_possible = False
    pending = False
    busy = False

    class fills:  # noqa: N801
        busy = False
        loads_in_step = False
        pool = None

    def release(self, ref: SessionRef) -> None: ...

    def request_arrived(self, ref: SessionRef) -> None: ...

    def cancel_all(self) -> None: ...

    def status(self) -> dict[str, Any]:
        return {}

    def check_integrity(self, *, idle: bool) -> None: ...


class Sam:
    """Remembers what was given up of the GPU pool."""

    def __init__(self) -> None:
        self.demotions: list[BlockRange | None] = []

    def demoted(self, ref: SessionRef, blocks: BlockRange | None) -> None:
        self.demotions.append(blocks)

    def gpu_status(self) -> dict[str, Any]:
        return {}


class StandIns:
    works = True


class Rig:
    """One engine; :attr:`pooling` is to be set."""

    pooling: ChunkPooling

    def __init__(
        self,
        extra: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
        world_size: int = 1,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.config = SpmConfig.from_extra_config({"host_bytes": 0, **extra})
        self.counters = Counters()
        self.geometry = geometry_of([Attention(block_tokens)])
        self.manager = SessionAwarePoolingManager(
            self.config, world_size, self.counters, clock, lambda ref: self.pooling.closed(ref)
        )
        self.lookups, self.sam = Lookups(), Sam()
        self.chains = SessionChains(self.config.max_chain_tokens, self.geometry)
        self.parts = PoolingParts(
            config=self.config,
            geometry=self.geometry,
            manager=self.manager,
            sam=cast(Any, self.sam),
            chains=self.chains,
            lookups=cast(Any, self.lookups),
            prefetches=cast(Any, Prefetches()),
            stand_ins=cast(Any, StandIns()),
            lookup_refreshes=True,
            lookups_pin=False,
            vllm_config=cast(Any, None),
            world_size=world_size,
            engine_id="engine",
            counters=self.counters,
            clock=clock,
        )

    # --- what an engine does ------------------------------------------------------------

    def turn(
        self, name: str, tokens: Sequence[int], salt: str | None = None, keep_s: float = KEEP_S
    ) -> None:
        """A request of the session ends, having computed these."""
        ref = ref_of(name)
        request = Request(
            f"request-of-{name}",
            list(tokens),
            SamplingParams(max_tokens=1),
            None,
            cache_salt=salt,
            block_hasher=kv_cache_utils.get_request_block_hasher(self.geometry.hash_tokens, sha256),
        )
        self.manager.handle(events.SessionOpened(ref))
        self.pooling.request_arrived(ref)
        self.pooling.register(ref, request, len(tokens))
        self.manager.handle(events.RequestEnded(ref, keep_s))
        self.pooling.tick()

    def end(self, name: str) -> None:
        """The application ends the session."""
        self.manager.handle(events.SessionEnded(ref_of(name)))
        self.manager.tick()
        self.pooling.tick()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Step until then."""

        def stepped() -> bool:
            self.pooling.tick()
            return condition()

        wait_until(stepped, what)

    def done(self, operation: Operation) -> Operation:
        """Step until it is over."""
        self.until(lambda: operation.done, f"the end of {operation.edit.type}")
        self.pooling.check_integrity(idle=False)
        return operation

    def offload(self, name: str, blocks: BlockRange | None = None) -> Operation:
        return self.done(self.pooling.offload(ref_of(name), Edit(EditType.OFFLOAD, blocks)))

    def prefetch(self, name: str, blocks: BlockRange | None = None) -> Operation:
        edit = Edit(EditType.PREFETCH, blocks, PrefetchTarget.HOST)
        return self.done(self.pooling.prefetch(ref_of(name), edit))

    def evict(self, name: str, blocks: BlockRange | None = None) -> Operation:
        operation = self.pooling.evict(ref_of(name), Edit(EditType.EVICT, blocks))
        self.pooling.tick()
        return operation

    def residency(self, name: str) -> dict[str, Any]:
        return self.pooling.query_residency(ref_of(name))

    def chunk_keys(self, name: str) -> list[BlockKey]:
        return self.manager.tracker.keys_of(ref_of(name))
