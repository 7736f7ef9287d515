"""Our numbers on their way to vLLM's log line and ``/metrics`` page."""

import copy
import pickle
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from connectors.metadata import LoadFailure
from connectors.stats import SpmPromMetrics, SpmStats
from spm.metrics import Metric, metric_key

LOADS_OK = metric_key(Metric.LOADS, "ok")
LOAD_SECONDS = metric_key(Metric.LOAD_SECONDS)
SESSIONS = metric_key(Metric.SESSIONS)
KEYS = st.sampled_from([metric_key(m, v) for m in Metric for v in m.spec.values])
AMOUNTS = st.dictionaries(KEYS, st.integers(0, 1000).map(float), max_size=5)


def test_load_failures_are_the_labels_of_their_metric() -> None:
    assert {why.value for why in LoadFailure} == set(Metric.LOAD_FAILED_BLOCKS.spec.values)


@given(st.lists(st.tuples(AMOUNTS, AMOUNTS), min_size=1, max_size=5))
def test_counters_add_up_and_the_last_gauge_wins(parts: list[tuple[Any, Any]]) -> None:
    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    total = SpmStats()
    for part_counters, part_gauges in parts:
        part = SpmStats.of(part_counters, part_gauges)
        before = copy.deepcopy(part.data)
        total = total.aggregate(part)
        assert part.data == before, "what is added is not changed"
        for key, amount in part_counters.items():
            counters[key] = counters.get(key, 0) + amount
        gauges.update(part_gauges)
    assert total.to_dict() == {"counters": counters, "gauges": gauges}
    assert total.is_empty() == (not counters and not gauges)


def test_stats_do_not_share_what_they_were_made_of() -> None:
    counters = {LOADS_OK: 1.0}
    stats = SpmStats.of(counters, {})
    stats.aggregate(SpmStats.of({LOADS_OK: 2.0}, {}))
    assert counters == {LOADS_OK: 1.0}


def test_reset_forgets_everything() -> None:
    stats = SpmStats.of({LOADS_OK: 1}, {SESSIONS: 2})
    stats.reset()
    assert stats.is_empty()
    assert stats.reduce() == {}
    stats.aggregate(SpmStats.of({LOADS_OK: 3}, {}))
    assert stats.reduce() == {"spm:loads|ok": 3}


def test_the_log_line_has_counters_and_gauges_by_readable_names() -> None:
    stats = SpmStats.of({LOADS_OK: 1, LOAD_SECONDS: 2}, {SESSIONS: 3})
    assert stats.reduce() == {"spm:loads|ok": 1, "spm:load_seconds": 2, "spm:sessions": 3}


def test_a_gauge_alone_is_worth_telling() -> None:
    """vLLM drops empty scheduler-side stats, and the page would keep the old value."""
    assert SpmStats().is_empty()
    assert SpmStats.of({}, {}).is_empty()
    assert not SpmStats.of({}, {SESSIONS: 0}).is_empty()
    assert not SpmStats.of({LOADS_OK: 1}, {}).is_empty()


def test_workers_stats_survive_pickling() -> None:
    stats = SpmStats.of({LOADS_OK: 1.5}, {SESSIONS: 3})
    again = pickle.loads(pickle.dumps(stats))
    assert type(again) is SpmStats
    assert again == stats
    assert again.aggregate(stats).reduce()["spm:loads|ok"] == 3.0


def test_stats_survive_the_way_to_the_api_server() -> None:
    stats = SpmStats.of({LOADS_OK: 1.5}, {SESSIONS: 3})
    sent = SchedulerStats(kv_connector_stats=stats.to_dict())
    received = MsgpackDecoder(SchedulerStats).decode(MsgpackEncoder().encode(sent))
    assert received.kv_connector_stats == stats.to_dict()


def test_vllms_log_line_sums_an_interval_and_starts_over() -> None:
    logging: Any = KVConnectorLogging(
        KVTransferConfig(
            kv_connector="SessionAwareConnector",
            kv_connector_module_path="connectors.session_aware",
            kv_role="kv_both",
        )
    )
    lines: list[str] = []

    def log(template: str, *args: object) -> None:
        lines.append(template % args)

    for sessions in (1, 2):
        logging.observe(SpmStats.of({LOADS_OK: 2}, {SESSIONS: sessions}).to_dict())
    logging.log(log)
    logging.log(log)
    assert lines == ["KV Transfer metrics: spm:loads|ok=4, spm:sessions=2"]


class Page:
    """A Prometheus page of its own, for two engines."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        types = {cls: partial(cls, registry=self.registry) for cls in (Counter, Gauge, Histogram)}
        config: Any = SimpleNamespace(kv_transfer_config=None)
        labels: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
        self.metrics = SpmPromMetrics(config, types, ["model_name", "engine"], labels)

    def value(self, metric: Metric, label: str = "", engine: str = "0") -> float | None:
        spec = metric.spec
        labels = {"model_name": "m", "engine": engine}
        if spec.label:
            labels |= dict(zip(spec.label.split(","), label.split(","), strict=True))
        suffix = "" if spec.gauge else "_total"
        return self.registry.get_sample_value(spec.name + suffix, labels)


@pytest.fixture
def page() -> Page:
    return Page()


def test_every_series_exists_at_zero_from_the_start(page: Page) -> None:
    for metric in Metric:
        for label in metric.spec.values:
            for engine in ("0", "1"):
                assert page.value(metric, label, engine) == 0, (metric, label)
    families = {family.name for family in page.registry.collect()}
    assert families == {metric.spec.name for metric in Metric}


def test_observations_arrive_at_their_engine(page: Page) -> None:
    page.metrics.observe(SpmStats.of({LOADS_OK: 2}, {SESSIONS: 5}).to_dict(), 1)
    page.metrics.observe(SpmStats.of({LOADS_OK: 3}, {SESSIONS: 4}).to_dict(), 1)
    page.metrics.observe({}, 1)
    assert page.value(Metric.LOADS, "ok", "1") == 5
    assert page.value(Metric.SESSIONS, engine="1") == 4
    assert page.value(Metric.LOADS, "failed", "1") == 0
    assert page.value(Metric.LOADS, "ok", "0") == 0
    assert page.value(Metric.SESSIONS, engine="0") == 0


@pytest.mark.parametrize("metric", Metric)
def test_every_metric_can_be_observed(page: Page, metric: Metric) -> None:
    for number, label in enumerate(metric.spec.values, 1):
        amounts = {metric_key(metric, label): float(number)}
        stats = SpmStats.of({}, amounts) if metric.spec.gauge else SpmStats.of(amounts, {})
        page.metrics.observe(stats.to_dict())
    for number, label in enumerate(metric.spec.values, 1):
        assert page.value(metric, label) == number
