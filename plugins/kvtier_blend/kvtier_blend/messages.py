"""Messages between the scheduler's connector and those of the workers, beside kvtier's own."""

from __future__ import annotations

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from kvtier_vllm.steps import StepPlanMetadata, WorkerProgressMetadata


@attrs.frozen
class Order:
    """A worker is to arrange the KV of a request when its chunks are loaded. They lie in the request's own blocks,
    one after the other from ``start`` on.
    """

    request_id: str
    loads: frozenset[str]  #: in the step's plan, under these names; the chunks, and perhaps the exact prefix
    start: int
    end: int
    chunks: tuple[tuple[int, int], ...]  #: for each, the place of its first token here, and where it was computed
    runs: tuple[tuple[int, int], ...]  #: tokens to compute: begin and end of each run
    tokens: tuple[int, ...]  #: those in the runs
    blocks: tuple[int, ...]  #: of the request, up to ``end``


@attrs.frozen(slots=False)
class BlendPlanMetadata(StepPlanMetadata):
    """Sent by the scheduler's connector to that of the worker."""

    orders: tuple[Order, ...] = ()


@attrs.frozen(slots=False)
class BlendProgressMetadata(WorkerProgressMetadata):
    """Sent by the worker's connector to the scheduler's, once its test is over."""

    fault: str  #: why this engine cannot blend; empty if it can

    def aggregate(self, other: KVConnectorWorkerMetadata) -> BlendProgressMetadata:
        """Merge the progress of two ranks. Called by vLLM."""
        fault = other.fault if isinstance(other, BlendProgressMetadata) else ""
        return BlendProgressMetadata(self.progress.merge(other.progress), self.fault or fault)
