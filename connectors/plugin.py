"""vLLM general plugin, loaded by vLLM in every process it starts.

Makes ``kv_connector: SessionAwareConnector`` known by name, and gives the engine core one
utility method, through which API servers reach sessions: on the scheduler's own thread,
between steps, also while the engine is idle.
"""

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.engine.core import EngineCore

_NAME = "SessionAwareConnector"
UTILITY = "spm_manage"
_NO_CONNECTOR = {
    "status": "unsupported",
    "detail": f"this engine runs without {_NAME}; see --kv-transfer-config",
}


def register() -> None:
    """Called by vLLM in every process it starts; may be called more than once."""
    if _NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(_NAME, "connectors.session_aware", _NAME)
    if not hasattr(EngineCore, UTILITY):
        setattr(EngineCore, UTILITY, spm_manage)
    _log_as_vllm_does()


def _log_as_vllm_does() -> None:
    """vLLM gives handlers to its own loggers only; without any, our lines would be lost."""
    theirs = logging.getLogger("vllm")
    for name in ("connectors", "spm", "tracker"):
        ours = logging.getLogger(name)
        if theirs.handlers and not ours.handlers:
            ours.handlers = list(theirs.handlers)
            ours.setLevel(theirs.level)
            ours.propagate = False


def spm_manage(
    engine_core: EngineCore, request: dict[str, Any]
) -> dict[str, Any] | Future[dict[str, Any]]:
    """vLLM's utility call ``spm_manage``. Scheduler thread; vLLM itself waits for a future."""
    for connector in _connectors(engine_core.scheduler.get_kv_connector()):
        manage = getattr(connector, "manage", None)
        if manage is not None and _is_ours(connector):
            # Asleep, its KV memory may be gone: nothing may be moved there.
            asleep = engine_core.is_sleeping()
            answer: dict[str, Any] | Future[dict[str, Any]] = manage(request, asleep=asleep)
            return answer
    return dict(_NO_CONNECTOR)


def _is_ours(connector: Any) -> bool:  # noqa: ANN401  (vLLM's, of any kind)
    """By name: its module is heavy and not imported in every process."""
    return any(cls.__name__ == _NAME for cls in type(connector).__mro__)


def _connectors(connector: Any) -> Iterator[Any]:  # noqa: ANN401  (vLLM's, of any kind)
    """The connector, and its children if it is a ``MultiConnector``."""
    if connector is not None:
        yield connector
        for child in getattr(connector, "sub_connectors", ()):
            yield from _connectors(child)
