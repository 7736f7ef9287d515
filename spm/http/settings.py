"""Our connector's settings, found in the vLLM configuration that the API server has."""

from collections.abc import Mapping
from typing import Any

from spm.config import SamConfig, SpmConfig

CONNECTOR = "SessionAwareConnector"

NO_CONNECTOR = (
    "session operations need this server to be started with --kv-transfer-config "
    f'\'{{"kv_connector": "{CONNECTOR}", ...}}\''
)
NOT_ENABLED = (
    "session operations are switched off: set sam.enabled=true in kv_connector_extra_config"
)


def sam_settings(kv_transfer_config: Any) -> SamConfig | str:  # noqa: ANN401
    """What is configured, or a sentence that says what to set.

    ``kv_transfer_config`` is vLLM's, or None. Raises :class:`spm.errors.ConfigError` for
    settings the engine cannot have started with.
    """
    if kv_transfer_config is None:
        return NO_CONNECTOR
    extra = _extra_config(
        kv_transfer_config.kv_connector, kv_transfer_config.kv_connector_extra_config
    )
    if extra is None:
        return NO_CONNECTOR
    sam = SpmConfig.from_extra_config(extra).sam
    return sam if sam.enabled else NOT_ENABLED


def _extra_config(connector: object, extra: object) -> Mapping[str, Any] | None:
    """The extra config of our connector, which may be one of several in a MultiConnector."""
    fields = extra if isinstance(extra, Mapping) else {}
    if connector == CONNECTOR:
        return fields
    if connector == "MultiConnector":
        for one in fields.get("connectors", ()):
            found = _extra_config(one.get("kv_connector"), one.get("kv_connector_extra_config"))
            if found is not None:
                return found
    return None
