"""kvtier's messages in the envelopes that vLLM carries between its processes."""

from __future__ import annotations

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvtier_core.engine.messages import StepPlan, WorkerProgress


@attrs.frozen(slots=False)
class StepPlanMetadata(KVConnectorMetadata):
    """From the scheduler's connector to that of every worker."""

    plan: StepPlan


@attrs.frozen(slots=False)
class WorkerProgressMetadata(KVConnectorWorkerMetadata):
    """From the workers' connectors to the scheduler's."""

    progress: WorkerProgress

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerProgressMetadata:
        """What vLLM calls to merge the reports of two ranks."""
        return WorkerProgressMetadata(self.progress.merge(other.progress))
