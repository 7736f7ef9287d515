"""Frozen, validated settings from ``kv_connector_extra_config``.

Every refusal quotes the key, the value (unless it may be a secret) and what is allowed.
Unknown keys are errors: a setting that is silently ignored is a setting somebody relies on.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spm.config_parsing import build, number
from spm.errors import ConfigError
from spm.remote_config import RemoteConfig
from spm.wrap_config import LMCacheConfig, WrapConfig

KiB, MiB, GiB, TiB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
MAX_TTL_S = 3600
"""Longest retention a hint may ask for (vLLM RFC #52113)."""

_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_STREAM = re.compile(r"[A-Za-z0-9_.:-]{0,64}")
_HEADER = re.compile(r"[A-Za-z0-9-]{0,64}")


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
    max_protected_share: float = number(
        0.5, 0.0, 1.0, "share of the pool that hints may protect, all tenants together"
    )
    max_tenant_protected_share: float = number(
        0.5, 0.0, 1.0, "share of the pool that one tenant's hints may protect"
    )
    max_tenant_operations_share: float = number(
        0.5,
        0.01,
        1.0,
        "share of `max_operations`, and of calls waiting for an answer, that one tenant may have "
        "where tenants are told apart",
    )
    soon_s: float = number(
        10.0, 0.0, MAX_TTL_S, "a resume expected within this time is protected longest"
    )
    resume_first_s: float = number(
        0.0,
        0.0,
        MAX_TTL_S,
        "longest wait of a session's request that would displace blocks of sessions expected "
        "back within `soon_s`; 0: none waits",
    )
    tenant_header: str = field(
        default="",
        metadata={"doc": "header in which a trusted gateway names the tenant; empty: none"},
    )
    tenant_from_api_key: bool = field(
        default=False, metadata={"doc": "each API key is a tenant of its own"}
    )
    tenant_cache_salt: bool = field(
        default=True,
        metadata={
            "doc": "where tenants are told apart, none finds another's KV: `cache_salt` is derived "
            "from the tenant and the request's own"
        },
    )

    @property
    def tells_tenants(self) -> bool:
        """Whether requests may belong to any tenant but the default one."""
        return bool(self.tenant_header) or self.tenant_from_api_key

    @property
    def salts_tenants(self) -> bool:
        """Whether tenants' KV is kept apart."""
        return self.tells_tenants and self.tenant_cache_salt

    def tenant_part(self, limit: int) -> int:
        """How many of ``limit`` one tenant may have, at least one."""
        if not self.tells_tenants:
            return limit
        return max(1, int(limit * self.max_tenant_operations_share))


@dataclass(frozen=True, slots=True)
class KeepAliveConfig:
    """How stored values of sessions are kept from being evicted or expiring."""

    interval_s: float = number(
        30.0,
        1.0,
        3600.0,
        "a value kept alive is touched about once in this time, or in a third of `remote.ttl_s`",
    )
    max_keys_per_s: int = number(
        50_000, 1, 10_000_000, "stored values touched or deleted in a second"
    )
    delete_grace_s: int = number(
        60,
        0,
        3600,
        "time another engine has to touch a value deleted here, at least two intervals; "
        "0: deleted at once",
    )


@dataclass(frozen=True, slots=True)
class SpmConfig:
    """All settings of one engine. Byte and thread counts are per worker."""

    host_bytes: int = number(4 * GiB, 0, 64 * TiB, "host tier; 0: none")
    staging_bytes: int = number(
        512 * MiB, 1 * MiB, 1 * TiB, "buffers for values being saved or loaded"
    )
    remote: RemoteConfig | None = field(
        default=None, metadata={"doc": "shared store; absent: host tier only"}
    )
    namespace: str = field(default="spm", metadata={"doc": "first part of every key"})
    save: Literal["all", "sessions"] = field(
        default="all", metadata={"doc": "save blocks of every request, or only of sessions"}
    )
    load_deadline_s: float = number(10.0, 0.01, 600.0, "longest load of one request")
    batch_deadline_s: float = number(2.0, 0.01, 600.0, "longest wait for one round trip")
    lookup_deadline_s: float = number(0.25, 0.001, 60.0, "longest wait for an existence answer")
    save_deadline_s: float = number(30.0, 0.01, 600.0, "longest background write of one batch")
    stop_deadline_s: float = number(
        4.0,
        0.01,
        600.0,
        "longest wait for writes at a stop; a few seconds, as vLLM kills a worker after 9 s",
    )
    save_inflight_bytes: int = number(
        256 * MiB, 64 * KiB, 1 * TiB, "bytes copied from the GPU pool and not yet stored"
    )
    batch_bytes: int = number(16 * MiB, 4 * KiB, 1 * GiB, "bytes moved in one round trip")
    load_threads: int = number(2, 1, 64, "threads that load")
    max_sessions: int = number(10_000, 2, 10_000_000, "sessions tracked")
    max_keys: int = number(1_000_000, 1, 100_000_000, "block keys tracked, and known remote")
    session_ttl_s: int = number(300, 0, MAX_TTL_S, "time after which an idle session is forgotten")
    residency_ttl_s: float = number(
        300.0, 1.0, 86_400.0, "age after which remote presence is asked for again"
    )
    prefetch_reserve_share: float = number(
        0.1, 0.0, 1.0, "share of the GPU pool that a prefetch leaves to inference"
    )
    prefetch_inflight_bytes: int = number(
        64 * MiB, 64 * KiB, 1 * TiB, "bytes of prefetches being loaded"
    )
    background_share: float = number(
        0.25,
        0.01,
        1.0,
        "share of bytes in flight that background work may have while a request waits for a load",
    )
    max_operations: int = number(256, 1, 100_000, "offloads and prefetches at a time")
    manifests: bool = field(
        default=True,
        metadata={"doc": "store what a session consists of, so that other engines can prefetch it"},
    )
    events_stream: str = field(
        default="",
        metadata={"doc": "Redis stream to export lifecycle events to; empty: none"},
    )
    events_stream_length: int = number(
        100_000, 100, 10_000_000, "events kept in that stream, about"
    )
    auto: bool = field(
        default=False, metadata={"doc": "decide by itself whether to retain, offload or drop"}
    )
    store: LMCacheConfig | None = field(
        default=None, metadata={"doc": "an LMCache server in place of the tiers above"}
    )
    wrap: WrapConfig | None = field(
        default=None, metadata={"doc": "another connector in place of the tiers above"}
    )
    max_chain_tokens: int = number(
        64 * MiB, 0, 64 * GiB, "tokens of sessions remembered to ask a wrapped connector about"
    )
    keep_alive: KeepAliveConfig = field(default_factory=KeepAliveConfig)
    sam: SamConfig = field(default_factory=SamConfig)

    @property
    def pools(self) -> bool:
        """Whether there are tiers of our own behind the GPU pool."""
        return self.wrapped is None and (self.host_bytes > 0 or self.remote is not None)

    @property
    def wrapped(self) -> WrapConfig | None:
        """The connector that moves KV in our place, if there is one."""
        return self.store.wrapped if self.store is not None else self.wrap

    @property
    def holds_keys(self) -> bool:
        """Whether stored values can be kept alive and deleted by their names."""
        if self.store is not None:
            return True
        if self.wrap is not None:
            return bool(self.wrap.remote_url)
        return self.remote is not None

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> "SpmConfig":
        """Parse and validate; raises :class:`ConfigError` naming key, value and range."""
        config: SpmConfig = build(cls, extra, "")
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
        _refuse_mixed(config, extra)
        if not config.pools and config.wrapped is None and not config.sam.enabled:
            raise ConfigError(
                "host_bytes=0, no remote and sam.enabled=false: there is nothing to do"
            )
        return config


_OWN_TIERS_ONLY = frozenset(
    [
        "staging_bytes",
        "namespace",
        "save",
        "lookup_deadline_s",
        "save_deadline_s",
        "stop_deadline_s",
        "save_inflight_bytes",
        "batch_bytes",
        "load_threads",
        "background_share",
        "manifests",
        "events_stream",
        "events_stream_length",
        "auto",
    ]
)
"""Settings that mean nothing where another connector moves KV."""


def _refuse_mixed(config: SpmConfig, extra: Mapping[str, Any]) -> None:
    """One connector moves KV, and no setting is ignored."""
    if config.wrapped is None:
        return
    movers = ("store", "wrap", "remote", "host_bytes")
    named = [name for name in movers if extra.get(name) not in (None, 0)]
    if len(named) > 1:
        raise ConfigError(
            f"{' and '.join(named)}: one connector moves KV; give `store`, `wrap`, or our own "
            "tiers (`host_bytes`, `remote`)"
        )
    idle = sorted(_OWN_TIERS_ONLY & set(extra))
    if idle:
        raise ConfigError(
            f"{', '.join(idle)}: of our own tiers, and has no effect beside `{named[0]}`"
        )
