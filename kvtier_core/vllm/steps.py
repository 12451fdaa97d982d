"""vLLM's steps as the scheduler side sees them."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from kvtier_core.engine.step import ScheduledRequest, Step, StepResult
from kvtier_core.vllm.metadata import WorkerProgressMetadata


def step_of(output: SchedulerOutput, requests: Sequence[ScheduledRequest], block_tokens: int) -> Step:
    """The step that vLLM's scheduler decided on, which computes tokens of these requests."""
    return Step(
        requests=requests,
        new_blocks=_new_blocks(output, block_tokens),
        block_table=lambda request_id: output.kv_connector_block_state.get_block_ids(request_id)[0],
    )


def _new_blocks(output: SchedulerOutput, block_tokens: int) -> set[int]:
    """Blocks given to requests for this step, except those that vLLM found computed, which are only read."""
    blocks = {
        block
        for new in output.scheduled_new_reqs
        for block in new.block_ids[0][new.num_computed_tokens // block_tokens :]
    }
    for ids in output.scheduled_cached_reqs.new_block_ids:
        if ids:
            blocks.update(ids[0])
    return blocks


def result_of(output: KVConnectorOutput) -> StepResult:
    """What vLLM's workers reported after a step, merged over the ranks."""
    metadata = output.kv_connector_worker_meta
    return StepResult(
        ended_loads=output.finished_recving or (),
        failed_loads=output.failed_recving or (),
        invalid_blocks=output.invalid_block_ids,
        progress=metadata.progress if isinstance(metadata, WorkerProgressMetadata) else None,
    )
