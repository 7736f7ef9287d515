"""Our metrics on vLLM's own ``/metrics`` page, through its connector hooks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from spm.metrics import Metric, metric_key

_COUNTERS, _GAUGES = "counters", "gauges"


@dataclass
class SpmStats(KVConnectorStats):
    """Counter increments since the last step and current gauges, by metric key."""

    @classmethod
    def of(cls, counters: Mapping[str, float], gauges: Mapping[str, float]) -> "SpmStats":
        """Stats of one half for one step."""
        return cls({_COUNTERS: dict(counters), _GAUGES: dict(gauges)})

    def _part(self, name: str) -> dict[str, float]:
        part: dict[str, float] = self.data.setdefault(name, {})
        return part

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "SpmStats":
        """Add the counters of ``other`` and take over its gauges."""
        assert isinstance(other, SpmStats)
        counters = self._part(_COUNTERS)
        for key, amount in other._part(_COUNTERS).items():
            counters[key] = counters.get(key, 0) + amount
        self._part(_GAUGES).update(other._part(_GAUGES))
        return self

    def reduce(self) -> dict[str, int | float]:
        """The counters of one interval and the last gauges, for vLLM's log line."""
        both = {**self._part(_COUNTERS), **self._part(_GAUGES)}
        return {key.rstrip("|"): amount for key, amount in both.items()}

    def is_empty(self) -> bool:
        """Nothing to tell. vLLM drops empty stats, so gauges count: they fall to zero in
        steps in which no counter moves."""
        return not self._part(_COUNTERS) and not self._part(_GAUGES)


class SpmPromMetrics(KVConnectorPromMetrics):
    """Registers the whole catalogue, every label value included, so that a counter that
    has not moved is 0 and not absent."""

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401  (vLLM's own signature)
        metric_types: Any,  # noqa: ANN401
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series: dict[str, dict[int, Any]] = {}
        for metric in Metric:
            self._register(metric, metric_types, labelnames)

    def _register(self, metric: Metric, metric_types: Any, labelnames: list[str]) -> None:  # noqa: ANN401
        spec = metric.spec
        names = [*labelnames, *spec.label.split(",")] if spec.label else list(labelnames)
        kwargs: dict[str, Any] = {"name": spec.name, "documentation": spec.doc, "labelnames": names}
        if spec.gauge:
            kwargs["multiprocess_mode"] = "mostrecent"
        family = metric_types[Gauge if spec.gauge else Counter](**kwargs)
        for value in spec.values:
            self._series[metric_key(metric, value)] = {
                engine: family.labels(*labels, *(value.split(",") if spec.label else []))
                for engine, labels in self.per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """One step's stats of one engine (API server process)."""
        for key, amount in transfer_stats_data.get(_COUNTERS, {}).items():
            self._series[key][engine_idx].inc(amount)
        for key, amount in transfer_stats_data.get(_GAUGES, {}).items():
            self._series[key][engine_idx].set(amount)
