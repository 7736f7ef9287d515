"""What was called on a connector, as plain data, so that two engines can be compared."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_offload.base import LoadStoreSpec
from vllm.v1.request import Request

from tests.connectors.scheduler.simulated_worker import Slot

Call = tuple[Any, ...]
"""Hook, arguments and answer."""


@dataclass
class RecordedStore:
    """What the engines of one test share, and how it behaves. Other connectors that are recorded
    use the recordings only."""

    values: dict[bytes, list[Slot]] = field(default_factory=dict)
    lookup_steps: int = 0
    """Questions about a request that are answered "ask again"."""
    load_steps: int = 0
    save_steps: int = 0
    fails: Callable[[bytes], bool] = lambda block_hash: False
    """Of blocks that are found to be gone when they are loaded."""
    loads_at_once: bool = False
    """Its loads are synchronous."""
    num_loads: int = 0
    scheduler_calls: list[Call] = field(default_factory=list)
    worker_calls: list[Call] = field(default_factory=list)


_ENVELOPE = "kv_connector_metadata"
"""In a step as workers see it: what the connector's own hooks get out of it is recorded there."""
STORES: dict[str, RecordedStore] = {}
"""By the name in ``kv_connector_extra_config``."""


def plain(value: Any) -> Any:  # noqa: ANN401
    """Data that can be compared between two engines."""
    if isinstance(value, Request):
        computed = value.num_computed_tokens
        return ("request", value.request_id, value.status.name, value.num_tokens, computed)
    if isinstance(value, KVCacheBlocks):
        return ("blocks", value.get_block_ids())
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape))
    if isinstance(value, Enum) or value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, LoadStoreSpec):
        return (type(value).__name__, plain(vars(value)))
    if isinstance(value, (set, frozenset)):
        return ("set", *sorted(map(plain, value), key=repr))
    if isinstance(value, dict):
        return {repr(plain(key)): plain(inside) for key, inside in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inside) for inside in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if f.name != _ENVELOPE]
        parts = {name: plain(getattr(value, name)) for name in names}
        return (type(value).__name__, parts)
    return type(value).__name__


def _recorded(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def recording(self: KVConnectorBase_V1, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        before = plain(args), plain(kwargs)
        answer = hook(self, *args, **kwargs)
        store = STORES[self._kv_transfer_config.kv_connector_extra_config["store"]]
        scheduler = self.role is KVConnectorRole.SCHEDULER
        calls = store.scheduler_calls if scheduler else store.worker_calls
        calls.append((name, *before, plain(answer)))
        return answer

    return recording


def record_hooks(cls: Any) -> Any:  # noqa: ANN401
    """Wrap every public function, inherited ones too: a hook left to vLLM's base class counts."""
    done = {name for name in dir(cls) if hasattr(getattr(cls, name), "__wrapped__")}
    for name in dir(cls):
        found = getattr(cls, name)
        of_class = hasattr(found, "__self__")
        if callable(found) and not (name.startswith("_") or of_class or name in done):
            setattr(cls, name, _recorded(name, found))
    return cls
