"""Settings of a wrapped connector: one connector moves KV, and no setting is ignored."""

from typing import Any

import pytest

from spm.config import SpmConfig
from spm.errors import ConfigError

WRAP = {"kv_connector": "OffloadingConnector"}


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        SpmConfig.from_extra_config(raw)
    return str(caught.value)


def test_a_store_needs_no_more_than_its_name() -> None:
    config = SpmConfig.from_extra_config({"store": {"kind": "lmcache"}})
    assert config.wrapped is not None
    assert config.wrapped.kv_connector == "LMCacheMPConnector"
    assert dict(config.wrapped.kv_connector_extra_config) == {
        "lmcache.mp.server_urls": ["tcp://127.0.0.1:5555"],
        "lmcache.mp.save_decode_cache": True,
        "lmcache.mp.mq_timeout": 5.0,
    }
    assert not config.pools
    assert config.holds_keys


def test_an_empty_store_is_one_too() -> None:
    assert SpmConfig.from_extra_config({"store": {}}).wrapped is not None


def test_more_settings_of_lmcache_go_through() -> None:
    extra = {"lmcache.mp.mq_timeout": 3, "lmcache.mp.save_decode_cache": False}
    config = SpmConfig.from_extra_config({"store": {"extra": extra}})
    assert config.wrapped is not None
    assert config.wrapped.kv_connector_extra_config.items() >= extra.items()


def test_keys_are_held_where_there_is_somebody_to_ask() -> None:
    wrap = {"kv_connector": "LMCacheConnectorV1", "remote_url": "redis://h:1"}
    assert SpmConfig.from_extra_config({"wrap": wrap}).holds_keys
    assert not SpmConfig.from_extra_config({"wrap": WRAP}).holds_keys


def test_sessions_can_be_off_and_there_is_something_to_do() -> None:
    assert SpmConfig.from_extra_config({"wrap": WRAP, "sam": {"enabled": False}}).wrapped


@pytest.mark.parametrize(
    "raw",
    [
        {"store": {}, "wrap": WRAP},
        {"store": {}, "remote": {"url": "redis://h:1"}},
        {"wrap": WRAP, "host_bytes": 1 << 30},
    ],
    ids=["store and wrap", "store and remote", "wrap and host"],
)
def test_only_one_moves_kv(raw: dict[str, Any]) -> None:
    both = [name for name in ("store", "wrap", "remote", "host_bytes") if name in raw]
    assert refusal(raw).startswith(" and ".join(both) + ": one connector moves KV")


@pytest.mark.parametrize(
    ("name", "value"),
    [("auto", True), ("events_stream", "s"), ("manifests", False), ("save", "sessions")],
)
def test_settings_of_our_own_tiers_are_not_ignored(name: str, value: object) -> None:
    assert refusal({"wrap": WRAP, name: value}).startswith(f"{name}: of our own tiers")


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({"wrap": {}}, "wrap.kv_connector is missing"),
        ({"wrap": {"kv_connector": "SessionAwareConnector"}}, "cannot wrap itself"),
        ({"wrap": {**WRAP, "isolates_cache_salt": True}}, "one of ['auto', 'no', 'yes']"),
        ({"wrap": {**WRAP, "kv_connector_extra_config": []}}, "an object is needed"),
        ({"wrap": {**WRAP, "remote_url": "http://h"}}, "wrap.remote_url has scheme 'http'"),
        ({"store": {"kind": "redis"}}, "store.kind='redis': one of ['lmcache']"),
        ({"store": {"url": "127.0.0.1:5555"}}, "store.url: tcp://HOST:PORT"),
        ({"store": {"control_url": "h:8080"}}, "store.control_url: http://HOST:PORT"),
        ({"store": {"control_url": "http://h:8080/?token=s3cret"}}, "store.control_url"),
        ({"store": {"l2_url": "memory://x"}}, "store.l2_url has scheme"),
        ({"store": {"extra": {"lmcache.mp.port": 1}}}, "`store.url` says"),
        ({"store": {"control_deadline_s": 0}}, "out of range"),
    ],
)
def test_refusals_name_the_setting(raw: dict[str, Any], text: str) -> None:
    said = refusal(raw)
    assert text in said
    assert "s3cret" not in said


def test_no_secret_is_shown() -> None:
    l2_url = "redis://:s3cret@h:1"
    wrap = {
        "kv_connector": "X",
        "remote_url": l2_url,
        "kv_connector_extra_config": {"key": "s3cret"},
    }
    for raw in ({"store": {"l2_url": l2_url, "extra": {"key": "s3cret"}}}, {"wrap": wrap}):
        assert "s3cret" not in repr(SpmConfig.from_extra_config(raw))
