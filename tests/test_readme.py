"""What the README names exists, and what it shows works: settings, configuration files, routes,
statuses, commands, client, metrics, files."""

import ast
import importlib
import inspect
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from fastapi.routing import APIRoute

from spm import cli, client
from spm.agent_hint import parse_agent_hint
from spm.cli import outcomes
from spm.client.fields import Fields
from spm.client.session_results import parse_session
from spm.config import KeepAliveConfig, SamConfig, SpmConfig
from spm.demo.report import turn_header
from spm.fault_plan import FaultsConfig
from spm.http.edit_request import parse_edit_request
from spm.http.routes import router
from spm.lifecycle import LifecycleKind
from spm.metrics import Metric
from spm.operation import Status
from spm.remote_config import BreakerConfig, RemoteConfig
from spm.wrap_config import LMCacheConfig, WrapConfig

_ROOT = Path(__file__).parent.parent
_README = (_ROOT / "README.md").read_text()
_SAMPLES = _ROOT / "deploy" / "samples"
_NESTED: dict[object, Any] = {
    RemoteConfig | None: RemoteConfig,
    BreakerConfig: BreakerConfig,
    FaultsConfig | None: FaultsConfig,
    KeepAliveConfig: KeepAliveConfig,
    SamConfig: SamConfig,
    LMCacheConfig | None: LMCacheConfig,
    WrapConfig | None: WrapConfig,
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
        if get_origin(field.type) is Literal:
            allowed = ", ".join(f"`{choice}`" for choice in get_args(field.type))
        yield f"| `{name}` | {_default(field)} | {allowed} | {field.metadata.get('doc', '')} |"


def _default(field: Any) -> str:  # noqa: ANN401
    if field.default_factory is not MISSING:
        return f"`{field.default_factory()}`"
    if field.default is MISSING:
        return "required"
    shown = json.dumps(field.default) if field.default in (True, False, "") else field.default
    return f"`{shown}`"


@pytest.mark.parametrize("row", list(settings_rows()))
def test_every_setting_is_in_the_table(row: str) -> None:
    assert row in _README


def test_the_table_has_no_other_settings() -> None:
    shown = re.findall(r"^\| `[a-z0-9_.]+` \|[^|]*\|[^|]*\|[^|]*\|$", _README, re.MULTILINE)
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


def test_the_demos_table_has_the_demos_columns() -> None:
    assert f"```\n{turn_header()}\n" in _README


def test_all_samples_are_explained() -> None:
    named = re.findall(r"^- `([^`]+)`", (_SAMPLES / "README.md").read_text(), re.MULTILINE)
    assert {*named, "README.md"} == {path.name for path in _SAMPLES.iterdir()}


def _section(title: str) -> str:
    """From a heading to the next one of any level."""
    found = re.search(
        rf"^#+ {re.escape(title)}$(.*?)(?=^#+ |\Z)", _README, re.DOTALL | re.MULTILINE
    )
    assert found, title
    return found[1]


def _blocks(language: str, text: str = _README) -> list[str]:
    """Code blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


# --- routes and what goes over them --------------------------------------------------------


def test_the_routes_are_all_routes() -> None:
    shown = re.findall(r"^\| `([A-Z]+) (/[^?`]*)[^`]*` \|", _README, re.MULTILINE)
    served = {
        (method, re.sub(r"\{[^}]+\}", "{id}", route.path))
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    assert set(shown) == served


@pytest.mark.parametrize("block", _blocks("json"))
def test_what_is_shown_as_json_is_what_is_meant(block: str) -> None:
    shown = json.loads(block)
    if "agent_hint" in shown:
        assert parse_agent_hint(shown["agent_hint"]).cache_control
    elif "edits" in shown:
        assert parse_edit_request("agent", block.encode(), SamConfig()).hint
    elif "residency" in shown:
        _accept_session(shown)
    else:
        tokens = shown["kv_transfer_params"]["spm"]
        parts = [f"{part}_tokens" for part in ("gpu", "host", "remote", "computed")]
        assert tokens["prompt_tokens"] == sum(tokens[part] for part in parts)


def _accept_session(shown: dict[str, Any]) -> None:
    session = parse_session(Fields(shown, "session"))
    residency = session.residency
    assert residency
    assert session.blocks == residency.ranges[-1].block_end
    for tier in ("gpu", "host", "remote"):
        there = [one for one in residency.ranges if tier in one.tiers]
        assert shown["residency"][tier] == sum(r.block_end - r.block_start for r in there)
        assert shown["residency"][f"{tier}_bytes"] == sum(r.size_bytes or 0 for r in there)


def test_every_status_is_explained() -> None:
    rows = re.findall(r"^\| (`[^|]+`) \|", _section("Offload, prefetch, evict"), re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(
        status.value for status in Status
    )


def test_every_kind_of_event_is_named() -> None:
    kinds = re.search(r"Kinds are ([^;]+);", _section("Several engines, one Redis"))
    assert kinds
    assert re.findall(r"`(\w+)`", kinds[1]) == [kind.value for kind in LifecycleKind]


# --- the client ----------------------------------------------------------------------------


def _imports() -> Iterator[tuple[str, str]]:
    for block in _blocks("python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                yield from ((str(node.module), alias.name) for alias in node.names)


@pytest.mark.parametrize(("module", "name"), list(_imports()))
def test_what_is_imported_exists(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_the_client_has_what_is_promised_of_it() -> None:
    text = _section("Python client")
    calls = re.findall(r"`(\w+)\(([^)`]*)\)`", text.partition("Methods:")[2])
    assert len(calls) > 10
    for kind in (client.AsyncSpmClient, client.SpmClient):
        for name, parameters in calls:
            takes = inspect.signature(getattr(kind, name)).parameters
            assert set(filter(None, parameters.split(", "))) <= takes.keys(), name
    errors = set(re.findall(r"`(\w+Error)`", text))
    promised = {name for name in client.__all__ if name.endswith("Error")}
    assert errors == promised - {"ClientClosedError"}


# --- the command line ----------------------------------------------------------------------


def _commands() -> list[list[str]]:
    (block,) = _blocks("", _section("Command line"))
    return [shlex.split(line, comments=True) for line in block.splitlines()]


@pytest.mark.parametrize("argv", _commands(), ids=" ".join)
def test_commands_are_understood(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPM_URL", "http://127.0.0.1:1")  # nobody is there
    assert cli.main(argv[1:]) == outcomes.EXIT_ERROR


def test_all_commands_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    offered = set(re.findall(r"^ {4}([a-z]+) ", capsys.readouterr().out, re.MULTILINE))
    assert offered - {argv[1] for argv in _commands()} == {"demo", "version"}


@pytest.mark.parametrize("option", sorted(set(re.findall(r"--[a-z-]+", _section("Command line")))))
def test_options_exist(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    offered = ""
    for argv in _commands():
        with pytest.raises(SystemExit):
            cli.main([argv[1], "--help"])
        offered += capsys.readouterr().out
    assert re.search(rf"{option}\b", offered)


def test_the_exit_codes_are_the_real_ones() -> None:
    found = re.search(r"^Exit codes: (.*?)\n\n", _section("Command line"), re.DOTALL | re.MULTILINE)
    assert found
    shown = {int(code) for code in re.findall(r"(?:^|; )(\d+)", " ".join(found[1].split()))}
    real = {value for name, value in vars(outcomes).items() if name.startswith("EXIT_")}
    assert shown == real - {outcomes.EXIT_USAGE_HELP}


# --- metrics and files ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "labels"), sorted(set(re.findall(r"`(spm:\w+)\{?([^`}]*)\}?`", _README)))
)
def test_metrics_exist(name: str, labels: str) -> None:
    specs = {m.spec.name + ("" if m.spec.gauge else "_total"): m.spec for m in Metric}
    spec, (label, _, value) = specs[name], labels.partition("=")
    assert label in (spec.label, "")
    assert not value or value.strip('"') in spec.values


@pytest.mark.parametrize(
    "path",
    sorted(
        {
            *re.findall(r"\]\((?!https?:|#)([^)]+)\)", _README),
            *re.findall(r"python ([\w/]+\.py)", _README),
            *re.findall(r"\$\(cat ([^)]+)\)", _README),
        }
    ),
)
def test_files_exist(path: str) -> None:
    assert (_ROOT / path).exists()


def test_links_lead_to_headings() -> None:
    headings = re.findall(r"^#+ (.+)$", _README, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", _README)) <= anchors
