"""A password in the settings shows up in no repr, error or log line, however it got there."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.stores.buffers import BufferPool
from connectors.stores.factory import create_remote_store
from spm.config import SpmConfig
from spm.errors import ConfigError
from spm.remote_config import RemoteConfig

SECRET = "hunter2"


@pytest.mark.parametrize("scheme", ["redis", "rediss", "unix", "redis+cluster", "rediss+cluster"])
def test_schemes_accepted(scheme: str) -> None:
    url = f"{scheme}://host/0"
    remote = SpmConfig.from_extra_config({"remote": {"url": url}}).remote
    assert remote is not None
    assert remote.url == url


@pytest.mark.parametrize(
    "url", ["", "host:6379", "http://h", "REDIS://h", " redis://h", "redis:h", "redis+x://h"]
)
def test_schemes_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"remote\.url has scheme .*'rediss\+cluster'"):
        SpmConfig.from_extra_config({"remote": {"url": url}})


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("redis://:hunter2@h:6379/0", "redis://h:6379/0"),
        ("rediss://user:hunter2@h/1", "rediss://h/1"),
        ("redis+cluster://u:hunter2@[::1]:7000", "redis+cluster://[::1]:7000"),
        ("unix://u:hunter2@/run/redis.sock?db=1", "unix:///run/redis.sock"),
        ("redis://h/0?password=hunter2&db=1", "redis://h/0"),
        ("redis://h/0?username=u@x&password=hunter2", "(unreadable URL)"),
        ("redis://h/0?password=x@hunter2", "(unreadable URL)"),
        # Characters that should have been escaped.
        ("redis://:a/hunter2@h:1/0", "redis://h:1/0"),
        ("redis://:hunter2#b@h:1/0", "redis://h:1/0"),
        ("redis://:hunter2@b@h:1/0", "redis://h:1/0"),
        ("redis://:hunter2?b@h:1/0", "(unreadable URL)"),
        ("redis://:hunter2", "(unreadable URL)"),
        ("redis://h/0#hunter2", "(unreadable URL)"),
        ("hunter2@h:6379", "(unreadable URL)"),
        ("redis://[::1", "(unreadable URL)"),
        ("", "(unreadable URL)"),
    ],
)
def test_a_redacted_url_keeps_the_place_and_nothing_else(url: str, shown: str) -> None:
    assert RemoteConfig(url).redacted_url == shown
    assert SECRET not in repr(RemoteConfig(url))


ODD = st.text(st.sampled_from("ab:/?#[]@%&=1"), max_size=6)


@given(ODD, ODD, st.sampled_from(["redis", "rediss", "unix", "redis+cluster"]))
def test_no_redacted_url_holds_a_password(before: str, after: str, scheme: str) -> None:
    password = f"{before}{SECRET}{after}"
    for url in (
        f"{scheme}://:{password}@host:6379/0",
        f"{scheme}://user:{password}@host",
        f"{scheme}://host/0?password={password}",
        f"{scheme}://u:x@host/0?db=1&password={password}",
    ):
        assert SECRET not in RemoteConfig(url).redacted_url


@pytest.mark.parametrize(
    "raw",
    [
        f"redis://:{SECRET}@h",
        [SECRET],
        {"remote": f"redis://:{SECRET}@h"},
        {"remote": [f"redis://:{SECRET}@h"]},
        {"remote": {"url": [f"redis://:{SECRET}@h"]}},
        {"remote": {"url": {"password": SECRET}}},
        {"remote": {"url": f"http://:{SECRET}@h"}},
        {"remote": {"url": f"{SECRET}@h:6379"}},
        {"remote": {"url": f"user:{SECRET}@h://x"}},
        {"remote": {"uri": f"redis://:{SECRET}@h"}},
        {"remote": {"url": "redis://h", "password": SECRET}},
        {"remote": {"url": f"redis://:{SECRET}@h", "nonsense": 1}},
        {"remote": {"url": f"redis://:{SECRET}@h", "ttl_s": -1}},
        {"remote": {"url": "redis://h", "breaker": f"redis://:{SECRET}@h"}},
        {"remote": {"url": "redis://h", "kind": f"redis://:{SECRET}@h"}},
        {"remote": {"url": f"redis://:{SECRET}@h", "password_file": "/f"}},
        {"remote": {"url": f"redis://u:{SECRET}@h", "password_env": "V"}},
        {"remote": {"url": f"redis://h?password={SECRET}", "password_env": "V"}},
        {"remote": {"url": f"redis://h?db=1&%70assword={SECRET}", "password_file": "/f"}},
        {"remote": {"url": "redis://h", "password_file": f"/{SECRET}", "password_env": SECRET}},
        {"remote": {"url": "redis://h", "password_env": f"{SECRET}!"}},
        {"remote": {"url": "redis://h", "password_env": [SECRET]}},
        {"remote": {"url": "redis://h", "auth_key": SECRET}},
        {"remote": {"url": "redis://h", "auth_key_env": f"{SECRET}="}},
        {"remote": {"url": "redis://h", "auth_key_file": SECRET, "auth_key_env": SECRET}},
        {"remote_url": f"redis://:{SECRET}@h"},
        {"redis": {"password": SECRET}},
        {"redis_password": SECRET},
        {"save": f"redis://:{SECRET}@h"},
        {"host_bytes": f"redis://:{SECRET}@h"},
        {"namespace": {"password": SECRET}},
    ],
)
def test_no_refusal_quotes_a_password(raw: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError) as caught:
        SpmConfig.from_extra_config(raw)
    shown = "".join(
        str(e) for e in (caught.value, caught.value.__cause__, caught.value.__context__)
    )
    assert SECRET not in shown


def test_no_repr_of_a_config_quotes_a_password() -> None:
    config = SpmConfig.from_extra_config({"remote": {"url": f"redis://u:{SECRET}@h"}})
    assert SECRET not in repr(config)
    assert SECRET not in str(config)


@pytest.mark.parametrize("url", ["redis://h", "redis://user@h:1/2", "rediss://h?ssl_ca_certs=/p"])
@pytest.mark.parametrize("place", ["file", "env"])
def test_secrets_outside_of_the_settings(url: str, place: str) -> None:
    """Where they are is not shown either: it may be the secret itself, put in the wrong place."""
    raw = {"url": url, f"password_{place}": SECRET, f"auth_key_{place}": SECRET}
    config = SpmConfig.from_extra_config({"remote": raw})
    assert config.remote is not None
    for source in (config.remote.password, config.remote.auth_key):
        assert source is not None
        with pytest.raises(ConfigError) as caught:
            source.read()
        assert SECRET not in f"{config} {config!r} {source} {caught.value} {caught.value.__cause__}"
    with pytest.raises(ConfigError) as refused:
        create_remote_store(
            "redis",
            pool=BufferPool(1),
            url=url,
            connect_timeout_s=1.0,
            ttl_s=None,
            password=config.remote.password,
        )
    assert SECRET not in str(refused.value)


def test_without_them_there_is_no_source() -> None:
    remote = RemoteConfig("redis://:x@h")
    assert remote.password is None
    assert remote.auth_key is None
