"""The wrapped connector's numbers and ours reach vLLM's log line and ``/metrics`` page."""

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorLogging,
    KVConnectorProm,
)
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from connectors import plugin
from connectors.session_aware import SessionAwareConnector
from connectors.stats import SpmStats
from connectors.wrapping.stats import WrappedStats
from spm.metrics import Metric, metric_key
from spm.wrap_config import WrapConfig
from tests.connectors.scheduler.vllm_parts import FULL, write_model
from tests.connectors.wrapping.driving import (
    RECORDING,
    Driven,
    Settings,
    config_of,
    multi,
    recording,
    wrapped,
)
from tests.connectors.wrapping.recording import STORES, RecordedStore
from tests.connectors.wrapping.recording_parts import RecordedStats

WRAP = WrapConfig("RecordingHMAConnector", RECORDING)
BYPASSED, SESSIONS = metric_key(Metric.BYPASSED_REQUESTS, "adapter"), metric_key(Metric.SESSIONS)
PROMPT = list(range(3, 44))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    STORES["store"] = RecordedStore()
    return write_model(tmp_path)


def stats_of(moved: int | None, bypassed: float = 0, sessions: float | None = None) -> WrappedStats:
    inner = None if moved is None else RecordedStats({"moved": moved})
    counters = {BYPASSED: bypassed} if bypassed else {}
    gauges = {SESSIONS: sessions} if sessions is not None else {}
    joined = WrappedStats.joined(WRAP, inner, counters, gauges)
    assert joined is not None
    return joined


def test_nothing_to_tell_is_nothing() -> None:
    assert WrappedStats.joined(WRAP, None, {}, {}) is None
    empty = WrappedStats.joined(WRAP, RecordedStats({}), {}, {})
    assert empty is not None, "alone, the connector would have told of it too"
    assert empty.is_empty()
    assert not stats_of(3).is_empty()
    assert not stats_of(None, sessions=0).is_empty()


def test_both_parts_add_up_each_by_its_own_rules() -> None:
    total = stats_of(None, sessions=1)
    for part in (stats_of(3, 2), stats_of(4, 1, sessions=5), stats_of(None, 1)):
        total = total.aggregate(part)
    assert total.reduce() == {"moved": 7, BYPASSED: 4, "spm:sessions": 5}
    total.reset()
    assert total.is_empty()


def there(stats: SpmStats) -> SpmStats:
    """As the API server gets them."""
    sent = SchedulerStats(kv_connector_stats=stats.to_dict())
    received = MsgpackDecoder(SchedulerStats).decode(MsgpackEncoder().encode(sent))
    assert received.kv_connector_stats is not None
    built = SessionAwareConnector.build_kv_connector_stats(received.kv_connector_stats)
    assert isinstance(built, SpmStats)
    return built


def test_they_are_rebuilt_from_what_crosses_processes() -> None:
    for stats in (stats_of(3, 2, 5), stats_of(None, 2), stats_of(3)):
        again = there(stats)
        assert type(again) is WrappedStats
        assert again.to_dict() == stats.to_dict()
        assert again.reduce() == stats.reduce()
        assert type(pickle.loads(pickle.dumps(stats))) is WrappedStats
    own = SpmStats.of({BYPASSED: 1}, {})
    assert type(there(own)) is SpmStats


def test_vllms_log_line_has_both(directory: Path) -> None:
    config, _ = config_of(directory, wrapped(recording("store")), FULL)
    logging: Any = KVConnectorLogging(config.kv_transfer_config)
    lines: list[str] = []
    for stats in (stats_of(None, 1), stats_of(3, 2), stats_of(4, sessions=6)):
        logging.observe(stats.to_dict())
    logging.log(lambda template, *args: lines.append(template % args))
    assert lines == [
        "KV Transfer metrics: moved=7, spm:bypassed_requests|adapter=3, spm:sessions=6"
    ]


class Page:
    """A Prometheus page of its own, made as vLLM's API server makes it."""

    def __init__(self, directory: Path, connector: Settings) -> None:
        self.registry = registry = CollectorRegistry()

        class Prom(KVConnectorProm):
            _gauge_cls = partial(Gauge, registry=registry)  # type: ignore[assignment]
            _counter_cls = partial(Counter, registry=registry)  # type: ignore[assignment]
            _histogram_cls = partial(Histogram, registry=registry)  # type: ignore[assignment]

        config, _ = config_of(directory, connector, FULL)
        self.prom: Any = Prom(config, ["model_name", "engine"], {0: ["m", "0"]})

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"model_name": "m", "engine": "0", **labels})


def test_both_are_on_the_page(directory: Path) -> None:
    page = Page(directory, wrapped(recording("store")))
    assert page.value("recorded:moved_total") is None
    assert page.value("spm:bypassed_requests_total", reason="adapter") == 0
    for stats in (stats_of(3, 2, 5), stats_of(None, 1), stats_of(4)):
        page.prom.observe(stats.to_dict())
    assert page.value("recorded:moved_total") == 7
    assert page.value("spm:bypassed_requests_total", reason="adapter") == 3
    assert page.value("spm:sessions") == 5


@pytest.mark.parametrize("sessions", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("shape", ["wrapped", "child", "parent"])
def test_an_engines_numbers_arrive(directory: Path, shape: str, sessions: bool) -> None:
    """From both sides of the connector, through vLLM's scheduler, to log line and page."""
    plugin.register()  # MultiConnector asks for classes by name
    STORES["second"] = RecordedStore()
    connector = {
        "wrapped": wrapped(recording("store"), sessions=sessions),
        "child": multi(wrapped(recording("store"), sessions=sessions)),
        "parent": wrapped(multi(named("store"), named("second")), sessions=sessions),
    }[shape]
    engine, page = Driven(directory, connector), Page(directory, connector)
    config, _ = config_of(directory, connector, FULL)
    logging: Any = KVConnectorLogging(config.kv_transfer_config)
    engine.add("first", PROMPT, max_tokens=1, session="s")
    engine.add("salted", PROMPT, max_tokens=1, adapter="a")
    engine.run()
    engine.step()
    for data in engine.stats:
        page.prom.observe(data)
        logging.observe(data)
    lines: list[str] = []
    logging.log(lambda template, *args: lines.append(template % args))
    moved = 20 if shape == "parent" else 10
    assert page.value("recorded:moved_total") == moved
    assert page.value("spm:bypassed_requests_total", reason="adapter") == 1
    assert page.value("spm:sessions") == (1 if sessions else 0)
    assert len(lines) == 1
    assert f"'moved': {moved}" in lines[0] or f"moved={moved}" in lines[0]
    assert "spm:bypassed_requests|adapter" in lines[0]


def named(store: str) -> Settings:
    """For MultiConnector's own stats the class has to be one that vLLM knows by its name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    name = "RecordingHMAConnector"
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, RECORDING, name)
    return recording(store)
