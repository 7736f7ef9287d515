"""LMCache's public HTTP control API: warm prefetch, delete, clear, status.

Read from LMCache 0.5.6 (``lmcache/v1/multiprocess/http_apis``). Node-local: it controls one
server's host tier (L1) and the second tier (L2) behind it. There is no authentication.
"""

import json
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import quote

from connectors.lmcache.http_call import HttpCaller
from spm.errors import StoreError, StoreRefusedError

MAX_PREFETCH_TOKENS = 1_000_000
"""LMCache refuses more in one request."""
MAX_DELETED_OBJECTS = 10_000
"""The same."""

_MAX_ANSWER_BYTES = 4 * 1024 * 1024
_MAX_QUOTED = 200
_TOKENS_A_PIECE = 4096


class DeleteTier(str, Enum):
    """Where objects are deleted."""

    HOST = "l1"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class ObjectName:
    """One object of LMCache's: a chunk's KV of one worker."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    cache_salt: str = ""

    def to_wire(self) -> dict[str, Any]:
        """LMCache's ``EncodedObjectKey``; object group 0, the only one we know names of."""
        return {
            "chunk_hash_hex": self.chunk_hash.hex(),
            "model_name": self.model_name,
            "kv_rank": self.kv_rank,
            "object_group_id": 0,
            "cache_salt": self.cache_salt,
        }


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """What a server is, and how full."""

    chunk_tokens: int
    hash_algorithm: str
    has_l2: bool
    """Whether there is a tier behind its host memory."""
    used_bytes: int
    limit_bytes: int
    """Of its host tier."""

    @property
    def kind(self) -> tuple[int, str, bool]:
        """All but how full it is."""
        return self.chunk_tokens, self.hash_algorithm, self.has_l2


@dataclass(frozen=True, slots=True)
class WarmRequest:
    """Bring the objects of these tokens' whole chunks into the server's host tier. Only the
    first ``num_tokens`` count: whoever owns ``tokens`` may append to them meanwhile."""

    tokens: "array[int]"
    num_tokens: int
    cache_salt: str


@dataclass(frozen=True, slots=True)
class WarmResult:
    """Objects there are in the host tier now, of those asked for."""

    found: int
    total: int


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """``skipped``: in use just now, so still in the host tier."""

    deleted: int
    skipped: int


class LMCacheControl:
    """Blocking calls, for an I/O thread; any number at once.

    ``deadline_s`` is a monotonic instant. Raises ``StoreUnavailableError``,
    ``StoreTimeoutError``, ``StoreRefusedError`` (the server answered, and would not) or
    ``StoreError`` (it answered nonsense).
    """

    def __init__(
        self,
        url: str,
        model_name: str,
        world_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``model_name`` and ``world_size``: as LMCache's connector registered the model."""
        self._http = HttpCaller(url, _MAX_ANSWER_BYTES, clock)
        self._model_name = model_name
        self._world_size = world_size

    def status(self, deadline_s: float) -> ServerStatus:
        """What the server is."""
        said = self._ask("GET", "/status", (), deadline_s)
        storage = _mapping(said.get("storage_manager"))
        used, limit = _pair(storage.get("l1_usage"))
        return ServerStatus(
            _count(said, "chunk_size", low=1),
            _text(said, "hash_algorithm"),
            _count(storage, "num_l2_adapters") > 0,
            used,
            limit,
        )

    def submit_warm(self, request: WarmRequest, deadline_s: float) -> str | None:
        """Begin a warm prefetch; its name for :meth:`poll_warm`. None: not one whole chunk.
        Refused (503) for a model that no worker has registered."""
        said = self._ask("POST", "/cache/prefetches", self._prefetch_body(request), deadline_s)
        return None if said.get("status") == "noop" else _text(said, "request_id")

    def poll_warm(self, name: str, deadline_s: float) -> WarmResult | None:
        """None: it goes on. A result is told once; then, or after a restart, the name is
        refused (404)."""
        said = self._ask("GET", f"/cache/prefetches/{quote(name, safe='')}", (), deadline_s)
        if said.get("status") == "pending":
            return None
        return WarmResult(_count(said, "found_keys"), _count(said, "total_keys"))

    def delete(
        self, objects: Sequence[ObjectName], tier: DeleteTier, deadline_s: float
    ) -> DeleteResult:
        """At once and idempotent, up to :data:`MAX_DELETED_OBJECTS`. Objects being read or
        written stay in the host tier. What the second tier fails to delete is an error."""
        body = {"tier": tier.value, "keys": [one.to_wire() for one in objects]}
        said = self._ask("DELETE", "/cache/objects", (json.dumps(body).encode(),), deadline_s)
        if said.get("ok") is not True:
            raise StoreError(f"{self._http.place}: {_quoted(said.get('error'))}")
        return DeleteResult(_count(said, "deleted"), _count(said, "skipped"))

    def clear_host_tier(self, deadline_s: float) -> None:
        """Empty it, but for what is in use. The second tier stays."""
        self._ask("POST", "/cache/clear", (b'{"tier": "l1"}',), deadline_s)

    def _prefetch_body(self, request: WarmRequest) -> Iterator[bytes]:
        """In pieces: the interpreter's lock is not held through a million tokens."""
        head = {
            "model_name": self._model_name,
            "world_size": self._world_size,
            "cache_salt": request.cache_salt,
        }
        yield json.dumps(head)[:-1].encode() + b', "token_ids": ['
        for at in range(0, request.num_tokens, _TOKENS_A_PIECE):
            piece = request.tokens[at : min(at + _TOKENS_A_PIECE, request.num_tokens)]
            yield (b"," if at and piece else b"") + ",".join(map(str, piece)).encode()
        yield b"]}"

    def _ask(
        self, method: str, path: str, body: Iterable[bytes], deadline_s: float
    ) -> Mapping[str, Any]:
        answer = self._http.call(method, path, body, deadline_s)
        try:
            said = json.loads(answer.body)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{self._http.place}: HTTP {answer.status}, no JSON") from error
        if not 200 <= answer.status < 300:
            why = _quoted(_mapping(said).get("detail"))
            raise StoreRefusedError(f"{self._http.place}: HTTP {answer.status}, {why}")
        return _mapping(said)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _quoted(value: object) -> str:
    return str(value)[:_MAX_QUOTED]


def _text(said: Mapping[str, Any], name: str) -> str:
    value = said.get(name)
    if not isinstance(value, str) or not value:
        raise StoreError(f"LMCache answered without {name!r}")
    return value


def _count(said: Mapping[str, Any], name: str, low: int = 0) -> int:
    value = said.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise StoreError(f"LMCache answered without a valid {name!r}")
    return value


def _pair(value: object) -> tuple[int, int]:
    """Two counts; zeros for anything else: they are only shown."""
    match value:
        case [int(used), int(limit)]:
            return used, limit
    return 0, 0
