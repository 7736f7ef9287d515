"""Settings of the shared store behind the host tier."""

from dataclasses import dataclass, field
from typing import Any, Literal

from spm.config_parsing import number
from spm.errors import ConfigError
from spm.fault_plan import FaultsConfig
from spm.redis_url import check_redis_url, holds_password, redacted_url
from spm.secret import SecretSource, secret_source


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """When the remote store is left alone, and for how long."""

    failures: int = number(3, 1, 1000, "consecutive failures after which the store is left alone")
    backoff_s: float = number(
        0.5, 0.01, 600.0, "first pause before it is probed; requests never are the probe"
    )
    backoff_cap_s: float = number(
        15.0,
        0.01,
        3600.0,
        "longest pause; also between two tries of a store that is slower than computing",
    )


def _secret(doc: str) -> Any:  # noqa: ANN401
    """Where a secret is. Not shown: it may be the secret itself, in the wrong place."""
    return field(default="", repr=False, metadata={"doc": doc})


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """The shared store behind the host tier."""

    url: str = field(
        repr=False,
        metadata={
            "doc": "where it is",
            "needed": "e.g. redis://127.0.0.1:6379/0",
            "check": check_redis_url,
        },
    )
    kind: Literal["redis"] = field(default="redis", metadata={"doc": "what it is"})
    ttl_s: int = number(86_400, 0, 30 * 86_400, "lifetime of a stored value; 0: no expiry")
    connect_timeout_s: float = number(1.0, 0.01, 60.0, "longest wait for a connection")
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    faults: FaultsConfig | None = field(
        default=None, metadata={"doc": "faults put into it on purpose, for trials"}
    )
    password_file: str = _secret("file that holds its password; read at every connect")
    password_env: str = _secret("or the environment variable that holds it")
    auth_key_file: str = _secret(
        "file of 32 random bytes or more, the same for all engines: what is stored is authenticated"
    )
    auth_key_env: str = _secret("or the environment variable that holds them")

    def __post_init__(self) -> None:
        """Raises ConfigError. The secrets themselves are not read here."""
        if self.password is not None and holds_password(self.url):
            raise ConfigError("remote.url has a password: not beside remote.password_file or _env")
        _ = self.auth_key

    @property
    def password(self) -> SecretSource | None:
        """Where the password is, if not in the URL."""
        return secret_source("remote.password", self.password_file, self.password_env)

    @property
    def auth_key(self) -> SecretSource | None:
        """Where the secret is with which what is stored is authenticated; None: it is not."""
        return secret_source("remote.auth_key", self.auth_key_file, self.auth_key_env)

    @property
    def redacted_url(self) -> str:
        """Scheme, host and path, for logs and errors; nothing that could be a password."""
        return redacted_url(self.url)
