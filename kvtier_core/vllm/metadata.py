"""kvtier's messages in the metadata classes that vLLM carries between its processes."""

from __future__ import annotations

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvtier_core.engine.messages import StepPlan, WorkerProgress


@attrs.frozen(slots=False)
class StepPlanMetadata(KVConnectorMetadata):
    """Sent by the scheduler's connector to that of every worker."""

    plan: StepPlan


@attrs.frozen(slots=False)
class WorkerProgressMetadata(KVConnectorWorkerMetadata):
    """Sent by the workers' connectors to the scheduler's."""

    progress: WorkerProgress

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerProgressMetadata:
        """Merge the progress of two ranks. Called by vLLM."""
        return WorkerProgressMetadata(self.progress.merge(other.progress))
