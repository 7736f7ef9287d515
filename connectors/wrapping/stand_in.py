"""Stand-ins: requests that vLLM never sees, on whose behalf a wrapped connector is asked.

Each goes through the connector's hooks in the order in which vLLM's scheduler calls them,
and through the last one exactly once, however it ends. Scheduler thread only, between
vLLM's own calls in ``schedule()`` and the connector's ``build_connector_meta``.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request, RequestStatus

from connectors.groups import CacheGeometry
from connectors.wrapping.chains import SessionChain
from connectors.wrapping.envelope import STAND_IN
from spm.errors import ConnectorError
from spm.metrics import Counters, Metric

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class StandIns:
    """Those of one engine."""

    def __init__(
        self,
        inner: "KVConnectorBase_V1",
        vllm_config: "VllmConfig",
        geometry: CacheGeometry,
        counters: Counters,
        *,
        ends_free_offers: bool = False,
    ) -> None:
        """``ends_free_offers``: as :class:`connectors.wrapping.traits.Traits` says."""
        self.inner = inner
        self.ends_free_offers = ends_free_offers
        self.num_groups = len(geometry.groups)
        self.block_tokens = geometry.alignment_tokens
        self._counters = counters
        hash_name = vllm_config.cache_config.prefix_caching_hash_algo
        self._block_hasher = get_request_block_hasher(
            geometry.hash_tokens, get_hash_fn_by_name(hash_name)
        )
        self._numbers = count(1)
        self._open: dict[str, StandIn] = {}
        self._ended: list[str] = []
        self.works = True
        """False: the connector raised in a hook, and is not asked for sessions any more."""

    def new(self, chain: SessionChain, stop: int) -> "StandIn":
        """One whose prompt is the chain's first ``stop`` logical blocks, and a token more: vLLM
        always computes the last one. Raises :class:`ConnectorError`."""
        tokens = chain.tokens[: stop * self.block_tokens].tolist()
        request = Request(
            f"{STAND_IN}{next(self._numbers)}",
            [*tokens, tokens[-1]],
            SamplingParams(max_tokens=1),
            None,
            lora_request=chain.adapter,
            cache_salt=chain.cache_salt,
            block_hasher=self._block_hasher,
        )
        stand_in = StandIn(request, self)
        self._open[request.request_id] = stand_in
        try:
            self.call(lambda: self.inner.on_new_request(request))
        except ConnectorError:
            stand_in.finish()
            raise
        return stand_in

    def call(self, hook: Callable[[], _T]) -> _T:
        """Run one of the connector's hooks. What it raises is its own fault, and no reason to
        end the engine: counted, said once, and raised as :class:`ConnectorError`."""
        try:
            return hook()
        except Exception as error:
            self._counters.add(Metric.INTERNAL_ERRORS, label="wrapped")
            if self.works:
                self.works = False
                logger.exception(
                    "the wrapped connector raised when it was asked for a session: offload, "
                    "prefetch and keep-alive are off from now on; requests are served as before"
                )
            raise ConnectorError(f"the wrapped connector raised {type(error).__name__}") from error

    def ended(self, stand_in: "StandIn") -> None:
        """To be called by the stand-in itself, once."""
        del self._open[stand_in.request.request_id]
        self._ended.append(stand_in.request.request_id)

    def take_ended(self) -> list[str]:
        """Those that ended since the last call: vLLM would report them as finished requests in
        the step that is being built."""
        ended, self._ended = self._ended, []
        return ended

    def no_blocks(self) -> tuple[list[Any], ...]:
        """By KV cache group."""
        return tuple([] for _ in range(self.num_groups))

    @property
    def num_open(self) -> int:
        """Stand-ins that have not ended."""
        return len(self._open)

    def finish_all(self) -> None:
        """At the engine's end: the connector may have locks and records for them."""
        for stand_in in list(self._open.values()):
            stand_in.finish()


class StandIn:
    """One. Its owner calls :meth:`ask` until there is an answer, then :meth:`allocate` or
    :meth:`decline`, and in any case, at any time, :meth:`finish`."""

    def __init__(self, request: Request, stand_ins: StandIns) -> None:
        self.request = request
        self._stand_ins = stand_ins
        self._block_ids: list[int] = []
        self.finished = False

    @property
    def id(self) -> str:
        """The request's."""
        return self.request.request_id

    def ask(self, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens the connector could load behind the first ``local_tokens``, and
        whether beside other steps; None: it does not know yet. Raises
        :class:`ConnectorError`."""
        inner, request = self._stand_ins.inner, self.request
        return self._stand_ins.call(lambda: inner.get_num_new_matched_tokens(request, local_tokens))

    def allocate(self, blocks: "Sequence[KVCacheBlock]", external_tokens: int) -> None:
        """These are its blocks, from the first on; the last ones, of ``external_tokens``, are to
        be filled. None and 0: nothing is to be loaded. Raises :class:`ConnectorError`."""
        inner, request = self._stand_ins.inner, self.request
        groups = ([*blocks],) if blocks else self._stand_ins.no_blocks()
        self._block_ids = [block.block_id for block in blocks]
        self._stand_ins.call(
            lambda: inner.update_state_after_alloc(request, KVCacheBlocks(groups), external_tokens)
        )
        if external_tokens:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS

    def decline(self, tokens: int) -> None:
        """Nothing of the ``tokens`` it offered is to be loaded. Raises :class:`ConnectorError`."""
        if not (tokens and self._stand_ins.ends_free_offers):
            self.allocate((), 0)

    def finish(self, computed_tokens: int = 0) -> bool:
        """It is over, and its first ``computed_tokens`` have KV. True: its blocks stay as they
        are until all ranks have said that the connector is done with them. What the
        connector raises counts as False: there is nobody to wait for."""
        if self.finished:
            return False
        self.finished = True
        self._stand_ins.ended(self)
        request, inner = self.request, self._stand_ins.inner
        request.status = RequestStatus.FINISHED_ABORTED
        request.num_computed_tokens = computed_tokens
        used = -(-computed_tokens // self._stand_ins.block_tokens)
        ids = self._block_ids[:used]
        try:
            if isinstance(inner, SupportsHMA):
                groups = (ids,) if ids else self._stand_ins.no_blocks()
                delay, _ = self._stand_ins.call(
                    lambda: inner.request_finished_all_groups(request, groups)
                )
            else:
                delay, _ = self._stand_ins.call(lambda: inner.request_finished(request, ids))
        except ConnectorError:
            return False
        return delay
