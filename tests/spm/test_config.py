"""Settings: defaults, the edges of every range, and refusals that name the key but no secret."""

import json
import math
from contextlib import suppress
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spm.config import MAX_TTL_S, GiB, KeepAliveConfig, KiB, MiB, SpmConfig
from spm.errors import ConfigError
from spm.fault_plan import FaultsConfig
from spm.remote_config import BreakerConfig, RemoteConfig

URL = "redis://127.0.0.1:6379/0"
PREFIXES: dict[Any, str] = {
    SpmConfig: "",
    RemoteConfig: "remote.",
    BreakerConfig: "remote.breaker.",
    FaultsConfig: "remote.faults.",
    KeepAliveConfig: "keep_alive.",
}
NUMBERS = [
    pytest.param(prefix + f.name, f.type, *f.metadata["range"], id=prefix + f.name)
    for cls, prefix in PREFIXES.items()
    for f in fields(cls)
    if "range" in f.metadata
]


def nested(name: str, value: object) -> dict[str, Any]:
    """The smallest settings with ``value`` at a dotted name."""
    *path, last = name.split(".")
    raw: dict[str, Any] = {last: value}
    for part in reversed(path):
        raw = {part: raw | ({"url": URL} if part == "remote" else {})}
    return raw


def accept(raw: dict[str, Any]) -> SpmConfig:
    return SpmConfig.from_extra_config(raw)


def value_at(config: SpmConfig, name: str) -> object:
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def refusal(raw: Any) -> str:  # noqa: ANN401  (anything JSON can hold)
    with pytest.raises(ConfigError) as caught:
        SpmConfig.from_extra_config(raw)
    assert caught.value.__cause__ is None
    return str(caught.value)


def test_defaults_need_nothing() -> None:
    config = accept({})
    assert config == SpmConfig()
    assert config.remote is None
    assert (config.host_bytes, config.staging_bytes) == (4 * GiB, 512 * MiB)
    assert (config.namespace, config.save, config.session_ttl_s) == ("spm", "all", 300)
    remote = accept({"remote": {"url": URL}}).remote
    assert remote == RemoteConfig(URL)
    assert (remote.kind, remote.ttl_s, remote.breaker) == ("redis", 86_400, BreakerConfig())


@pytest.mark.parametrize("cls", PREFIXES)
def test_every_default_is_within_its_own_range(cls: Any) -> None:  # noqa: ANN401
    for f in fields(cls):
        if "range" in f.metadata:
            low, high = f.metadata["range"]
            assert low <= f.default <= high, f.name


def test_a_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        accept({}).namespace = "other"  # type: ignore[misc]


@pytest.mark.parametrize(("name", "kind", "low", "high"), NUMBERS)
def test_range_edges(name: str, kind: type, low: float, high: float) -> None:
    for edge in (low, high):
        raw = nested(name, kind(edge))
        if name == "host_bytes":
            raw["remote"] = {"url": URL}
        if name == "save_inflight_bytes":
            raw["staging_bytes"] = 1 << 40
        if name == "staging_bytes":
            raw["save_inflight_bytes"] = 64 * KiB
        value = value_at(accept(raw), name)
        assert value == edge
        assert type(value) is kind
    below = low - 1 if kind is int else math.nextafter(low, -math.inf)
    above = high + 1 if kind is int else math.nextafter(high, math.inf)
    for value in (below, above, 10**400, -(10**400)):
        text = refusal(nested(name, value))
        assert text.startswith(f"{name}=")
        assert f"from {low} to {high}" in text
        if abs(value) < 1e20:
            assert f"={value!r}:" in text


@pytest.mark.parametrize(("name", "kind", "low", "high"), NUMBERS)
@pytest.mark.parametrize("value", [True, False, None, "5", [], [5], {}, math.nan, math.inf])
def test_wrong_types_nan_and_infinity_are_refused(
    name: str, kind: type, low: float, high: float, value: object
) -> None:
    text = refusal(nested(name, value))
    assert text.startswith(f"{name}=")
    assert f"from {low} to {high}" in text


def test_whole_numbers_must_be_whole_but_decimals_may_be() -> None:
    assert refusal({"load_threads": 2.0}).startswith("load_threads=2.0: a whole number from 1")
    assert accept({"load_deadline_s": 3}).load_deadline_s == 3.0


