"""What a server says about its engines, typed; frozen, ``raw`` is the whole JSON object."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spm.client.fields import Fields


@dataclass(frozen=True, slots=True)
class GpuTier:
    """vLLM's block pool."""

    blocks: int
    free_blocks: int
    protected_blocks: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class HostTier:
    """Memory near the workers."""

    blocks: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class RemoteTier:
    """The store; ``breaker`` is ``closed`` while it is used, and if not the worst of
    ``breakers``, by side, where a server has several. ``slow``: hits are computed because that
    is faster. How full it is may not be known (None), and it may have no limit (None)."""

    kind: str
    url: str
    breaker: str
    known_blocks: int
    used_bytes: int | None = None
    limit_bytes: int | None = None
    breakers: Mapping[str, str] = field(default_factory=dict)
    slow: bool = False


@dataclass(frozen=True, slots=True)
class Queue:
    """Store work of one class."""

    waiting: int
    in_flight: int
    in_flight_bytes: int


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Keys that are kept alive; ``behind_s``: how late the latest round was."""

    keys: int
    interval_s: float
    behind_s: float
    keys_per_s: float


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine. A tier, keep-alive or speed that is None does not exist or is not known."""

    engine: int
    sessions: int
    active_requests: int
    session_keys: int
    gpu: GpuTier | None
    host: HostTier | None
    remote: RemoteTier | None
    capabilities: Mapping[str, bool]
    queues: Mapping[str, Queue]
    keep_alive: KeepAlive | None
    host_bytes_per_s: float | None
    remote_bytes_per_s: float | None
    operations: int


@dataclass(frozen=True, slots=True)
class SilentEngine:
    """An engine that had no status to give, and why."""

    engine: int
    status: str
    detail: str | None


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """All engines behind a server."""

    engines: tuple[EngineStatus, ...]
    silent: tuple[SilentEngine, ...]
    raw: Mapping[str, Any] = field(repr=False, compare=False)


def parse_status(answer: Fields) -> ServerStatus:
    """The answer of ``GET /v1/spm/status``; raises :class:`ProtocolError`."""
    said = answer.objects("engines")
    return ServerStatus(
        engines=tuple(_parse_engine(one) for one in said if "sessions" in one.raw),
        silent=tuple(
            SilentEngine(one.count("engine"), one.text("status"), one.optional_text("detail"))
            for one in said
            if "sessions" not in one.raw
        ),
        raw=answer.raw,
    )


def _parse_engine(said: Fields) -> EngineStatus:
    tiers, speeds = said.object("tiers"), said.object("speeds")
    capabilities, queues = said.object("capabilities"), said.object("queues")
    gpu, host, remote, keep_alive = (
        tiers.optional_object("gpu"),
        tiers.optional_object("host"),
        tiers.optional_object("remote"),
        said.optional_object("keep_alive"),
    )
    return EngineStatus(
        engine=said.count("engine"),
        sessions=said.count("sessions"),
        active_requests=said.count("active_requests"),
        session_keys=said.count("session_keys"),
        gpu=None if gpu is None else _parse_gpu(gpu),
        host=None if host is None else HostTier(host.count("blocks"), host.count("capacity_bytes")),
        remote=None if remote is None else _parse_remote(remote),
        capabilities={k: v for k, v in capabilities.raw.items() if isinstance(v, bool)},
        queues={name: _parse_queue(queues.object(name)) for name in queues.raw},
        keep_alive=None if keep_alive is None else _parse_keep_alive(keep_alive),
        host_bytes_per_s=speeds.optional_number("host_bytes_per_s"),
        remote_bytes_per_s=speeds.optional_number("remote_bytes_per_s"),
        operations=said.count("operations"),
    )


def _parse_gpu(said: Fields) -> GpuTier:
    return GpuTier(
        said.count("blocks"),
        said.count("free_blocks"),
        said.count("protected_blocks"),
        said.count("block_bytes"),
    )


def _parse_remote(said: Fields) -> RemoteTier:
    breakers = said.optional_object("breakers")
    return RemoteTier(
        said.text("kind"),
        said.text("url"),
        said.text("breaker"),
        said.count("known_blocks"),
        said.optional_count("used_bytes"),
        said.optional_count("limit_bytes"),
        {} if breakers is None else {side: breakers.text(side) for side in breakers.raw},
        said.flag("slow", default=False),
    )


def _parse_queue(said: Fields) -> Queue:
    return Queue(said.count("waiting"), said.count("in_flight"), said.count("in_flight_bytes"))


def _parse_keep_alive(said: Fields) -> KeepAlive:
    return KeepAlive(
        said.count("keys"),
        said.number("interval_s"),
        said.number("behind_s"),
        said.number("keys_per_s"),
    )
