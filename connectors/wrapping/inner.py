"""The wrapped connector: found, configured and built as vLLM would have done it."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from spm.config import SpmConfig
from spm.errors import ConfigError, LayoutError
from spm.wrap_config import WrapConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_NEVER = {
    "SessionAwareConnector": "one engine has one of it",
    "HiSparseConnector": "vLLM finds it by its name in --kv-transfer-config, not inside another",
}


def wrap_of(vllm_config: "VllmConfig") -> WrapConfig | None:
    """What an engine's settings wrap; None: nothing. Raises :class:`ConfigError`."""
    transfer = vllm_config.kv_transfer_config
    return wrap_in(transfer.kv_connector_extra_config if transfer is not None else {})


def wrap_in(extra_config: Mapping[str, Any]) -> WrapConfig | None:
    """The same, from ``kv_connector_extra_config``."""
    if extra_config.get("wrap") is None and extra_config.get("store") is None:
        return None  # whatever else is wrong is said when the connector is built
    return SpmConfig.from_extra_config(extra_config).wrapped


def inner_config(vllm_config: "VllmConfig", wrap: WrapConfig) -> "VllmConfig":
    """vLLM's configuration as the wrapped connector is to see it: a shallow copy, in which
    only the name, the module and the settings of the connector differ."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    config = copy.copy(vllm_config)
    config.kv_transfer_config = dataclasses.replace(
        transfer,
        kv_connector=wrap.kv_connector,
        kv_connector_module_path=wrap.kv_connector_module_path or None,
        kv_connector_extra_config=dict(wrap.kv_connector_extra_config),
    )
    return config


def inner_class(wrap: WrapConfig) -> type[KVConnectorBase_V1]:
    """The wrapped connector's class. Raises :class:`ConfigError` if there is none."""
    return class_named(wrap.kv_connector, wrap.kv_connector_module_path)


def class_named(name: str, module_path: str) -> type[KVConnectorBase_V1]:
    """A connector class by its name and, if vLLM does not know it, its module."""
    _refuse(name)
    settings = KVTransferConfig(
        kv_connector=name, kv_connector_module_path=module_path or None, kv_role="kv_both"
    )
    try:
        found = KVConnectorFactory.get_connector_class(settings)
    except (ValueError, AttributeError, ImportError) as error:
        raise ConfigError(f"wrap.kv_connector={name!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, KVConnectorBase_V1)):
        raise ConfigError(f"wrap.kv_connector={name!r}: it is no KVConnectorBase_V1")
    return found


def create_inner(
    vllm_config: "VllmConfig",
    role: KVConnectorRole,
    kv_cache_config: "KVCacheConfig",
    wrap: WrapConfig,
) -> KVConnectorBase_V1:
    """Build it through vLLM's factory. Raises :class:`ConfigError` for one that cannot be
    wrapped and :class:`LayoutError` if it cannot take this model's KV cache groups."""
    for name in _names(wrap.kv_connector, wrap.kv_connector_extra_config):
        _refuse(name)
        _refuse_pinned_interleave(vllm_config, name)
    inner_class(wrap)
    config = inner_config(vllm_config, wrap)
    assert config.kv_transfer_config is not None
    if not KVConnectorFactory.supports_hma_config(config.kv_transfer_config):
        groups = len(kv_cache_config.kv_cache_groups)
        if groups > 1:
            raise LayoutError(
                f"{wrap.kv_connector} takes one KV cache group, and this model has {groups}: "
                "start vLLM with --disable-hybrid-kv-cache-manager"
            )
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.scheduler_config.disable_hybrid_kv_cache_manager = True
    built = KVConnectorFactory.create_connector(config, role, kv_cache_config)
    assert isinstance(built, KVConnectorBase_V1)
    return built


def _names(name: str, extra: Mapping[str, Any]) -> Iterator[str]:
    """A connector's, and those inside it."""
    yield name
    if name == "MultiConnector":
        for child in extra.get("connectors", ()):
            inside = child.get("kv_connector_extra_config", {})
            yield from _names(child.get("kv_connector", ""), inside)


def _refuse(name: str) -> None:
    if name in _NEVER:
        raise ConfigError(f"wrap: {name} cannot be wrapped: {_NEVER[name]}")


def _refuse_pinned_interleave(vllm_config: "VllmConfig", name: str) -> None:
    """vLLM lays out KV for NIXL under context parallelism when it sees the connector's name."""
    if name == "NixlConnector" and vllm_config.parallel_config.decode_context_parallel_size > 1:
        raise ConfigError("wrap: NixlConnector cannot be wrapped under decode context parallelism")
