"""Importing this makes LMCache's in-process connector run on CPUs, which it refuses by itself.

LMCache must not be imported before vLLM's worker has started: vLLM looks at all modules then,
and trips over LMCache's.
"""

from importlib import import_module
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

_init = LMCacheConnectorV1.__init__


def _init_on_cpu(self: LMCacheConnectorV1, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
    places: Any = import_module("lmcache.v1.gpu_connector")
    places.CreateGPUConnector = import_module("tests.e2e.cpu_gpu_connector").create
    _init(self, *args, **kwargs)


LMCacheConnectorV1.__init__ = _init_on_cpu  # type: ignore[method-assign]
