"""Keyed BLAKE3: who has no secret can make nothing that is accepted."""

import logging
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from spm.errors import BadValueError, ConfigError
from spm.remote_config import RemoteConfig
from spm.value_auth import MAC_BYTES, Authenticator, Purpose, authenticator, key_id

SECRET = b"hunter2-" * 4
DATA: list[bytes | memoryview] = [b"ab", memoryview(b"cd" * 5000)]


def remote(tmp_path: Path, secret: bytes = SECRET) -> RemoteConfig:
    path = tmp_path / "key"
    path.write_bytes(secret)
    path.chmod(0o600)
    return RemoteConfig("redis://h", auth_key_file=str(path))


def test_a_mac_is_keyed_blake3_of_all_parts() -> None:
    key = blake3(SECRET, derive_key_context=Purpose.VALUES.value).digest()
    mac = Authenticator(SECRET, Purpose.VALUES).mac(DATA)
    assert mac == blake3(b"".join(DATA), key=key).digest()
    assert len(mac) == MAC_BYTES


def test_what_was_authenticated_is_accepted_and_nothing_else() -> None:
    auth = Authenticator(SECRET, Purpose.VALUES)
    mac = auth.mac(DATA)
    auth.check(mac, DATA)
    auth.check(memoryview(mac), [b"".join(DATA)])
    others = [
        Authenticator(SECRET + b"x", Purpose.VALUES),
        Authenticator(SECRET, Purpose.MANIFESTS),
        Authenticator(SECRET, Purpose.KEY_ID),
    ]
    wrong = [mac[:-1], mac + b"\0", b"", bytes(MAC_BYTES), *(other.mac(DATA) for other in others)]
    for one in wrong:
        with pytest.raises(BadValueError):
            auth.check(one, DATA)
    with pytest.raises(BadValueError):
        auth.check(mac, DATA[:1])


@given(st.binary(min_size=1, max_size=200), st.data())
def test_every_flipped_bit_is_seen(data: bytes, draw: st.DataObject) -> None:
    auth = Authenticator(SECRET, Purpose.VALUES)
    mac = auth.mac([data])
    bit = draw.draw(st.integers(0, len(data) * 8 - 1))
    other = bytearray(data)
    other[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadValueError):
        auth.check(mac, [bytes(other)])


def test_without_a_secret_nothing_is_authenticated() -> None:
    for config in (None, RemoteConfig("redis://h")):
        assert authenticator(config, Purpose.VALUES) is None
        assert key_id(config) == ""


def test_the_id_of_a_secret_is_that_of_its_bytes_alone(tmp_path: Path) -> None:
    config = remote(tmp_path)
    name = key_id(config)
    assert len(name) == 32
    assert key_id(remote(tmp_path, SECRET + b"\n")) == name
    assert key_id(remote(tmp_path, SECRET + b"x")) != name
    first = authenticator(config, Purpose.VALUES)
    assert first is not None
    assert first.mac([bytes.fromhex(name)]) != bytes.fromhex(name)


@pytest.mark.parametrize("secret", [b"", b"x" * 31, b"x" * 5000])
def test_a_secret_that_is_too_short_stops_the_start(tmp_path: Path, secret: bytes) -> None:
    config = remote(tmp_path, secret)
    for read in (lambda: authenticator(config, Purpose.VALUES), lambda: key_id(config)):
        with pytest.raises(ConfigError, match=r"remote\.auth_key_file: \d+ bytes"):
            read()


def test_no_secret_shows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    config = remote(tmp_path)
    auth = authenticator(config, Purpose.VALUES)
    assert "hunter2" not in f"{config!r} {auth!r} {config.auth_key!r} {caplog.text}"
    assert str(tmp_path) not in repr(config)
