"""What crosses the process boundary, both ways. Plain data: no tensors, no pointers, no views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvtier_core.types import Slot


def _pairs(rows: Iterable[Iterable[str]]) -> tuple[tuple[str, str], ...]:
    return tuple((name, fact) for name, fact in rows)


@attrs.frozen
class WorkerReport:
    """What a worker found when it saw the engine's pages. From each worker to the scheduler, once, as JSON."""

    device: str  #: its type, in torch's words
    page_nbytes: tuple[int, ...] = attrs.field(converter=tuple)  #: of each layer, in the order of a shard
    facts: tuple[tuple[str, str], ...] = attrs.field(converter=_pairs)  #: what else makes pages interchangeable
    refusal: str = ""  #: why these pages cannot be moved, in plain words
    failure_policy: str = ""  #: ``kv_load_failure_policy`` of the engine's own connector; empty: not known


@attrs.frozen
class Transfer:
    """Chunks between slots and pages. ``pages[i]`` are the block ids of the chunk in ``slots[i]``, or NO_BLOCK."""

    slots: tuple[Slot, ...]
    pages: tuple[tuple[int, ...], ...]


@attrs.frozen(slots=False)
class StepPlan(KVConnectorMetadata):
    """One step's work. From the scheduler to every worker."""

    arenas: tuple[str, ...] = ()  #: handles, by the number of the arena
    trial: tuple[Slot, ...] = ()  #: an empty slot of each arena, for the self-test
    loads: tuple[tuple[str, Transfer], ...] = ()  #: by request id
    stores: tuple[tuple[int, Transfer], ...] = ()  #: by job
    stores_to_fence: tuple[int, ...] = ()  #: store jobs not known to have ended, whose pages the engine gave away again
    failed_loads: tuple[str, ...] = ()  #: requests that were promised a load which cannot begin


@attrs.frozen(slots=False)
class Progress(KVConnectorWorkerMetadata):
    """What workers ended, store jobs or the self-test, and what they summed. From the workers to the scheduler."""

    ended: Counter[int] = attrs.field(factory=Counter)
    failed: Counter[int] = attrs.field(factory=Counter)
    tried: Counter[str] = attrs.field(factory=Counter)  #: what self-tests found wrong; empty: nothing
    checksums: dict[tuple[int, int], tuple[int, ...]] = attrs.field(factory=dict)  #: of shards, by job and rank

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Progress:
        return Progress(
            self.ended + other.ended,
            self.failed + other.failed,
            self.tried + other.tried,
            self.checksums | other.checksums,
        )
