"""The wrapped connector is found and built as vLLM would have done it, or refused with words."""

from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from connectors.session_aware import SessionAwareConnector
from connectors.wrapping.connector import WrappingConnector
from connectors.wrapping.inner import (
    class_named,
    create_inner,
    inner_class,
    inner_config,
    wrap_in,
    wrap_of,
)
from spm.errors import ConfigError, LayoutError
from spm.wrap_config import WrapConfig
from tests.connectors.scheduler.vllm_parts import FULL, HYBRID, write_model
from tests.connectors.wrapping import spying
from tests.connectors.wrapping.driving import (
    OURS,
    RECORDING,
    Settings,
    config_of,
    multi,
    recording,
    settings,
    wrapped,
)
from tests.connectors.wrapping.recording import STORES, RecordedStore
from tests.connectors.wrapping.recording_connector import (
    RecordingConnector,
    RecordingHMAConnector,
)

SPY = settings("Spy", spying.__name__, own="setting")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    STORES["store"] = RecordedStore()
    return write_model(tmp_path)


@pytest.mark.parametrize("role", KVConnectorRole)
def test_the_name_vllm_knows_builds_the_class_that_is_needed(
    directory: Path, role: KVConnectorRole
) -> None:
    config, kv_cache = config_of(directory, wrapped(recording("store")), FULL)
    built = KVConnectorFactory.create_connector(config, role, kv_cache)
    assert isinstance(built, WrappingConnector)
    assert type(built.inner) is RecordingHMAConnector
    assert built.inner.role is role
    own, kv_cache = config_of(directory, settings(*OURS, host_bytes=1 << 20), FULL)
    assert type(SessionAwareConnector(own, role, kv_cache)) is SessionAwareConnector


def test_it_sees_vllms_configuration_with_its_own_settings(directory: Path) -> None:
    config, kv_cache = config_of(directory, wrapped(SPY), FULL)
    transfer = config.kv_transfer_config
    assert transfer is not None
    transfer.kv_port, transfer.kv_buffer_device = 4711, "somewhere"
    wrap = wrap_of(config)
    assert wrap is not None
    inner = create_inner(config, KVConnectorRole.WORKER, kv_cache, wrap)
    seen = inner._vllm_config
    assert seen.kv_transfer_config is inner._kv_transfer_config
    assert inner._kv_transfer_config.kv_connector == "Spy"
    assert inner._kv_transfer_config.kv_connector_module_path == spying.__name__
    assert inner._kv_transfer_config.kv_connector_extra_config == {"own": "setting"}
    for name in ("engine_id", "kv_role", "kv_port", "kv_buffer_device", "kv_load_failure_policy"):
        assert getattr(inner._kv_transfer_config, name) == getattr(transfer, name), name
    assert seen.scheduler_config is config.scheduler_config
    assert seen.cache_config is config.cache_config
    assert transfer.kv_connector == "SessionAwareConnector", "vLLM's own is not touched"
    assert "wrap" in transfer.kv_connector_extra_config


def test_one_without_hma_sees_the_hybrid_manager_off(directory: Path) -> None:
    config, kv_cache = config_of(directory, wrapped(recording("store", hma=False)), FULL)
    built: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, kv_cache)
    assert type(built.inner) is RecordingConnector
    assert built.inner._vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    assert not config.scheduler_config.disable_hybrid_kv_cache_manager


@pytest.mark.parametrize(
    "inner",
    [recording("store", hma=False), multi(recording("store"), recording("store", hma=False))],
    ids=["alone", "as a child"],
)
def test_one_without_hma_does_not_get_several_groups(directory: Path, inner: Settings) -> None:
    config, kv_cache = config_of(directory, wrapped(inner), HYBRID)
    with pytest.raises(LayoutError, match="--disable-hybrid-kv-cache-manager"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, kv_cache)


def test_vllms_own_are_found_by_name() -> None:
    assert inner_class(WrapConfig("ExampleConnector")) is ExampleConnector
    assert class_named("MultiConnector", "") is MultiConnector
    assert class_named("RecordingConnector", RECORDING) is RecordingConnector


@pytest.mark.parametrize(
    ("name", "module_path", "says"),
    [
        ("Unheard", "", "Unsupported connector type: Unheard"),
        ("Unheard", RECORDING, "Class Unheard not found"),
        ("Unheard", "no.such.module", "No module named 'no'"),
        ("Slot", RECORDING, "kv_connector='Slot'"),
        ("RecordedStats", RECORDING, "deprecated 2-argument constructor"),
        ("HiSparseConnector", "", "vLLM finds it by its name"),
        ("SessionAwareConnector", "connectors.session_aware", "one engine has one of it"),
    ],
)
def test_what_cannot_be_wrapped_is_refused_with_words(
    name: str, module_path: str, says: str
) -> None:
    with pytest.raises(ConfigError, match="wrap") as refused:
        class_named(name, module_path)
    assert says in str(refused.value)


@pytest.mark.parametrize("depth", [1, 2])
def test_nor_is_it_inside_what_is_wrapped(directory: Path, depth: int) -> None:
    inner = settings(*OURS, host_bytes=1)
    for _ in range(depth):
        inner = multi(recording("store"), inner)
    config, kv_cache = config_of(directory, recording("store"), FULL)
    wrap = WrapConfig("MultiConnector", "", inner["kv_connector_extra_config"])
    with pytest.raises(ConfigError, match="one engine has one of it"):
        create_inner(config, KVConnectorRole.SCHEDULER, kv_cache, wrap)


def test_nixl_under_context_parallelism_is_refused(directory: Path) -> None:
    config, kv_cache = config_of(directory, recording("store"), FULL)
    config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(ConfigError, match="NixlConnector cannot be wrapped"):
        create_inner(config, KVConnectorRole.WORKER, kv_cache, WrapConfig("NixlConnector"))


def test_settings_that_wrap_nothing_are_left_alone(directory: Path) -> None:
    config, _ = config_of(directory, settings(*OURS, host_bytes=1), FULL)
    assert wrap_of(config) is None
    config.kv_transfer_config = None
    assert wrap_of(config) is None


def test_an_lmcache_server_is_wrapped_with_nothing_but_defaults() -> None:
    wrap = wrap_in({"store": {}})
    assert wrap is not None
    assert wrap.kv_connector == "LMCacheMPConnector"
    assert wrap_in({"store": None, "wrap": None}) is None
    with pytest.raises(ConfigError, match=r"wrap\.kv_connector is missing"):
        wrap_in({"wrap": {}})


def test_what_a_shallow_copy_shares_it_does_not_change(directory: Path) -> None:
    config, _ = config_of(directory, wrapped(SPY), FULL)
    wrap = wrap_of(config)
    assert wrap is not None
    inner_config(config, wrap).kv_transfer_config.kv_connector_extra_config["new"] = 1  # type: ignore[union-attr]
    assert dict(wrap.kv_connector_extra_config) == {"own": "setting"}
