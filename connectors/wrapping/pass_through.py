"""The hooks in which a wrapping connector has no part: they go to the wrapped one as they are."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    CopyBlocksOp,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
)

from connectors.session_aware import SessionAwareConnector

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVConnectorKVEvents
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool


class PassThrough(SessionAwareConnector):
    """Every override here says what vLLM would have said to the wrapped connector, once."""

    inner: KVConnectorBase_V1

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401
            """What vLLM's base class does not know and a wrapped connector has all the same:
            vLLM and other packages ask some connectors for more."""
            if name == "inner":
                raise AttributeError(name)  # not built yet
            return getattr(self.inner, name)

    @property
    def requires_kv_delivery(self) -> bool:
        return self.inner.requires_kv_delivery

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return self.inner.supports_divergent_local_hybrid_hits

    # --- scheduler side ----------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        self.inner.bind_gpu_block_pool(gpu_block_pool)

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        self.inner.set_xfer_handshake_metadata(metadata)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self.inner.set_xfer_handshake_metadata_pp_aware(metadata)

    def has_pending_block_frees(self) -> bool:
        return self.inner.has_pending_block_frees()

    def get_finished_count(self) -> int | None:
        return self.inner.get_finished_count()

    # --- worker side -------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        return self.inner.get_mem_pool_context()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.inner.register_kv_caches(kv_caches)

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        self.inner.set_host_xfer_buffer_ops(copy_operation)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.inner.get_handshake_metadata()

    def has_connector_metadata(self) -> bool:
        return self.inner.has_connector_metadata()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:  # noqa: ANN401
        self.inner.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.inner.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        self.inner.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def finish_forward(self) -> None:
        self.inner.finish_forward()

    def reset_capture_state(self) -> None:
        self.inner.reset_capture_state()

    def wait_for_save(self) -> None:
        self.inner.wait_for_save()  # type: ignore[no-untyped-call]

    def get_kv_connector_kv_cache_events(self) -> "KVConnectorKVEvents | None":
        return self.inner.get_kv_connector_kv_cache_events()
