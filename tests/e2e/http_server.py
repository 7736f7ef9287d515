"""vLLM's OpenAI server in processes of its own, with our endpoint plugin."""

import contextlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from spm.demo.model import ensure_model
from spm.demo.process import ManagedProcess, free_port
from spm.demo.server import SERVED_NAME, ServerSpec, build_command
from tests.e2e.engine_environment import cpu_threads

MODEL = SERVED_NAME
_START_TIMEOUT_S = 240.0
_POLL_S = 0.2


@dataclass(frozen=True)
class HttpServer:
    """A running server; ``keys`` are its API keys."""

    url: str
    keys: tuple[str, ...]
    log_path: Path
    process: ManagedProcess

    def client(self, key: int = 0, **headers: str) -> httpx.Client:
        """A plain client that authenticates with one of the keys."""
        return httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {self.keys[key]}", **headers},
            timeout=120,
        )

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's series that have these labels, over all engines."""
        total, found = 0.0, False
        for line in httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            named = re.match(rf"{re.escape(name)}[{{ ]", line)
            if named and all(f'{key}="{value}"' in line for key, value in labels.items()):
                total, found = total + float(line.rpartition(" ")[2]), True
        assert found, f"no metric {name} {labels}"
        return total


@dataclass(frozen=True)
class HttpServerSpec:
    """What to start."""

    extra: dict[str, Any] = field(default_factory=dict)
    """Our connector's settings."""
    arguments: tuple[str, ...] = ()
    keys: tuple[str, ...] = ("key-one", "key-two")
    pool_blocks: int = 160
    max_model_len: int = 1024
    plugins: str | None = "spm"
    engines: int = 1
    """How many share the machine's cores."""
    is_stopped: bool = False
    """By the test itself."""


@contextlib.contextmanager
def running(spec: HttpServerSpec, log_path: Path) -> Iterator[HttpServer]:
    """Start the server, wait until it is healthy, stop it at the end."""
    port = free_port()
    base = ServerSpec(ensure_model(), spec.pool_blocks, log_path, max_model_len=spec.max_model_len)
    transfer = {
        "kv_connector": "SessionAwareConnector",
        "kv_connector_module_path": "connectors.session_aware",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": spec.extra,
    }
    command = build_command(base, port)
    command += ["--kv-transfer-config", json.dumps(transfer), "--api-key", *spec.keys]
    command += spec.arguments
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "GOMP_SPINCOUNT": "30000",
        "VLLM_CPU_OMP_THREADS_BIND": cpu_threads(spec.engines),
    }
    if spec.plugins is not None:
        env["VLLM_PLUGINS"] = spec.plugins
    with ManagedProcess(command, log_path, env) as process:
        server = HttpServer(f"http://127.0.0.1:{port}", spec.keys, log_path, process)
        give_up_s = time.monotonic() + _START_TIMEOUT_S
        while not _healthy(server.url):
            assert process.exit_code is None, process.log_tail()
            assert time.monotonic() < give_up_s, process.log_tail()
            time.sleep(_POLL_S)
        yield server
        assert spec.is_stopped or process.exit_code is None, "the server died"


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
