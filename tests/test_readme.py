"""The README's settings are the real ones, and the configuration files shown there work."""

import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from spm.config import BreakerConfig, KeepAliveConfig, RemoteConfig, SamConfig, SpmConfig

_ROOT = Path(__file__).parent.parent
_README = (_ROOT / "README.md").read_text()
_NESTED: dict[object, Any] = {
    RemoteConfig | None: RemoteConfig,
    BreakerConfig: BreakerConfig,
    KeepAliveConfig: KeepAliveConfig,
    SamConfig: SamConfig,
}


def settings_rows(cls: Any = SpmConfig, prefix: str = "") -> Iterator[str]:  # noqa: ANN401
    """One table row a setting."""
    for field in fields(cls):
        name = prefix + field.name
        nested = _NESTED.get(field.type)
        if nested is not None:
            yield from settings_rows(nested, name + ".")
            continue
        low, high = field.metadata.get("range", ("", ""))
        allowed = f"{low:,} to {high:,}" if field.metadata.get("range") else ""
        if not allowed and get_args(field.type):
            allowed = ", ".join(f"`{choice}`" for choice in get_args(field.type))
        shown = json.dumps(field.default) if field.default in (True, False, "") else field.default
        default = "required" if field.default is MISSING else f"`{shown}`"
        yield f"| `{name}` | {default} | {allowed} | {field.metadata.get('doc', '')} |"


@pytest.mark.parametrize("row", list(settings_rows()))
def test_every_setting_is_in_the_table(row: str) -> None:
    assert row in _README


def test_the_table_has_no_other_settings() -> None:
    shown = re.findall(r"^\| `[a-z_.]+` \|[^|]*\|[^|]*\|[^|]*\|$", _README, re.MULTILINE)
    assert sorted(shown) == sorted(settings_rows())


def test_the_command_to_copy_is_a_valid_configuration() -> None:
    match = re.search(r"--kv-transfer-config '(\{.*?\n\})'", _README, re.DOTALL)
    assert match
    _accept(json.loads(match[1]))


@pytest.mark.parametrize("path", sorted((_ROOT / "deploy").rglob("*.json")), ids=lambda p: p.name)
def test_the_samples_are_valid_configurations(path: Path) -> None:
    _accept(json.loads(path.read_text()))


def _accept(transfer_config: dict[str, Any]) -> None:
    extra = transfer_config.pop("kv_connector_extra_config")
    assert is_dataclass(SpmConfig.from_extra_config(extra))
    assert transfer_config == {
        "kv_connector": "SessionAwareConnector",
        "kv_connector_module_path": "connectors.session_aware",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
