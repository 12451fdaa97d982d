"""vLLM's steps as the scheduler side sees them, and its metadata classes, which carry kvtier's messages."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from kvtier_core.engine.messages import StepPlan, WorkerProgress
from kvtier_core.engine.step import ScheduledRequest, Step, StepResult
from kvtier_vllm.groups import Tables
from kvtier_vllm.speculation import DraftModel


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


def step_of(
    output: SchedulerOutput, requests: Sequence[ScheduledRequest], tables: Tables, draft: DraftModel | None
) -> Step:
    """The step that vLLM's scheduler decided on, which computes tokens of these requests."""
    return Step(
        requests=requests,
        new_blocks=tables.new_blocks(output),
        block_tables=lambda request_id: tables.of_request(output.kv_connector_block_state.get_block_ids(request_id)),
        states=tables.states(output, requests),
        writes_all=draft is None or draft.computes(max((request.end for request in requests), default=0)),
    )


def result_of(output: KVConnectorOutput) -> StepResult:
    """The reports of vLLM's workers after a step, merged over the ranks."""
    metadata = output.kv_connector_worker_meta
    return StepResult(
        ended_loads=output.finished_recving or (),
        failed_loads=output.failed_recving or (),
        invalid_blocks=output.invalid_block_ids,
        progress=metadata.progress if isinstance(metadata, WorkerProgressMetadata) else None,
    )
