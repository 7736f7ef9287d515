"""vLLM's own connectors, recorded, with their transfers between GPU and host simulated.

Their schedulers' sides are the real ones. On a machine without a GPU their workers refuse to
move anything, so what moves is replaced: the lowest part of the worker's side that needs a
GPU, as named below. The KV that the simulated model reads is what these parts carried.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
    ExampleConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager
from vllm.v1.simple_kv_offload.metadata import (
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
)

from tests.connectors.scheduler.simulated_worker import Place, Slot
from tests.connectors.scheduler.vllm_parts import Attention
from tests.connectors.wrapping.recording import record_hooks

Slots = dict[Place, Slot]
Content = dict[int, Slot]
"""Of one block, by offset. What was never written is not there."""
STEPS = 2
"""That a transfer takes."""


@record_hooks
class RecordedOffloadingConnector(OffloadingConnector):
    """``OffloadingConnector``, both its CPU spec and its tiering spec."""


@record_hooks
class RecordedSimpleCPUOffloadConnector(SimpleCPUOffloadConnector):
    """``SimpleCPUOffloadConnector``."""


@record_hooks
class RecordedExampleConnector(ExampleConnector):
    """``ExampleConnector``."""


def allocated(kv_cache: KVCacheConfig) -> None:
    """Say how large the GPU's KV cache is; these connectors size theirs by it."""
    groups = kv_cache.kv_cache_groups
    page = max(group.kv_cache_spec.page_size_bytes for group in groups)
    names = [name for group in groups for name in group.layer_names]
    size = page * kv_cache.num_blocks
    kv_cache.kv_cache_tensors = [KVCacheTensor(size, names, page * kv_cache.num_blocks, page)]


def _read(slots: Slots, block_id: int, tokens: int) -> Content:
    places = ((offset, slots.get((block_id, offset))) for offset in range(tokens))
    return {offset: slot for offset, slot in places if slot is not None}


def _write(slots: Slots, block_id: int, content: Content) -> None:
    for offset, slot in content.items():
        slots[block_id, offset] = slot


class SimulatedTransfers(OffloadingWorker):
    """In place of ``CPUOffloadingWorker``, which copies between GPU and host memory. Host
    memory is one word a chunk, that says which content is there, and is real: a tier behind
    it may carry it away and bring it back."""

    def __init__(
        self, slots: Slots, model: Sequence[Attention], region: SharedOffloadRegion | None
    ) -> None:
        self._slots = slots
        self._tokens = [part.block_tokens for part in model]
        self._region = region
        self._words = (
            region.create_next_worker_view(8).view(torch.int64)
            if region is not None
            else torch.zeros(1 << 12, 1, dtype=torch.int64)
        )
        self._contents: list[Content] = [{}]
        self._under_way: dict[int, int] = {}

    def _blocks(self, spec: GPULoadStoreSpec) -> Iterable[tuple[int, int]]:
        """Block ids and the tokens of a block, group by group."""
        tokens = np.repeat(self._tokens, spec.group_sizes)
        return zip(spec.block_ids.tolist(), tokens.tolist(), strict=True)

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        assert isinstance(dst_spec, BlockIDsLoadStoreSpec)
        pairs = zip(self._blocks(src_spec), dst_spec.block_ids.tolist(), strict=True)
        for (block_id, tokens), chunk in pairs:
            self._words[chunk, 0] = len(self._contents)
            self._contents.append(_read(self._slots, block_id, tokens))
        self._under_way[job_id] = STEPS
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, BlockIDsLoadStoreSpec)
        pairs = zip(self._blocks(dst_spec), src_spec.block_ids.tolist(), strict=True)
        for (block_id, _), chunk in pairs:
            _write(self._slots, block_id, self._contents[int(self._words[chunk, 0])])
        self._under_way[job_id] = STEPS
        return True

    def get_finished(self) -> list[TransferResult]:
        over = [job_id for job_id, steps in self._under_way.items() if not steps]
        self._under_way = {j: steps - 1 for j, steps in self._under_way.items() if steps}
        return [TransferResult(job_id, success=True) for job_id in over]

    def wait(self, job_ids: set[int]) -> None:
        self._under_way.update(dict.fromkeys(job_ids & self._under_way.keys(), 0))

    def shutdown(self) -> None:
        if self._region is not None:
            del self._words
            self._region.cleanup()


