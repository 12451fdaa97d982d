"""kvtier for vLLM: `KVTierConnector`, which vLLM finds through the entry point group ``vllm.general_plugins``."""

from __future__ import annotations


def register() -> None:
    """Register the connector with vLLM's factory. vLLM calls this in each of its processes, perhaps more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvtier_vllm.reuse import note_wishes

    note_wishes()
    if "KVTierConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVTierConnector", "kvtier_vllm.connector", "KVTierConnector")
