"""That all stores are timed with the same values. No times are looked at."""

import pytest

from benchmarks.micro import store
from benchmarks.report import Options, Report
from spm.demo.lmcache_process import lmcache_installed
from tests.redis_server import EXECUTABLE, running_redis

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="redis-server is not installed")


def test_put_get_and_touch_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "VALUES", {"small": (3, 5000)})
    report = Report("micro", Options(quick=True, seed=1, json_path=None), 2)

    with running_redis() as server:
        store.measure_store(report, server.tcp_url, 700)
        with server.client() as client:
            assert client.dbsize() == 0

    bare = {"put_over_bare_redis_small", "get_over_bare_redis_small", "touch_over_bare_redis"}
    lmcache = {"touch_over_lmcache_exists"} | {
        f"{kind}_over_lmcache_small{threads}"
        for kind in ("put", "get")
        for threads in ("", "_equal_threads")
    }
    assert report.ratios.keys() == (bare | lmcache if lmcache_installed() else bare)
    assert report.counts["ours_touched_keys_per_s"] > 0


def test_a_value_that_is_not_there_is_not_touched() -> None:
    with running_redis() as server:
        touchers = store._touchers(server.tcp_url, 20)
        touchers["ours"]()
        touchers["bare"]()
        with server.client() as client:
            assert 0 < client.ttl("touched:3") <= 86_400
            client.delete("touched:3")

        for name in ("ours", "bare"):
            with pytest.raises(AssertionError):
                touchers[name]()
