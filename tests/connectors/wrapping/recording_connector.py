"""A small connector that stores and loads by itself, and writes down every hook it is called.

Strict where real ones are: it fails on a request it was not told of. Loads and saves take as
many steps as the store says.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import yield_req_data
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request

from tests.connectors.scheduler.simulated_worker import Place, Slot
from tests.connectors.wrapping.recording import STORES, record_hooks
from tests.connectors.wrapping.recording_parts import (
    RecordedHandshake,
    RecordedMetadata,
    RecordedMetrics,
    RecordedReport,
    RecordedStats,
    Transfer,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput


@dataclass
class _Record:
    request: Request
    questions: int = 0
    local_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_saved: int = 0
    """Blocks stored, being stored, or loaded."""
    saving: int = 0
    held: bool = False
    finished: bool = False


@record_hooks
class RecordingConnector(KVConnectorBase_V1):
    """For one KV cache group. ``request_finished`` is its only way to hear of an end."""

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._name = self._kv_transfer_config.kv_connector_extra_config["store"]
        self.store = STORES[self._name]
        self._block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._records: dict[str, _Record] = {}
        self._planned: list[Transfer] = []
        self._slots: dict[Place, Slot] = {}
        self._loading: list[tuple[int, Transfer]] = []
        self._saving: list[tuple[int, Transfer, list[list[Slot]]]] = []
        self._saved: list[tuple[str, int]] = []
        self._held: set[str] = set()
        self._failed: set[int] = set()
        self._moved = 0
        self._unreported = 0
        """Blocks being saved, scheduler side."""

    # --- scheduler side ----------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        assert request.request_id not in self._records
        self._records[request.request_id] = _Record(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        record = self._records[request.request_id]
        record.questions += 1
        record.local_tokens = num_computed_tokens
        if record.saving or record.questions <= self.store.lookup_steps:
            return None, False
        first = num_computed_tokens // self._block_tokens
        last = (request.num_tokens - 1) // self._block_tokens
        hashes = request.block_hashes[first:last]
        hits = next(
            (at for at, name in enumerate(hashes) if bytes(name) not in self.store.values),
            len(hashes),
        )
        return hits * self._block_tokens, bool(hits) and not self.store.loads_at_once

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        record = self._records[request.request_id]
        block_ids = blocks.get_block_ids()[0]
        if num_external_tokens:
            record.questions = 0
            first = record.local_tokens // self._block_tokens
            stop = first + num_external_tokens // self._block_tokens
            names = [bytes(name) for name in request.block_hashes[first:stop]]
            self._planned.append(Transfer(request.request_id, names, block_ids[first:stop]))
            record.num_saved = stop

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> RecordedMetadata:
        meta = RecordedMetadata(self._planned)
        self._planned = []
        computed = {r.req_id: r.num_computed_tokens for r in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, new_blocks, resumed in yield_req_data(scheduler_output):
            record = self._records[request_id]
            if resumed or request_id not in cached.req_ids:
                record.block_ids = []
            record.block_ids += new_blocks[0] if new_blocks else []
            tokens = computed[request_id] + scheduler_output.num_scheduled_tokens[request_id]
            if save := self._save(record, tokens):
                meta.saves.append(save)
        for request_id in scheduler_output.finished_req_ids:
            record = self._records.pop(request_id)
            assert record.finished
            meta.held += [request_id] * record.held
        return meta

    def _save(self, record: _Record, tokens: int) -> Transfer | None:
        stop = min(tokens // self._block_tokens, len(record.request.block_hashes))
        wanted = [
            at
            for at in range(record.num_saved, stop)
            if bytes(record.request.block_hashes[at]) not in self.store.values
        ]
        record.num_saved = max(record.num_saved, stop)
        if not wanted:
            return None
        record.saving += len(wanted)
        self._unreported += len(wanted)
        hashes = [bytes(record.request.block_hashes[at]) for at in wanted]
        return Transfer(record.request.request_id, hashes, [record.block_ids[at] for at in wanted])

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        report = connector_output.kv_connector_worker_meta
        if report is not None:
            assert isinstance(report, RecordedReport)
            for request_id, count in report.saved:
                self._unreported -= count
                if request_id in self._records:
                    self._records[request_id].saving -= count

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        record = self._records[request.request_id]
        record.finished, record.held = True, record.saving > 0
        return record.held, {f"blocks of {self._name}": record.num_saved}

    def has_pending_push_work(self) -> bool:
        return self._unreported > 0

    def reset_cache(self) -> bool | None:
        self.store.values.clear()
        return True

    def take_events(self) -> Iterable[Any]:
        return ()

    # --- worker side -------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._slots = kv_caches["slots"]

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return RecordedHandshake()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:  # noqa: ANN401
        meta = self._connector_metadata
        assert isinstance(meta, RecordedMetadata)
        if self.store.loads_at_once:
            for load in meta.loads:
                self._load(load)
        else:
            self._loading += [(self.store.load_steps, load) for load in meta.loads]

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded by layer."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Nothing is saved by layer."""

    def wait_for_save(self) -> None:
        meta = self._connector_metadata
        assert isinstance(meta, RecordedMetadata)
        self._held.update(meta.held)
        for save in meta.saves:
            content = [
                [self._slots[block_id, offset] for offset in range(self._block_tokens)]
                for block_id in save.block_ids
            ]
            self._saving.append((self.store.save_steps, save, content))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        loaded = [load for steps, load in self._loading if not steps]
        self._loading = [(steps - 1, load) for steps, load in self._loading if steps]
        for load in loaded:
            self._load(load)
        for steps, save, content in self._saving:
            if not steps:
                self.store.values.update(zip(save.block_hashes, content, strict=True))
                self._saved.append((save.request_id, len(content)))
                self._moved += len(content)
        self._saving = [(left - 1, save, kv) for left, save, kv in self._saving if left]
        busy = {save.request_id for _, save, _ in self._saving}
        sent, self._held = self._held - busy, self._held & busy
        return sent or None, {load.request_id for load in loaded} or None

    def _load(self, load: Transfer) -> None:
        self.store.num_loads += 1
        for block_hash, block_id in zip(load.block_hashes, load.block_ids, strict=True):
            if self.store.fails(block_hash) or block_hash not in self.store.values:
                self._failed.add(block_id)
                self.store.values.pop(block_hash, None)  # or it would be offered for ever
                continue
            for offset, slot in enumerate(self.store.values[block_hash]):
                self._slots[block_id, offset] = slot
            self._moved += 1

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def build_connector_worker_meta(self) -> RecordedReport | None:
        saved, self._saved = self._saved, []
        return RecordedReport(saved) if saved else None

    # --- both --------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> RecordedStats | None:
        moved, self._moved = self._moved, 0
        return RecordedStats({"moved": moved}) if moved else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> RecordedStats:
        return RecordedStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> RecordedMetrics:
        return RecordedMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        layout: str | None = transfer.kv_connector_extra_config.get("layout")
        return layout

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("piecewise"))


@record_hooks
class RecordingHMAConnector(RecordingConnector, SupportsHMA):
    """The same for vLLM's other way of saying that a request is over."""

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])
