"""Secrets outside of the settings: what is read, what is refused, and that none shows."""

import os
import pickle
from pathlib import Path

import pytest

from spm.errors import ConfigError
from spm.secret import MAX_SECRET_BYTES, SecretSource, secret_source

SECRET = b"hunter2"


def in_file(path: Path, content: bytes = SECRET, mode: int = 0o600) -> SecretSource:
    path.write_bytes(content)
    path.chmod(mode)
    return SecretSource("remote.password", file=str(path))


def refusal(source: SecretSource, *, at_least_bytes: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        source.read(at_least_bytes=at_least_bytes)
    assert caught.value.__cause__ is None
    shown = f"{caught.value} {source!r}"
    assert "hunter2" not in shown
    return shown


@pytest.mark.parametrize("content", [SECRET, SECRET + b"\n", b" " + SECRET + b"\r\n\n"])
def test_white_space_around_a_secret_is_no_part_of_it(tmp_path: Path, content: bytes) -> None:
    assert in_file(tmp_path / "s", content).read() == SECRET


def test_a_secret_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SecretSource("remote.password", variable="REDIS_PASSWORD")
    assert "no such variable" in refusal(source)
    monkeypatch.setenv("REDIS_PASSWORD", "hunter2\n")
    assert source.read() == SECRET
    monkeypatch.setenv("REDIS_PASSWORD", os.fsdecode(b"\xff\xfe"))
    assert source.read() == b"\xff\xfe"


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640])
def test_modes_that_keep_a_secret(tmp_path: Path, mode: int) -> None:
    assert in_file(tmp_path / "s", mode=mode).read() == SECRET


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602, 0o601, 0o620, 0o666])
def test_a_file_that_lets_others_at_the_secret_is_refused(tmp_path: Path, mode: int) -> None:
    shown = refusal(in_file(tmp_path / "s", mode=mode))
    assert f"remote.password_file: mode {mode:04o}" in shown


def test_a_link_is_followed_as_container_mounts_need_it(tmp_path: Path) -> None:
    in_file(tmp_path / "data")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    assert SecretSource("x", file=str(tmp_path / "link")).read() == SECRET


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hunter2", 0o600)
    for name in ("hunter2", "hunter2/none", "hunter2-none", ".", "\0hunter2", "hunter2" * 999):
        assert "remote.password_file: " in refusal(
            SecretSource("remote.password", file=str(tmp_path / name))
        )


@pytest.mark.parametrize("content", [b"", b" \n", b"x" * (MAX_SECRET_BYTES + 1), b"x" * 9999])
def test_secrets_too_short_or_too_long(tmp_path: Path, content: bytes) -> None:
    refusal(in_file(tmp_path / "s", content))


def test_a_secret_shorter_than_needed(tmp_path: Path) -> None:
    source = in_file(tmp_path / "s")
    assert "7 bytes of secret; 32 to 4096" in refusal(source, at_least_bytes=32)


def test_a_secret_is_read_anew_each_time(tmp_path: Path) -> None:
    source = in_file(tmp_path / "s")
    (tmp_path / "s").write_bytes(b"another")
    assert source.read() == b"another"
    assert b"another" not in pickle.dumps(source)


def test_nothing_said_is_no_source_and_two_places_are_refused() -> None:
    assert secret_source("x", "", "") is None
    for file, variable in (("/f", "V"), ("", "hunter2 x"), ("", "1hunter2"), ("", "hunter2=x")):
        with pytest.raises(ConfigError) as caught:
            secret_source("x", file, variable)
        assert "hunter2" not in str(caught.value)