@pytest.mark.parametrize(
    ("raw", "name", "near"),
    [
        ({"host_byte": 1}, "host_byte=1", "did you mean host_bytes?"),
        ({"remote": {"url": URL, "tls_s": 4}}, "remote.tls_s=4", "did you mean remote.ttl_s?"),
        (
            nested("remote.breaker.failure", 3),
            "remote.breaker.failure=3",
            "remote.breaker.failures?",
        ),
        ({"qqqq": 1}, "qqqq=1", "known: ["),
        ({7: 1}, "7=1", "known: ["),
    ],
)
def test_unknown_keys_are_errors_with_a_suggestion(raw: Any, name: str, near: str) -> None:  # noqa: ANN401
    text = refusal(raw)
    assert text.startswith(f"{name}: unknown key")
    assert near in text


def test_no_suggestion_when_nothing_is_near() -> None:
    assert "did you mean" not in refusal({"qqqq": 1})


@pytest.mark.parametrize("name", ["remote", "remote.breaker", "keep_alive"])
@pytest.mark.parametrize("value", [[], "text", 5, True])
def test_objects_must_be_objects(name: str, value: object) -> None:
    text = refusal(nested(name, value))
    assert text.startswith(f"{name}=")
    assert "an object is needed" in text
    assert refusal(value).startswith("extra config=")


def test_remote_may_be_null_but_not_without_a_url() -> None:
    assert accept({"remote": None}).remote is None
    assert "remote.url is missing" in refusal({"remote": {}})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("save", "some", "['all', 'sessions']"),
        ("save", ["all"], "['all', 'sessions']"),
        ("remote.kind", "memcached", "['redis']"),
    ],
)
def test_choices_are_closed(name: str, value: object, allowed: str) -> None:
    text = refusal(nested(name, value))
    assert text.startswith(f"{name}=")
    assert allowed in text
    if isinstance(value, str):
        assert repr(value) in text


def test_more_in_flight_than_staging_is_refused() -> None:
    text = refusal({"staging_bytes": MiB, "save_inflight_bytes": MiB + 1})
    assert text == "save_inflight_bytes=1048577: at most staging_bytes=1048576"
    accept({"staging_bytes": MiB, "save_inflight_bytes": MiB})


def test_no_host_tier_needs_a_remote_store() -> None:
    assert "nothing to do" in refusal({"host_bytes": 0, "sam": {"enabled": False}})
    accept({"host_bytes": 0, "remote": {"url": URL}})


@pytest.mark.parametrize("namespace", ["a", "A-z_0.9", "x" * 64])
def test_namespaces_accepted(namespace: str) -> None:
    assert accept({"namespace": namespace}).namespace == namespace


@pytest.mark.parametrize("namespace", ["", "x" * 65, "a:b", "a b", "a\n", "ä", "a/b", "{a}"])
def test_namespaces_refused(namespace: str) -> None:
    text = refusal({"namespace": namespace})
    assert text.startswith("namespace=")
    assert "1 to 64 letters" in text


@pytest.mark.parametrize("stream", ["", "a", "spm-events_1.0", "x" * 64])
def test_event_streams_accepted(stream: str) -> None:
    assert accept({"events_stream": stream}).events_stream == stream


@pytest.mark.parametrize("stream", ["x" * 65, "a/b", "a b", "a\n", "ä"])
def test_event_streams_refused(stream: str) -> None:
    text = refusal({"events_stream": stream})
    assert text.startswith("events_stream=")
    assert "up to 64 letters" in text


def test_session_ttl_is_bounded_by_the_hint_limit() -> None:
    assert accept({"session_ttl_s": MAX_TTL_S}).session_ttl_s == 3600
    assert "from 0 to 3600" in refusal({"session_ttl_s": MAX_TTL_S + 1})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [f.name for f in fields(SpmConfig)] + [f.name for f in fields(RemoteConfig)]
)


@given(st.dictionaries(NAMES | st.text(max_size=8), JSON, max_size=3), st.booleans())
def test_any_json_is_accepted_or_refused_never_a_crash(raw: dict[str, Any], inside: bool) -> None:
    with suppress(ConfigError):
        SpmConfig.from_extra_config({"remote": {"url": URL} | raw} if inside else raw)


def test_settings_survive_the_command_line() -> None:
    raw = {"remote": {"url": URL, "breaker": {"failures": 5}}, "save": "sessions"}
    assert accept(json.loads(json.dumps(raw))) == accept(raw)
