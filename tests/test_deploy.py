"""Files in ``deploy/`` say what they mean: settings, commands, and one set of versions."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from spm.config import SpmConfig
from spm.demo.lmcache_process import LMCACHE_ENV, lmcache_installed

_ROOT = Path(__file__).parent.parent
_DEPLOY = _ROOT / "deploy"
_COMPOSE = yaml.safe_load((_DEPLOY / "compose" / "vllm-lmcache-redis.yml").read_text())
_SERVICES: dict[str, dict[str, Any]] = _COMPOSE["services"]
_PROJECT = (_ROOT / "pyproject.toml").read_text()


def _sample(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((_DEPLOY / "samples" / name).read_text())
    return loaded


def _settings(name: str) -> SpmConfig:
    return SpmConfig.from_extra_config(_sample(name)["kv_connector_extra_config"])


def test_the_lmcache_samples_keep_redis_alive() -> None:
    for name in ("lmcache-server.json", "lmcache-in-process.json"):
        assert _settings(name).holds_keys, name
    wrapped = _settings("wrap-offloading.json").wrapped
    assert wrapped is not None
    assert wrapped.kv_connector == "OffloadingConnector"


def test_an_in_process_lmcache_and_its_keep_alive_mean_the_same_redis() -> None:
    wrap = _sample("lmcache-in-process.json")["kv_connector_extra_config"]["wrap"]
    theirs = wrap["kv_connector_extra_config"]["lmcache.remote_url"]
    assert wrap["remote_url"] == f"{theirs}/0"


# --- compose ---------------------------------------------------------------------------------


def test_compose_passes_the_sample_to_vllm() -> None:
    command = _SERVICES["vllm"]["command"]
    given = command[command.index("--kv-transfer-config") + 1]
    assert json.loads(given) == _sample("lmcache-server.json")
    assert _SERVICES["vllm"]["environment"]["VLLM_PLUGINS"] == "spm"


def test_lmcache_listens_where_the_sample_looks_for_it_and_nowhere_else() -> None:
    store = _settings("lmcache-server.json").store
    assert store is not None
    options = dict(one[2:].split("=", 1) for one in _SERVICES["lmcache"]["command"])
    assert f"tcp://{options['host']}:{options['port']}" == store.url
    assert f"http://{options['http-host']}:{options['http-port']}" == store.control_url
    adapter = json.loads(options["l2-adapter"])
    assert f"redis://{adapter['host']}:{adapter['port']}/0" == store.l2_url
    assert options["host"] == options["http-host"] == "127.0.0.1"
    redis = _SERVICES["redis"]["command"]
    assert redis[redis.index("--bind") + 1] == adapter["host"]
    assert redis[redis.index("--port") + 1] == str(adapter["port"])


def test_the_redis_of_compose_is_bounded_and_evicts_the_least_recently_used() -> None:
    (volume,) = _SERVICES["redis"]["volumes"]
    source = _DEPLOY / "compose" / volume.partition(":")[0]
    lines = source.read_text().splitlines()
    assert "maxmemory-policy allkeys-lru" in lines
    assert any(line.startswith("maxmemory ") for line in lines)


def test_images_are_pinned_to_the_versions_of_the_package() -> None:
    (lmcache,) = re.findall(r'^lmcache = \["lmcache==([\d.]+)"\]', _PROJECT, re.MULTILINE)
    (vllm,) = re.findall(r'^gpu = \["vllm>=([\d.]+),', _PROJECT, re.MULTILINE)
    assert _SERVICES["vllm"]["image"] == f"vllm-spm:vllm{vllm}.0-lmcache{lmcache}"
    assert _SERVICES["lmcache"]["image"] == _SERVICES["vllm"]["image"]
    recipe = _SERVICES["lmcache"]["build"]["dockerfile_inline"]
    assert f"FROM vllm/vllm-openai:v{vllm}.0\n" in recipe
    assert re.fullmatch(r"redis:\d+\.\d+\.\d+-\w+", _SERVICES["redis"]["image"])


def test_the_image_gets_what_the_package_is_made_of() -> None:
    recipe = _SERVICES["lmcache"]["build"]["dockerfile_inline"]
    copied = {word for line in re.findall(r"^COPY (.*) \S+$", recipe, re.MULTILINE)
              for word in line.split()}  # fmt: skip
    (packages,) = re.findall(r"^include = (\[.*\])$", _PROJECT, re.MULTILINE)
    assert copied >= {name.rstrip("*") for name in json.loads(packages)}
    assert copied >= set(re.findall(r'^(?:readme|license-files) = \[?"([^"]+)"', _PROJECT, re.M))
    context = (_DEPLOY / "compose" / _SERVICES["lmcache"]["build"]["context"]).resolve()
    assert all((context / name).exists() for name in copied)


def test_everything_has_a_health_check_and_starts_after_what_it_needs() -> None:
    assert all(service["healthcheck"]["test"] for service in _SERVICES.values())
    for service, needed in (("vllm", "lmcache"), ("lmcache", "redis")):
        condition = _SERVICES[service]["depends_on"][needed]
        assert condition == {"condition": "service_healthy"}


# --- commands --------------------------------------------------------------------------------


def _commands() -> list[list[str]]:
    text = (_DEPLOY / "samples" / "README.md").read_text()
    (block,) = re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for line in block.splitlines()]


def test_the_commands_to_copy_name_files_that_are_there() -> None:
    redis, lmcache, vllm = _commands()
    assert (_DEPLOY / "samples" / redis[1]).exists()
    assert vllm[-1] == "$(cat lmcache-server.json)"
    adapter = json.loads(lmcache[lmcache.index("--l2-adapter") + 1])
    store = _settings("lmcache-server.json").store
    assert store is not None
    assert store.l2_url == f"redis://{adapter['host']}:{adapter['port']}/0"


@pytest.mark.e2e
@pytest.mark.skipif(not lmcache_installed(), reason="LMCache is not installed")
def test_lmcache_has_the_options_that_are_used() -> None:
    executable = Path(sys.executable).with_name("lmcache")
    asked = subprocess.run(
        [executable, "server", "--help"],
        env=LMCACHE_ENV,
        capture_output=True,
        text=True,
        check=True,
    )
    offered = set(re.findall(r"--[a-z0-9-]+", asked.stdout))
    used = [*_commands()[1], *_SERVICES["lmcache"]["command"]]
    named = {word.partition("=")[0] for word in used if word.startswith("--")}
    assert named
    assert named <= offered
