"""Frozen, validated settings from ``kv_connector_extra_config``.

Every refusal quotes the key, the value (unless it may be a secret) and what is allowed.
Unknown keys are errors: a setting that is silently ignored is a setting somebody relies on.
"""

import difflib
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from spm.errors import ConfigError

KiB, MiB, GiB, TiB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
MAX_TTL_S = 3600
"""Longest retention a hint may ask for (vLLM RFC #52113)."""

_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_STREAM = re.compile(r"[A-Za-z0-9_.:-]{0,64}")
_HEADER = re.compile(r"[A-Za-z0-9-]{0,64}")
_SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster")
_PLACE = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]*)(:\d+)?(/[^#]*)?")


def _number(default: float, low: float, high: float, doc: str) -> Any:  # noqa: ANN401
    """A dataclass field with an inclusive range; ``int`` or ``float`` by its annotation."""
    return field(default=default, metadata={"range": (low, high), "doc": doc})


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """When the remote store is left alone, and for how long."""

    failures: int = _number(3, 1, 1000, "consecutive failures after which the store is left alone")
    backoff_s: float = _number(0.5, 0.01, 600.0, "first pause before one request probes it again")
    backoff_cap_s: float = _number(15.0, 0.01, 3600.0, "longest pause")


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """The shared store behind the host tier."""

    url: str = field(repr=False, metadata={"doc": "where it is"})
    kind: Literal["redis"] = field(default="redis", metadata={"doc": "what it is"})
    ttl_s: int = _number(86_400, 0, 30 * 86_400, "lifetime of a stored value; 0: no expiry")
    connect_timeout_s: float = _number(1.0, 0.01, 60.0, "longest wait for a connection")
    breaker: BreakerConfig = field(default_factory=BreakerConfig)

    @property
    def redacted_url(self) -> str:
        """Scheme, host and path, for logs and errors; nothing that could be a password."""
        return redacted_url(self.url)


def redacted_url(url: str) -> str:
    """Scheme, host and path of any text that should be a URL."""
    scheme, _, rest = url.partition("://")
    user, _, place = rest.rpartition("@")
    place = place.partition("?")[0]
    if scheme not in _SCHEMES or "?" in user or not _PLACE.fullmatch(place):
        return "(unreadable URL)"
    return f"{scheme}://{place}"


@dataclass(frozen=True, slots=True)
class SamConfig:
    """What hints may do to vLLM's own block pool, and who may manage sessions."""

    enabled: bool = field(
        default=True,
        metadata={"doc": "act on hints; false: hints are ignored and there are no session routes"},
    )
    ranges: bool = field(
        default=True, metadata={"doc": "accept hints about a part of a session's blocks"}
    )
    remote_operations: bool = field(
        default=True,
        metadata={"doc": "accept `offload` and `prefetch`, let `evict` delete stored values"},
    )
    max_protected_share: float = _number(
        0.5, 0.0, 1.0, "share of the pool that hints may protect, all tenants together"
    )
    max_tenant_protected_share: float = _number(
        0.5, 0.0, 1.0, "share of the pool that one tenant's hints may protect"
    )
    soon_s: float = _number(
        10.0, 0.0, MAX_TTL_S, "a resume expected within this time is protected longest"
    )
    tenant_header: str = field(
        default="",
        metadata={"doc": "header in which a trusted gateway names the tenant; empty: none"},
    )
    tenant_from_api_key: bool = field(
        default=False, metadata={"doc": "each API key is a tenant of its own"}
    )


@dataclass(frozen=True, slots=True)
class KeepAliveConfig:
    """How stored values of sessions are kept from being evicted or expiring."""

    interval_s: float = _number(
        30.0,
        1.0,
        3600.0,
        "a value kept alive is touched about once in this time, or in a third of `remote.ttl_s`",
    )
    max_keys_per_s: int = _number(
        50_000, 1, 10_000_000, "stored values touched or deleted in a second"
    )
    delete_grace_s: int = _number(
        60,
        0,
        3600,
        "time another engine has to touch a value deleted here, at least two intervals; "
        "0: deleted at once",
    )


@dataclass(frozen=True, slots=True)
class SpmConfig:
    """All settings of one engine. Byte and thread counts are per worker."""

    host_bytes: int = _number(4 * GiB, 0, 64 * TiB, "host tier; 0: none")
    staging_bytes: int = _number(
        512 * MiB, 1 * MiB, 1 * TiB, "buffers for values being saved or loaded"
    )
    remote: RemoteConfig | None = field(
        default=None, metadata={"doc": "shared store; absent: host tier only"}
    )
    namespace: str = field(default="spm", metadata={"doc": "first part of every key"})
    save: Literal["all", "sessions"] = field(
        default="all", metadata={"doc": "save blocks of every request, or only of sessions"}
    )
    load_deadline_s: float = _number(10.0, 0.01, 600.0, "longest load of one request")
    batch_deadline_s: float = _number(2.0, 0.01, 600.0, "longest wait for one round trip")
    lookup_deadline_s: float = _number(0.25, 0.001, 60.0, "longest wait for an existence answer")
    save_deadline_s: float = _number(30.0, 0.01, 600.0, "longest background write of one batch")
    save_inflight_bytes: int = _number(
        256 * MiB, 64 * KiB, 1 * TiB, "bytes copied from the GPU pool and not yet stored"
    )
    batch_bytes: int = _number(16 * MiB, 4 * KiB, 1 * GiB, "bytes moved in one round trip")
    load_threads: int = _number(2, 1, 64, "threads that load")
    max_sessions: int = _number(10_000, 2, 10_000_000, "sessions tracked")
    max_keys: int = _number(1_000_000, 1, 100_000_000, "block keys tracked, and known remote")
    session_ttl_s: int = _number(300, 0, MAX_TTL_S, "time after which an idle session is forgotten")
    residency_ttl_s: float = _number(
        300.0, 1.0, 86_400.0, "age after which remote presence is asked for again"
    )
    prefetch_reserve_share: float = _number(
        0.1, 0.0, 1.0, "share of the GPU pool that a prefetch leaves to inference"
    )
    prefetch_inflight_bytes: int = _number(
        64 * MiB, 64 * KiB, 1 * TiB, "bytes of prefetches being loaded"
    )
    background_share: float = _number(
        0.25,
        0.01,
        1.0,
        "share of bytes in flight that background work may have while a request waits for a load",
    )
    max_operations: int = _number(256, 1, 100_000, "offloads and prefetches at a time")
    manifests: bool = field(
        default=True,
        metadata={"doc": "store what a session consists of, so that other engines can prefetch it"},
    )
    events_stream: str = field(
        default="",
        metadata={"doc": "Redis stream to export lifecycle events to; empty: none"},
    )
    events_stream_length: int = _number(
        100_000, 100, 10_000_000, "events kept in that stream, about"
    )
    auto: bool = field(
        default=False, metadata={"doc": "decide by itself whether to retain, offload or drop"}
    )
    keep_alive: KeepAliveConfig = field(default_factory=KeepAliveConfig)
    sam: SamConfig = field(default_factory=SamConfig)

    @property
    def pools(self) -> bool:
        """Whether there is a tier behind the GPU pool at all."""
        return self.host_bytes > 0 or self.remote is not None

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> "SpmConfig":
        """Parse and validate; raises :class:`ConfigError` naming key, value and range."""
        config: SpmConfig = _build(cls, extra, "")
        if not _NAMESPACE.fullmatch(config.namespace):
            raise ConfigError(
                f"namespace={config.namespace!r}: 1 to 64 letters, digits, '_', '.' or '-'"
            )
        if not _STREAM.fullmatch(config.events_stream):
            raise ConfigError(
                f"events_stream={config.events_stream!r}: up to 64 letters, digits, '_', '.', ':' "
                "or '-'"
            )
        if config.save_inflight_bytes > config.staging_bytes:
            raise ConfigError(
                f"save_inflight_bytes={config.save_inflight_bytes}: at most "
                f"staging_bytes={config.staging_bytes}"
            )
        if not _HEADER.fullmatch(config.sam.tenant_header):
            raise ConfigError(
                f"sam.tenant_header={config.sam.tenant_header!r}: a header name (letters, digits, "
                "'-'), or empty"
            )
        if not config.pools and not config.sam.enabled:
            raise ConfigError(
                "host_bytes=0, no remote and sam.enabled=false: there is nothing to do"
            )
        return config


def _build(cls: Any, raw: object, prefix: str) -> Any:  # noqa: ANN401
    """Construct dataclass ``cls`` from a JSON object, checking every key and value."""
    if not isinstance(raw, Mapping):
        name = prefix.rstrip(".") or "extra config"
        raise ConfigError(f"{name}={_shown(raw)}: an object is needed")
    known = {f.name: f for f in fields(cls)}
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else ""
            raise ConfigError(
                f"{prefix}{key}={_shown(value)}: unknown key{hint}; known: {sorted(known)}"
            )
        values[key] = _check(prefix + key, known[key].type, known[key].metadata, value)
    if cls is RemoteConfig:
        if "url" not in values:
            raise ConfigError("remote.url is missing: e.g. redis://127.0.0.1:6379/0")
        _check_url(values["url"])
    return cls(**values)


def _check(name: str, kind: object, metadata: Mapping[str, Any], value: object) -> object:
    """One value against its annotation and range."""
    if kind in (BreakerConfig, KeepAliveConfig, SamConfig):
        return _build(kind, value, name + ".")
    if kind == RemoteConfig | None:
        return None if value is None else _build(RemoteConfig, value, name + ".")
    if kind is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={_shown(value, text=True)}: true or false is needed")
        return value
    if kind is int or kind is float:
        return _check_number(name, kind is int, metadata["range"], value)
    choices = getattr(kind, "__args__", None)
    if choices is not None:
        if value not in choices:
            raise ConfigError(f"{name}={_shown(value, text=True)}: one of {sorted(choices)}")
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{name}={_shown(value)}: a string is needed")
    return value


def _check_number(
    name: str, whole: bool, bounds: tuple[float, float], value: object
) -> int | float:
    what = "a whole number" if whole else "a number"
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise ConfigError(
            f"{name}={_shown(value, text=True)}: {what} from {bounds[0]} to {bounds[1]} is needed"
        )
    if not bounds[0] <= value <= bounds[1]:
        raise ConfigError(f"{name}={value!r}: out of range, {what} from {bounds[0]} to {bounds[1]}")
    return value if whole else float(value)


def _shown(value: object, *, text: bool = False) -> str:
    """``repr`` for an error. Objects, lists, URLs and, unless ``text``, all strings are only
    named: under a misspelt key or in a wrong place they may be a password."""
    plain = value is None or isinstance(value, (bool, int, float))
    if plain or (text and isinstance(value, str) and not re.search(r"[:@]", value)):
        return reprlib.repr(value)
    return f"({type(value).__name__}, not shown)"


def _check_url(url: str) -> None:
    """The scheme decides the client; a URL may hold a password, so it is never quoted."""
    scheme, separator, _ = url.partition("://")
    if scheme not in _SCHEMES or not separator:
        shown = _shown(scheme, text=True) if separator else "''"
        raise ConfigError(f"remote.url has scheme {shown}: one of {list(_SCHEMES)}")
