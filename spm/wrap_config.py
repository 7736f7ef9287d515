"""Settings of a connector that moves KV in place of our own tiers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spm.config_parsing import number
from spm.errors import ConfigError
from spm.redis_url import check_redis_url

Known = Literal["auto", "yes", "no"]
"""``auto``: what is known of the connector; of one that is not known, the careful answer."""

_HTTP = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(:\d+)?")
_ZMQ = re.compile(r"(tcp|grpc)://(\[[0-9A-Fa-f:.]+\]|[\w.-]+):\d+")


def _check_queue(name: str, url: str) -> None:
    if not _ZMQ.fullmatch(url):
        raise ConfigError(f"{name}: tcp://HOST:PORT is needed, e.g. tcp://127.0.0.1:5555")


def _check_control(name: str, url: str) -> None:
    if not _HTTP.fullmatch(url):
        raise ConfigError(f"{name}: http://HOST:PORT is needed, e.g. http://127.0.0.1:8080")


def _check_optional_redis(name: str, url: str) -> None:
    if url:
        check_redis_url(name, url)


@dataclass(frozen=True, slots=True)
class WrapConfig:
    """Another ``KVConnectorBase_V1``: it loads and saves, we add sessions."""

    kv_connector: str = field(
        metadata={"doc": "its name, as vLLM knows it", "needed": "e.g. LMCacheConnectorV1"}
    )
    kv_connector_module_path: str = field(
        default="", metadata={"doc": "module of a connector that vLLM does not know"}
    )
    kv_connector_extra_config: Mapping[str, Any] = field(
        default_factory=dict, repr=False, metadata={"doc": "its own settings"}
    )
    isolates_cache_salt: Known = field(
        default="auto",
        metadata={"doc": "what it stores is told apart by `cache_salt`; else such requests bypass"},
    )
    isolates_adapters: Known = field(
        default="auto",
        metadata={"doc": "what it stores is told apart by LoRA adapter; else such requests bypass"},
    )
    lookup_refreshes: Known = field(
        default="auto",
        metadata={"doc": "being asked for a prefix keeps it from being evicted"},
    )
    remote_url: str = field(
        default="",
        repr=False,
        metadata={
            "doc": "Redis in which an in-process LMCache keeps its chunks; empty: none",
            "check": _check_optional_redis,
        },
    )

    def __post_init__(self) -> None:
        if self.kv_connector == "SessionAwareConnector":
            raise ConfigError("wrap.kv_connector='SessionAwareConnector': it cannot wrap itself")


@dataclass(frozen=True, slots=True)
class LMCacheConfig:
    """An LMCache multiprocess server on this node (``lmcache server``)."""

    kind: Literal["lmcache"] = field(default="lmcache", metadata={"doc": "what it is"})
    url: str = field(
        default="tcp://127.0.0.1:5555",
        metadata={"doc": "its message queue, which moves KV", "check": _check_queue},
    )
    control_url: str = field(
        default="http://127.0.0.1:8080",
        metadata={"doc": "its HTTP control API", "check": _check_control},
    )
    l2_url: str = field(
        default="",
        repr=False,
        metadata={
            "doc": "the Redis of its RESP adapter, to keep chunks alive there; empty: none",
            "check": _check_optional_redis,
        },
    )
    control_deadline_s: float = number(2.0, 0.01, 600.0, "longest wait for one control request")
    queue_deadline_s: float = number(
        5.0,
        0.1,
        600.0,
        "longest wait of LMCache's connector for its server; a step waits for a frozen one "
        "up to twice as long, until its heartbeat gives the server up",
    )
    save_replies: bool = field(
        default=True, metadata={"doc": "store what the model generated too, not only prompts"}
    )
    extra: Mapping[str, Any] = field(
        default_factory=dict,
        repr=False,
        metadata={"doc": "further settings of LMCacheMPConnector, `lmcache.mp.*`"},
    )

    def __post_init__(self) -> None:
        ours = {"lmcache.mp.host", "lmcache.mp.port", "lmcache.mp.server_urls"}
        if ours & set(self.extra):
            raise ConfigError(f"store.extra: `store.url` says {sorted(ours & set(self.extra))}")

    @property
    def wrapped(self) -> WrapConfig:
        """The connector that talks to the server."""
        settings = {
            "lmcache.mp.server_urls": [self.url],
            "lmcache.mp.save_decode_cache": self.save_replies,
            "lmcache.mp.mq_timeout": self.queue_deadline_s,
        }
        return WrapConfig("LMCacheMPConnector", "", {**settings, **self.extra})
