"""A connector in which every name of vLLM's base class only says that it was asked."""

from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

PUBLIC = {name for cls in (KVConnectorBase_V1, SupportsHMA) for name in dir(cls) if name[0] != "_"}
"""What vLLM may ask of a connector."""


def _method(name: str) -> Callable[..., Any]:
    def hook(self: "KVConnectorBase_V1", *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        spy: Any = self
        spy.heard.append((name, args, kwargs))
        return spy.answers[name]

    return hook


def _class_method(name: str) -> Any:  # noqa: ANN401
    def hook(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        cls.class_heard.append((name, args, kwargs))
        return cls.class_answers[name]

    return classmethod(hook)


def _property(name: str) -> property:
    def read(self: KVConnectorBase_V1) -> Any:  # noqa: ANN401
        spy: Any = self
        spy.heard.append((name, (), {}))
        return spy.answers[name]

    return property(read)


def _spying(name: str) -> Any:  # noqa: ANN401
    of_base = getattr(SupportsHMA, name, None) or getattr(KVConnectorBase_V1, name)
    if isinstance(of_base, property):
        return _property(name)
    return _class_method(name) if hasattr(of_base, "__self__") else _method(name)


def _begin(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:  # noqa: ANN401
    KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
    self.heard = []
    self.answers = {name: f"answer to {name}" for name in PUBLIC}
    self.special = "what only this connector has"


Spy: Any = type(
    "Spy",
    (KVConnectorBase_V1, SupportsHMA),
    {
        "__init__": _begin,
        "__module__": __name__,
        "class_heard": [],
        "class_answers": {name: f"class answer to {name}" for name in PUBLIC},
        **{name: _spying(name) for name in PUBLIC - {"role"}},
    },
)
