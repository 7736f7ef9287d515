"""What the recording connector sends between its sides, and its numbers."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass
class Transfer:
    """Blocks of one request to be loaded or saved."""

    request_id: str
    block_hashes: list[bytes]
    block_ids: list[int]


@dataclass
class RecordedMetadata(KVConnectorMetadata):
    loads: list[Transfer] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    """Finished requests whose blocks are kept until their saves are over."""


@dataclass
class RecordedReport(KVConnectorWorkerMetadata):
    saved: list[tuple[str, int]]
    """Requests and how many of their blocks."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "RecordedReport":
        assert isinstance(other, RecordedReport)
        return RecordedReport([*self.saved, *other.saved])


@dataclass
class RecordedHandshake(KVConnectorHandshakeMetadata):
    port: int = 7


@dataclass
class RecordedStats(KVConnectorStats):
    """``moved`` counts blocks loaded and saved."""

    def aggregate(self, other: KVConnectorStats) -> "RecordedStats":
        self.data["moved"] = self.data.get("moved", 0) + other.data.get("moved", 0)
        return self

    def reset(self) -> None:
        self.data = {}

    def reduce(self) -> dict[str, int | float]:
        return {"moved": self.data.get("moved", 0)}

    def is_empty(self) -> bool:
        return not self.data.get("moved")


class RecordedMetrics(KVConnectorPromMetrics):
    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: Any,  # noqa: ANN401
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        assert "store" in transfer.kv_connector_extra_config, "its own settings, not ours"
        self._moved = metric_types[Counter]("recorded:moved", "Blocks moved.", labelnames)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        self._moved.labels(*labels).inc(transfer_stats_data.get("moved", 0))
