"""A store of names whose answers, failures and pauses a test writes, and that notes its calls."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from connectors.stores.base import (
    KVStore,
    ReadRequest,
    StoreCapabilities,
    StoreCapacity,
    StoreKey,
)
from connectors.stores.buffers import Buffer
from spm.errors import StoreError

PATIENCE_S = 10.0
"""Only a broken test waits this long."""

ALL = StoreCapabilities(
    remote=True, delete=True, touch=True, exact_ttl=True, documents=True, streams=True
)


@dataclass(frozen=True)
class Call:
    """What was asked: the method, its names, and its numbers or contents."""

    method: str
    names: tuple[StoreKey, ...]
    detail: Any = None


@dataclass
class Gate:
    """Holds whoever passes until opened; says when somebody is there."""

    entered: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def pass_through(self) -> None:
        self.entered.set()
        assert self.opened.wait(PATIENCE_S)


class ScriptedStore(KVStore):
    """``present``: the names that are there. ``failure`` is raised by every call while set;
    ``unanswered`` names get no answer to a touch."""

    def __init__(self, capabilities: StoreCapabilities = ALL) -> None:
        self._capabilities = capabilities
        self.present: set[StoreKey] = set()
        self.documents: dict[StoreKey, bytes] = {}
        self.unanswered: set[StoreKey] = set()
        self.failure: StoreError | None = None
        self.refuses_writes = False
        self.fullness: StoreCapacity | None = None
        self.gate: Gate | None = None
        self.before: Callable[[Call], None] = lambda call: None
        self.calls: list[Call] = []
        self.deadlines_s: list[float] = []
        self.closed = 0

    def _ask(self, call: Call, deadline_s: float) -> None:
        self.calls.append(call)
        self.deadlines_s.append(deadline_s)
        gate, self.gate = self.gate, None
        if gate is not None:
            gate.pass_through()
        self.before(call)
        if self.failure is not None:
            raise self.failure

    @property
    def capabilities(self) -> StoreCapabilities:
        return self._capabilities

    def contains_many(self, keys: Sequence[StoreKey], deadline_s: float) -> list[bool]:
        self._ask(Call("contains", tuple(keys)), deadline_s)
        return [key in self.present for key in keys]

    def touch_many(
        self, keys: Sequence[StoreKey], deadline_s: float, ttl_s: Sequence[int] | None = None
    ) -> list[bool | None]:
        lives = tuple(ttl_s) if ttl_s is not None else None
        self._ask(Call("touch", tuple(keys), lives), deadline_s)
        return [None if key in self.unanswered else key in self.present for key in keys]

    def delete_many(self, keys: Sequence[StoreKey], deadline_s: float) -> int:
        self._ask(Call("delete", tuple(keys)), deadline_s)
        return len(self.present & set(keys))

    def expire_many(self, keys: Sequence[StoreKey], ttl_s: int, deadline_s: float) -> int:
        self._ask(Call("expire", tuple(keys), ttl_s), deadline_s)
        return len(self.present & set(keys))

    def put_document(self, key: StoreKey, content: bytes, ttl_s: int, deadline_s: float) -> bool:
        self._ask(Call("put", (key,), (content, ttl_s)), deadline_s)
        return not self.refuses_writes

    def get_document(self, key: StoreKey, max_bytes: int, deadline_s: float) -> bytes | None:
        self._ask(Call("get", (key,), max_bytes), deadline_s)
        return self.documents.get(key)

    def append_stream(
        self, key: StoreKey, entries: Sequence[bytes], max_length: int, deadline_s: float
    ) -> int:
        self._ask(Call("append", (key,), (tuple(entries), max_length)), deadline_s)
        return 0 if self.refuses_writes else len(entries)

    def capacity(self, deadline_s: float) -> StoreCapacity | None:
        self._ask(Call("capacity", ()), deadline_s)
        return self.fullness

    def close(self) -> None:
        self.closed += 1

    def get_many(self, reads: Sequence[ReadRequest], deadline_s: float) -> list[Buffer | None]:
        raise NotImplementedError

    def put_many(self, items: Sequence[tuple[StoreKey, Buffer]], deadline_s: float) -> list[bool]:
        raise NotImplementedError

    def check_integrity(self) -> None:
        raise NotImplementedError
