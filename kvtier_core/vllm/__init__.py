"""The vLLM edge: `KVTierConnector`, found by vLLM through the entry point ``vllm.general_plugins``."""

from __future__ import annotations


def register() -> None:
    """Tell vLLM's factory where the connector is. Runs in every vLLM process, maybe more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KVTierConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVTierConnector", "kvtier_core.vllm.connector", "KVTierConnector")
