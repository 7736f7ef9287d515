"""``spm plan`` from end to end: the table, JSON, a picture, what is refused, and advice."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from spm.cli import main
from spm.config import SpmConfig
from tests.spm.plan.configs import QWEN3_32B

_PAGE = b'spm:sam_active 1.0\nspm:breaker_openings_total{side="worker"} 3.0\n'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_32B))
    return tmp_path


def test_the_published_example(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen3-32B in BF16 over PCIe 5.0 x16 with a gap of 0.18 s."""
    assert main(["plan", str(model), "--gap", "0.18", "--json", "-"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["kv_bytes_per_token"] == 262_144
    assert said["reload_us_per_token"] == pytest.approx(4.16, abs=0.005)
    assert said["break_even_tokens"] == pytest.approx(43_270, rel=0.001)
    assert said["recommend"]["host_tier_bytes"] == said["recommend"]["host_bytes"]


def test_what_is_to_be_pasted_is_accepted(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--gpu-memory", "141GB", "--weights", "65.6GB", "--concurrency", "52"]
    assert main(["plan", str(model), *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    config = json.loads(lines[lines.index("--kv-transfer-config for vLLM:") + 1])
    parsed = SpmConfig.from_extra_config(config["kv_connector_extra_config"])
    assert parsed.host_bytes > 52 * 15_000 * 262_144
    assert any(line.startswith("sessions that fit: GPU pool") for line in lines)
    assert f"maxmemory {lines[lines.index('redis.conf:') + 1].split()[1]}" in lines


def test_a_picture_and_a_file(model: Path, tmp_path: Path) -> None:
    picture, document = tmp_path / "plan.png", tmp_path / "plan.json"
    assert main(["plan", str(model), "--png", str(picture), "--json", str(document)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(document.read_text())["recommend"]["ttl_s"] >= 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere/config.json"], "cannot be read"),
        (["MODEL", "--gap", "-1"], "gap_s"),
        (["MODEL", "--gap", "5", "--gap-p99", "1"], "at least the mean"),
        (["MODEL", "--tp", "7"], "7 ranks"),
        (["MODEL", "--gpu-memory", "80GB"], "--weights"),
        (["MODEL", "--gpu-memory", "24GB", "--weights", "65GB"], "weights_bytes"),
    ],
)
def test_what_makes_no_sense_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    given = [str(model) if word == "MODEL" else word for word in arguments]
    assert main(["plan", *given]) != 0
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["MODEL", "--from", "http://x"],
        ["MODEL", "--link", "fast"],
        ["MODEL", "--host-bytes", "much"],
    ],
)
def test_usage_errors(model: Path, arguments: list[str]) -> None:
    given = [str(model) if word == "MODEL" else word for word in arguments]
    with pytest.raises(SystemExit) as caught:
        main(["plan", *given])
    assert caught.value.code == 2


class _Metrics(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = self.path == "/metrics"
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(_PAGE if found else b"")

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Metrics) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()
        thread.join()


def test_advice_for_a_running_server(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--from", server, "--json", "-"]) == 0
    (only,) = json.loads(capsys.readouterr().out)["advice"]
    assert "3 times" in only["why"]


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--from", "http://127.0.0.1:1"]) != 0
    assert "gave no metrics" in capsys.readouterr().err
