"""The catalogue of numbers is closed, and no increment is lost between threads."""

import re
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spm.metrics import Counters, Metric, metric_key

COUNTERS = [metric for metric in Metric if not metric.spec.gauge]


def test_names_are_unique_valid_and_documented() -> None:
    names = [metric.spec.name for metric in Metric]
    assert len(set(names)) == len(names)
    for metric in Metric:
        assert re.fullmatch(r"spm:[a-z_]+", metric.spec.name)
        assert not metric.spec.name.endswith("_total"), "Prometheus adds it"
        assert metric.spec.doc.endswith(".")


@pytest.mark.parametrize("metric", Metric)
def test_label_sets_are_closed(metric: Metric) -> None:
    spec = metric.spec
    assert len(set(spec.values)) == len(spec.values)
    if spec.label:
        names = spec.label.split(",")
        for value in spec.values:
            parts = value.split(",")
            assert len(parts) == len(names)
            assert all(re.fullmatch(r"[a-z_]+", part) for part in parts)
        assert not {"session_id", "tenant", "request_id", "key"} & set(names)
    else:
        assert spec.values == ("",)


def test_keys_are_distinct_over_all_metrics_and_labels() -> None:
    keys = [metric_key(metric, value) for metric in Metric for value in metric.spec.values]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("metric", COUNTERS)
@pytest.mark.fault("F15", breaks="a label may be anything")
def test_a_label_outside_the_set_is_a_programming_error(metric: Metric) -> None:
    counters = Counters()
    with pytest.raises(AssertionError, match="has no label"):
        counters.add(metric, label="somebody's session")
    if metric.spec.label:
        with pytest.raises(AssertionError, match="has no label"):
            counters.add(metric)
    assert counters.drain() == {}


def test_a_drain_takes_everything_once() -> None:
    counters = Counters()
    counters.add(Metric.LOADS, label="ok")
    counters.add(Metric.LOADS, 2, label="ok")
    counters.add(Metric.LOADS, label="failed")
    counters.add(Metric.LOAD_SECONDS, 0.5)
    drained = counters.drain()
    assert drained == {"spm:loads|ok": 3, "spm:loads|failed": 1, "spm:load_seconds|": 0.5}
    assert counters.drain() == {}
    counters.add(Metric.LOAD_SECONDS)
    assert counters.drain() == {"spm:load_seconds|": 1}
    assert drained["spm:loads|ok"] == 3, "a drained mapping is the caller's"


ADDS = st.lists(
    st.tuples(st.sampled_from([(m, v) for m in COUNTERS for v in m.spec.values]), st.integers(0, 9))
)


@given(st.lists(ADDS, max_size=4))
def test_drains_add_up_to_what_was_added(
    rounds: list[list[tuple[tuple[Metric, str], int]]],
) -> None:
    counters = Counters()
    expected: dict[str, float] = {}
    seen: dict[str, float] = {}
    for adds in rounds:
        for (metric, label), amount in adds:
            counters.add(metric, amount, label)
            key = metric_key(metric, label)
            if amount:
                expected[key] = expected.get(key, 0) + amount
        for key, drained in counters.drain().items():
            seen[key] = seen.get(key, 0) + drained
    assert seen == expected


def test_no_increment_is_lost_between_threads() -> None:
    counters = Counters()
    start = threading.Barrier(5)

    def work() -> None:
        start.wait()
        for _ in range(3000):
            counters.add(Metric.LOADS, label="ok")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    total = 0.0
    while any(thread.is_alive() for thread in threads):
        total += sum(counters.drain().values())
    for thread in threads:
        thread.join()
    total += sum(counters.drain().values())
    assert total == 12_000


class Yielding(float):
    """A number whose addition gives other threads a turn: a read-modify-write shows."""

    def __radd__(self, other: float) -> float:
        time.sleep(0)
        return other + float(self)


def test_adding_is_one_step_for_other_threads() -> None:
    counters = Counters()
    counters.add(Metric.LOAD_SECONDS, 0)

    def work() -> None:
        for _ in range(200):
            counters.add(Metric.LOAD_SECONDS, Yielding(1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.drain() == {"spm:load_seconds|": 800}
