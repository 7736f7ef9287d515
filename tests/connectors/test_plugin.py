"""The engine core's utility method finds our connector, also inside a ``MultiConnector``."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.engine.core import EngineCore

from connectors import plugin


class SessionAwareConnector:
    """Answers like ours; found by its name."""

    def manage(self, request: dict[str, Any], *, asleep: bool) -> dict[str, Any]:
        return {"status": "ok", "asked": request["op"], "asleep": asleep}


class Wrapping(SessionAwareConnector):
    """A subclass, as is built around another connector."""


class Other:
    """Another connector, which happens to have a method of that name."""

    def manage(self, request: dict[str, Any], *, asleep: bool) -> dict[str, Any]:
        raise AssertionError("not for this one")


def core_with(connector: object, *, asleep: bool = False) -> Any:  # noqa: ANN401
    scheduler = SimpleNamespace(get_kv_connector=lambda: connector)
    return SimpleNamespace(scheduler=scheduler, is_sleeping=lambda: asleep)


@pytest.mark.parametrize(
    "connector",
    [
        SessionAwareConnector(),
        Wrapping(),
        SimpleNamespace(sub_connectors=[Other(), SessionAwareConnector()]),
        SimpleNamespace(sub_connectors=[SimpleNamespace(sub_connectors=[SessionAwareConnector()])]),
    ],
)
@pytest.mark.parametrize("asleep", [False, True])
def test_the_connector_answers(connector: object, asleep: bool) -> None:
    answer = plugin.spm_manage(core_with(connector, asleep=asleep), {"op": "x"})
    assert answer == {"status": "ok", "asked": "x", "asleep": asleep}


@pytest.mark.parametrize("connector", [None, Other(), SimpleNamespace(sub_connectors=[Other()])])
def test_an_engine_without_it_says_so(connector: object) -> None:
    answer = plugin.spm_manage(core_with(connector), {"op": "x"})
    assert isinstance(answer, dict)
    assert answer["status"] == "unsupported"
    assert "--kv-transfer-config" in answer["detail"]


def test_registering_twice_is_registering_once() -> None:
    plugin.register()
    method = getattr(EngineCore, plugin.UTILITY)
    plugin.register()
    assert getattr(EngineCore, plugin.UTILITY) is method
    assert "SessionAwareConnector" in KVConnectorFactory._registry
