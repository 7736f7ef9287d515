"""What travels between the two sides of a wrapping connector: the wrapped connector's own
message, untouched, and ours beside it. Plain data: it crosses processes."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

STAND_IN = "spm-standin-"
"""How the ids of stand-in requests begin. vLLM's own have another form."""


@dataclass(frozen=True, slots=True)
class FillCommand:
    """A load that no request of vLLM's waits for: the wrapped connector was asked for it on
    behalf of a stand-in request."""

    request_id: str
    """The stand-in's."""
    block_ids: tuple[int, ...]
    """Places in the GPU pool that it fills, in prefix order."""
    prefix_block_ids: tuple[int, ...] = ()
    """What comes before them and holds its KV already. A connector that loads in units larger
    than a block may name these too when such a unit fails."""


@dataclass(slots=True)
class WrappedCommands(KVConnectorMetadata):
    """Scheduler side to every worker, once a step."""

    inner: KVConnectorMetadata | None
    fills: list[FillCommand] = field(default_factory=list)
    """That begin in this step."""
    ended: list[str] = field(default_factory=list)
    """Stand-ins that vLLM would now report as finished requests."""
    hidden: list[str] = field(default_factory=list)
    """Finished requests that the wrapped connector never heard of: nor may it now."""


@dataclass(slots=True)
class FillResult:
    """One rank's news of one stand-in."""

    request_id: str
    loaded: bool = False
    """The wrapped connector said that its load is over, well or badly."""
    failed: bool = False
    """All of the load failed."""
    failed_block_ids: tuple[int, ...] = ()
    saved: bool = False
    """The wrapped connector let go of the stand-in's blocks."""


@dataclass(slots=True)
class WrappedReport(KVConnectorWorkerMetadata):
    """Workers to the scheduler side: the wrapped connector's own report, and every rank's
    results."""

    inner: KVConnectorWorkerMetadata | None
    fills: list[FillResult] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WrappedReport":
        """Join two workers' reports (vLLM calls this on the scheduler's process)."""
        assert isinstance(other, WrappedReport)
        if self.inner is None or other.inner is None:
            inner = self.inner if other.inner is None else other.inner
        else:
            inner = self.inner.aggregate(other.inner)
        return WrappedReport(inner, [*self.fills, *other.fills])
