"""Finding our connector's settings in vLLM's configuration."""

from types import SimpleNamespace
from typing import Any

import pytest

from spm.config import SamConfig
from spm.errors import ConfigError
from spm.http.settings import NO_CONNECTOR, NOT_ENABLED, sam_settings


def config(name: str | None, extra: Any) -> SimpleNamespace:  # noqa: ANN401
    return SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra)


def ours(extra: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"kv_connector": "SessionAwareConnector", "kv_connector_extra_config": extra}


OTHER = {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"sam": "not ours"}}


def test_our_connector() -> None:
    found = sam_settings(config("SessionAwareConnector", {"sam": {"ranges": False}}))
    assert found == SamConfig(ranges=False)


@pytest.mark.parametrize("extra", [{}, None])
def test_no_extra_config_is_the_default_one(extra: dict[str, Any] | None) -> None:
    assert sam_settings(config("SessionAwareConnector", extra)) == SamConfig()


def test_one_of_several_connectors() -> None:
    several = {"connectors": [OTHER, ours({"sam": {"tenant_header": "X-Tenant"}})]}
    assert sam_settings(config("MultiConnector", several)) == SamConfig(tenant_header="X-Tenant")


@pytest.mark.parametrize(
    "found",
    [
        None,
        config(None, {}),
        config("NixlConnector", {"connectors": [ours({})]}),
        config("MultiConnector", {"connectors": [OTHER]}),
        config("MultiConnector", {}),
    ],
)
def test_without_our_connector(found: SimpleNamespace | None) -> None:
    assert sam_settings(found) == NO_CONNECTOR
    assert "--kv-transfer-config" in NO_CONNECTOR


def test_switched_off() -> None:
    assert sam_settings(config("SessionAwareConnector", {"sam": {"enabled": False}})) == NOT_ENABLED
    assert "sam.enabled" in NOT_ENABLED


def test_settings_the_engine_cannot_have_started_with() -> None:
    with pytest.raises(ConfigError, match=r"sam\.range"):
        sam_settings(config("SessionAwareConnector", {"sam": {"range": False}}))
