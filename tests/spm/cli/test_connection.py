"""Which server, with which key, and that keys are told to nobody else."""

import pytest

from tests.spm.cli.command import Spm
from tests.spm.client.documents import error, page

KEY = "hush-hush"
COMMANDS = [
    ["status"],
    ["sessions"],
    ["session", "s"],
    ["prefetch", "s"],
    ["offload", "s"],
    ["evict", "s"],
    ["top", "--once"],
]


@pytest.fixture(autouse=True)
def _sessions(spm: Spm) -> None:
    spm.server.answers("GET", "/v1/sessions", page())


@pytest.mark.parametrize(
    ("variables", "argv", "sent"),
    [
        ({}, [], None),
        ({"VLLM_API_KEY": "v"}, [], "Bearer v"),
        ({"VLLM_API_KEY": "v", "SPM_API_KEY": "s"}, [], "Bearer s"),
        ({"VLLM_API_KEY": "v", "SPM_API_KEY": ""}, [], "Bearer v"),
        ({"SPM_API_KEY": "s"}, ["--api-key", "a"], "Bearer a"),
    ],
)
def test_where_the_key_comes_from(
    variables: dict[str, str],
    argv: list[str],
    sent: str | None,
    spm: Spm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert spm("sessions", *argv).code == 0
    assert spm.server.requests[0].headers.get("authorization") == sent


def test_tenant_headers(spm: Spm) -> None:
    spm("sessions", "--tenant-header", "X-Tenant=acme", "--tenant-header", "X-Team=a=b")
    seen = spm.server.requests[0].headers
    assert (seen["x-tenant"], seen["x-team"]) == ("acme", "a=b")


def test_the_option_goes_before_the_variable(spm: Spm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPM_URL", "http://127.0.0.1:1")
    assert spm("sessions", "--url", f"{spm.url}/v1").code == 0


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("extra", [[], ["--json"], ["--help"], ["--unknown"]])
def test_keys_are_never_printed(
    command: list[str], extra: list[str], spm: Spm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPM_API_KEY", KEY)
    address = spm.url.replace("://", f"://user:{KEY}@")
    for argv in ([], ["--url", address.replace(spm.url[-5:], "1")], ["--api-key", f"{KEY}\n"]):
        outcome = spm(*command, *extra, *argv)
        assert KEY not in outcome.out + outcome.err


def test_a_wrong_key(spm: Spm) -> None:
    spm.server.answers("GET", "/v1/sessions", {"error": "Unauthorized"}, code=401)
    outcome = spm("sessions", "--api-key", KEY)
    assert (outcome.code, outcome.err) == (1, "error: Unauthorized\n")


def test_a_server_cannot_move_the_cursor(spm: Spm) -> None:
    refusal = error(503, "\x1b[2J", "failed")
    spm.server.answers("GET", "/v1/sessions", refusal, code=503)
    assert "\x1b" not in spm("sessions").err
