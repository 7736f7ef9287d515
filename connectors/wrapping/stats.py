"""The wrapped connector's numbers and ours, on one way to vLLM's log line and ``/metrics``."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from connectors.stats import SpmPromMetrics, SpmStats
from connectors.wrapping.inner import class_named, inner_class, inner_config
from spm.wrap_config import WrapConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_WRAPPED = "wrapped"


class WrappedStats(SpmStats):
    """Ours as ever, and the wrapped connector's own object beside them.

    Every rank and the scheduler's side use this class in every step, also if one of the two
    parts has nothing: vLLM joins stats of one class only.
    """

    def __init__(
        self,
        ours: dict[str, Any],
        inner: KVConnectorStats | None,
        connector: str,
        module_path: str,
    ) -> None:
        super().__init__(ours)
        self.inner = inner
        self._connector = connector
        self._module_path = module_path

    @classmethod
    def joined(
        cls,
        wrap: WrapConfig,
        inner: KVConnectorStats | None,
        counters: Mapping[str, float],
        gauges: Mapping[str, float],
    ) -> "WrappedStats | None":
        """One step's; None if there is nothing to tell, as the wrapped connector alone would."""
        if inner is None and not counters and not gauges:
            return None
        ours = SpmStats.of(counters, gauges).data if counters or gauges else {}
        return cls(ours, inner, wrap.kv_connector, wrap.kv_connector_module_path)

    def to_dict(self) -> dict[str, Any]:
        """What crosses to the API server; it names the class that can read the inner part."""
        stats = None if self.inner is None else self.inner.to_dict()
        named = {"connector": self._connector, "module_path": self._module_path}
        return {**self.data, _WRAPPED: {**named, "stats": stats}}

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        if self.inner is not None:
            self.inner.reset()  # type: ignore[no-untyped-call]

    def aggregate(self, other: KVConnectorStats) -> "WrappedStats":
        """Both parts, each by its own rules."""
        assert isinstance(other, WrappedStats)
        super().aggregate(other)
        if self.inner is None:
            self.inner = other.inner
        elif other.inner is not None:
            self.inner = self.inner.aggregate(other.inner)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Both, for vLLM's log line. Our names begin with ``spm:``."""
        theirs = {} if self.inner is None or self.inner.is_empty() else self.inner.reduce()
        return {**theirs, **super().reduce()}

    def is_empty(self) -> bool:
        """Neither part has anything to tell."""
        return super().is_empty() and (self.inner is None or self.inner.is_empty())


def rebuilt(data: Mapping[str, Any]) -> SpmStats:
    """Stats from :meth:`SpmStats.to_dict`, in the API server's process."""
    ours = {name: part for name, part in data.items() if name != _WRAPPED}
    wrapped = data.get(_WRAPPED)
    if wrapped is None:
        return SpmStats(ours)
    connector, module_path = wrapped["connector"], wrapped["module_path"]
    inner = None
    if wrapped["stats"] is not None:
        found = class_named(connector, module_path)
        inner = found.build_kv_connector_stats(data=wrapped["stats"])
    return WrappedStats(ours, inner, connector, module_path)


class WrappedPromMetrics(SpmPromMetrics):
    """Our catalogue and the wrapped connector's own metrics."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: Any,  # noqa: ANN401  (vLLM's own signature)
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        wrap: WrapConfig,
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._inner: KVConnectorPromMetrics | None = inner_class(wrap).build_prom_metrics(
            inner_config(vllm_config, wrap), metric_types, labelnames, per_engine_labelvalues
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """One step's stats of one engine (API server process)."""
        super().observe(transfer_stats_data, engine_idx)
        stats = transfer_stats_data.get(_WRAPPED, {}).get("stats")
        if self._inner is not None and stats is not None:
            self._inner.observe(stats, engine_idx)
