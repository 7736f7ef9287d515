"""Message authentication for what is stored where others may write: keyed BLAKE3.

Engines with the same secret accept each other's values and manifests; without it nobody can make
one that they accept. From the one secret come independent keys, one for each purpose, and an id
that is part of every name in the store, so that engines with another secret, or with none, never
meet. The id tells nothing about the secret, if that has the 32 random bytes it should have.
"""

import hmac
from collections.abc import Iterable
from enum import Enum

from blake3 import blake3

from spm.errors import BadValueError
from spm.remote_config import RemoteConfig

MAC_BYTES = 32
ALGORITHM = "blake3"
MIN_SECRET_BYTES = 32


class Purpose(str, Enum):
    """What a key is for; the values are part of the derivation and never change."""

    VALUES = "vllm-spm, version 1: MAC of stored values"
    MANIFESTS = "vllm-spm, version 1: MAC of manifests"
    KEY_ID = "vllm-spm, version 1: public id of the secret"


class Authenticator:
    """Makes and checks MACs for one purpose. Any thread; never shows its key."""

    __slots__ = ("_key",)

    def __init__(self, secret: bytes, purpose: Purpose) -> None:
        self._key = _derived(secret, purpose)

    def mac(self, parts: Iterable["bytes | memoryview"]) -> bytes:
        """Of the parts as if they were one; the caller sees to it that where one ends is
        clear. Other threads run meanwhile if the parts are large."""
        hasher = blake3(key=self._key)
        for part in parts:
            hasher.update(part)
        return hasher.digest(MAC_BYTES)

    def check(self, mac: "bytes | memoryview", parts: Iterable["bytes | memoryview"]) -> None:
        """Raise :class:`BadValueError` unless ``mac`` is that of ``parts``. In constant time."""
        if not hmac.compare_digest(bytes(mac), self.mac(parts)):
            raise BadValueError("not authentic: another key, a forgery or damage")


def authenticator(remote: RemoteConfig | None, purpose: Purpose) -> Authenticator | None:
    """For what is stored in ``remote``; None if no secret is configured. Reads the secret;
    raises ConfigError."""
    secret = _secret(remote)
    return Authenticator(secret, purpose) if secret is not None else None


def key_id(remote: RemoteConfig | None) -> str:
    """Stands for the secret in public; empty if there is none. Raises ConfigError."""
    secret = _secret(remote)
    return _derived(secret, Purpose.KEY_ID)[:16].hex() if secret is not None else ""


def _secret(remote: RemoteConfig | None) -> bytes | None:
    source = remote.auth_key if remote is not None else None
    return source.read(at_least_bytes=MIN_SECRET_BYTES) if source is not None else None


def _derived(secret: bytes, purpose: Purpose) -> bytes:
    return blake3(secret, derive_key_context=purpose.value).digest()
