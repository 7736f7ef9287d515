"""Settings of the shared store behind the host tier."""

from dataclasses import dataclass, field
from typing import Literal

from spm.config_parsing import number
from spm.redis_url import check_redis_url, redacted_url


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """When the remote store is left alone, and for how long."""

    failures: int = number(3, 1, 1000, "consecutive failures after which the store is left alone")
    backoff_s: float = number(0.5, 0.01, 600.0, "first pause before one request probes it again")
    backoff_cap_s: float = number(15.0, 0.01, 3600.0, "longest pause")


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

    @property
    def redacted_url(self) -> str:
        """Scheme, host and path, for logs and errors; nothing that could be a password."""
        return redacted_url(self.url)