def offloading_worker(connector: Any, slots: Slots, model: Sequence[Attention]) -> None:  # noqa: ANN401
    """Let a real ``OffloadingConnectorWorker`` use simulated transfers."""
    worker = connector.connector_worker
    spec, region = worker.spec, None
    if type(spec).__name__ == "TieringOffloadingSpec":
        region = SharedOffloadRegion(
            engine_id=spec.config.engine_id,
            num_chunks=spec.num_chunks,
            rank=0,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
    worker.worker = SimulatedTransfers(slots, model, region)


class KeptTier(ExampleSecondaryTierManager):
    """vLLM's example of a second tier, which keeps the bytes too."""

    def __init__(self, *, primary_kv_view: memoryview, **how: Any) -> None:  # noqa: ANN401
        super().__init__(primary_kv_view=primary_kv_view, **how)
        self._rows = np.asarray(primary_kv_view)
        self._kept: dict[bytes, Any] = {}

    def submit_store(self, job_metadata: TransferJob) -> None:
        for key, chunk in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
            self._kept[bytes(key)] = self._rows[chunk].copy()
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        for key, chunk in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
            self._rows[chunk][:] = self._kept[bytes(key)]
        super().submit_load(job_metadata)

    def shutdown(self) -> None:
        del self._rows
        super().shutdown()


class SimulatedCPUWorker:
    """In place of ``SimpleCPUOffloadWorker``, which copies on CUDA streams."""

    def __init__(self, slots: Slots, model: Sequence[Attention]) -> None:
        self._slots = slots
        self._tokens = max(part.block_tokens for part in model)
        self._host: dict[int, Content] = {}
        self._meta = SimpleCPUOffloadMetadata()
        self._loads: dict[int, int] = {}
        self._stores: dict[int, int] = {}
        self._stored: dict[int, int] = {}

    def bind_connector_metadata(self, metadata: SimpleCPUOffloadMetadata) -> None:
        self._meta = metadata

    def clear_connector_metadata(self) -> None:
        self._meta = SimpleCPUOffloadMetadata()

    def handle_preemptions(self, metadata: SimpleCPUOffloadMetadata) -> None:
        if metadata.need_flush:
            self._loads = dict.fromkeys(self._loads, 0)
            self._stores = dict.fromkeys(self._stores, 0)

    def start_load_kv(self) -> None:
        meta = self._meta
        for here, there in zip(meta.load_gpu_blocks, meta.load_cpu_blocks, strict=True):
            _write(self._slots, here, self._host[there])
        if meta.load_event >= 0:
            self._loads[meta.load_event] = STEPS

    def wait_for_save(self) -> None:
        meta = self._meta
        for here, there in zip(meta.store_gpu_blocks, meta.store_cpu_blocks, strict=True):
            self._host[there] = _read(self._slots, here, self._tokens)
        if meta.store_event >= 0:
            self._stores[meta.store_event] = STEPS

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received: set[str] = set()
        for event in [event for event, steps in self._loads.items() if not steps]:
            received.update(self._meta.load_event_to_reqs.get(event, ()))
        self._stored.update((event, 1) for event, steps in self._stores.items() if not steps)
        self._loads = {event: steps - 1 for event, steps in self._loads.items() if steps}
        self._stores = {event: steps - 1 for event, steps in self._stores.items() if steps}
        return None, received or None

    def build_connector_worker_meta(self) -> SimpleCPUOffloadWorkerMetadata | None:
        stored, self._stored = self._stored, {}
        return SimpleCPUOffloadWorkerMetadata(stored) if stored else None

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name == "shutdown":
            return lambda: None
        raise AttributeError(name)


def simple_worker(connector: Any, slots: Slots, model: Sequence[Attention]) -> None:  # noqa: ANN401
    """Put the simulated handler in place of the one that needs CUDA."""
    connector.worker_handler = SimulatedCPUWorker(slots, model)


def example_worker(connector: Any, slots: Slots, model: Sequence[Attention]) -> None:  # noqa: ANN401
    """``ExampleConnector``'s worker reads and writes layers of a model, and there is none here:
    a save leaves the folder by which a lookup knows it, a load brings what it should."""
    tokens = model[0].block_tokens

    def load(context: object, **kwargs: object) -> None:
        meta = connector._get_connector_metadata()
        assert isinstance(meta, ExampleConnectorMetadata)
        for request in (one for one in meta.requests if not one.is_store):
            known = request.token_ids.tolist()
            for at, place in enumerate(request.slot_mapping.tolist()):
                slots[place // tokens, place % tokens] = (0, tuple(known[: at + 1]))

    def save(layer: str, *args: object) -> None:
        meta = connector._get_connector_metadata()
        assert isinstance(meta, ExampleConnectorMetadata)
        for request in (one for one in meta.requests if one.is_store):
            connector._generate_foldername_debug(
                request.token_ids, request.mm_hashes, create_folder=True
            )

    connector.start_load_kv, connector.save_kv_layer = load, save
