"""The worker's side of a wrapping connector. Worker's main thread only.

Takes the envelope off on the way in and puts it on on the way out. What the wrapped connector
says of stand-ins is kept from vLLM, and what it may not know of finished requests from it.
"""

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
)

from connectors.wrapping.envelope import WrappedCommands, WrappedReport
from connectors.wrapping.pass_through import PassThrough

if TYPE_CHECKING:
    from connectors.wrapping.worker_fills import WorkerFills


class WorkerSide(PassThrough):
    """Hooks vLLM's model runner calls, where more is to be done than to pass them on."""

    fills: "WorkerFills | None" = None
    """None: session features are off."""
    _hidden: frozenset[str] = frozenset()
    """Of this step: finished requests that the wrapped connector never heard of."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, WrappedCommands)
        assert kv_connector_metadata.inner is not None
        self.inner.handle_preemptions(kv_connector_metadata.inner)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, WrappedCommands)
        assert connector_metadata.inner is not None
        self._hidden = frozenset(connector_metadata.hidden)
        if self.fills is not None:
            self.fills.begin(connector_metadata)
        self._connector_metadata = connector_metadata
        self.inner.bind_connector_metadata(connector_metadata.inner)

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None
        self.inner.clear_connector_metadata()

    def _heard_of(self, finished_req_ids: set[str]) -> set[str]:
        if self._hidden:
            finished_req_ids = finished_req_ids - self._hidden
        ended = self.fills.ended_ids if self.fills is not None else None
        return finished_req_ids | ended if ended else finished_req_ids

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = self.inner.get_finished(self._heard_of(finished_req_ids))
        if self.fills is None:
            return sent, received
        results = KVConnectorTransferResults(set(sent or ()), set(received or ()))
        results = self.fills.strip(results)
        return results.finished_sending or None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self.inner.get_transfer_results(self._heard_of(finished_req_ids))
        return results if self.fills is None else self.fills.strip(results)

    def get_block_ids_with_load_errors(self) -> set[int]:
        block_ids = self.inner.get_block_ids_with_load_errors()
        return block_ids if self.fills is None else self.fills.strip_errors(block_ids)

    def build_connector_worker_meta(self) -> WrappedReport | None:
        inner = self.inner.build_connector_worker_meta()
        fills = self.fills.take() if self.fills is not None else []
        return WrappedReport(inner, fills) if inner is not None or fills else None
