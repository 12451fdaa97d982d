"""`KVTierBlendConnector`: kvtier for vLLM that also reuses KV at other places of prompts, if a request allows it."""

from __future__ import annotations


def register() -> None:
    """Register the connector with vLLM's factory. vLLM calls this in each of its processes, perhaps more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvtier_vllm.reuse import note_wishes

    note_wishes()
    if "KVTierBlendConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVTierBlendConnector", "kvtier_blend.connector", "KVTierBlendConnector")
