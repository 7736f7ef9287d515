"""vLLM general plugin: makes ``kv_connector: SessionAwareConnector`` known by name."""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

_NAME = "SessionAwareConnector"


def register() -> None:
    """Called by vLLM in every process it starts; may be called more than once."""
    if _NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(_NAME, "connectors.session_aware", _NAME)
